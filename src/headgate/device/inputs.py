"""Turns a plan into the tensors of one step: index columns on the host, then a gather on the device.

`Inputs.lay_out` uses only the plan: it turns lists into indices, in staging memory that is allocated once.
`Inputs.gather` uses only indices: it reads tokens and tables from the device rows into buffers that are allocated
once, with a fixed, short sequence of operations, so that it can be captured in a CUDA graph.

Both return views of those buffers, valid until the next step is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headgate.device.rows import Ints, Rows, pinned
from headgate.layers.batch import Batch, of_groups
from headgate.protocol.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan as arrays on the host. Slice `s` owns tokens `query_starts[s] : query_starts[s + 1]`."""

    rows: Ints  # [S]
    starts: Ints  # [S]
    ends: Ints  # [S] starts + counts
    query_starts: Ints  # [S + 1]
    sampling: Ints  # [R] the slices that sample
    num_tokens: int
    max_query: int
    max_context: int
    singles: bool  # there are slices of one token among longer ones


class Inputs:
    """Builds the `Batch` of each plan, for plans of at most `max_tokens` tokens."""

    def __init__(self, rows: Rows, *, max_tokens: int) -> None:
        self._rows = rows
        self._max_tokens = max_tokens
        device = rows.tokens.device
        slices = min(rows.max_rows, max_tokens)
        self._per_token = _Staging(4, max_tokens, torch.int64, device)
        self._slice_rows = _Staging(1, slices, torch.int64, device)
        self._per_slice = _Staging(2, slices + 1, torch.int32, device)
        self._tokens = torch.empty(max_tokens, dtype=torch.int64, device=device)
        self._slots = torch.empty(rows.groups, max_tokens, dtype=torch.int64, device=device)
        self._gathered = torch.empty(max_tokens, dtype=torch.int32, device=device)
        self._tables = torch.empty(rows.groups, slices * rows.tables.shape[2], dtype=torch.int32, device=device)
        self._counting: Ints = np.arange(max_tokens, dtype=np.int64)

    def lay_out(self, plan: StepPlan) -> Layout:
        """The host's part: compute every index the device will need, from the plan alone."""
        rows = np.array(plan.rows, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        ends = starts + counts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_starts[1:])
        layout = Layout(
            rows=rows,
            starts=starts,
            ends=ends,
            query_starts=query_starts,
            sampling=np.flatnonzero(plan.samples),
            num_tokens=int(query_starts[-1]),
            max_query=int(counts.max()),
            max_context=int(ends.max()),
            singles=bool((counts == 1).any()),
        )
        assert layout.num_tokens <= self._max_tokens, (
            f"plan {plan.step} has {layout.num_tokens} tokens; steps take at most {self._max_tokens}"
        )
        self._stage(layout, counts)
        return layout

    def gather(self, layout: Layout) -> Batch:
        """The device's part: read tokens and tables from the rows, as they are when the device runs this."""
        T, S = layout.num_tokens, len(layout.rows)
        positions, token_index, table_index, offsets = self._per_token.upload(T)
        query_starts, context_lens = self._per_slice.upload(S + 1)
        (slice_rows,) = self._slice_rows.upload(S)
        gathered, tokens = self._gathered[:T], self._tokens[:T]

        torch.index_select(self._rows.tokens.view(-1), 0, token_index, out=gathered)
        tokens.copy_(gathered)

        def batch_of(group: int) -> Batch:
            return Batch(
                tokens=tokens,
                positions=positions,
                slots=self._gather_slots(group, table_index, offsets),
                query_starts=query_starts,
                context_lens=context_lens[:S],
                block_tables=self._gather_tables(group, slice_rows, layout.max_context),
                max_query=layout.max_query,
                max_context=layout.max_context,
                singles=layout.singles,
            )

        return of_groups([batch_of(group) for group in range(self._rows.groups)])

    def _gather_slots(self, group: int, table_index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        gathered, slots = self._gathered[: len(offsets)], self._slots[group, : len(offsets)]
        torch.index_select(self._rows.tables[group].view(-1), 0, table_index, out=gathered)
        slots.copy_(gathered)
        return slots.mul_(self._rows.block_size).add_(offsets)

    def _gather_tables(self, group: int, slice_rows: torch.Tensor, max_context: int) -> torch.Tensor:
        S, width = len(slice_rows), -(-max_context // self._rows.block_size)
        tables = self._tables[group, : S * width].view(S, width)
        torch.index_select(self._rows.tables[group, :, :width], 0, slice_rows, out=tables)
        return tables

    def _stage(self, layout: Layout, counts: Ints) -> None:
        T, S, rows = layout.num_tokens, len(layout.rows), self._rows
        positions, token_index, table_index, offsets = self._per_token.host(T)
        np.add(self._counting[:T], np.repeat(layout.starts - layout.query_starts[:-1], counts), out=positions)
        token_rows = np.repeat(layout.rows, counts)
        np.add(token_rows * rows.tokens.shape[1], positions, out=token_index)
        np.divmod(positions, rows.block_size, out=(table_index, offsets))
        np.add(table_index, token_rows * rows.tables.shape[2], out=table_index)

        query_starts, context_lens = self._per_slice.host(S + 1)
        query_starts[:] = layout.query_starts
        context_lens[:S] = layout.ends
        self._slice_rows.host(S)[0, :] = layout.rows


class _Staging:
    """`columns` columns of equal length, written by the host, read by the device and moved in one copy."""

    def __init__(self, columns: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._host = torch.zeros(columns * length, dtype=dtype)
        self._numpy: npt.NDArray[np.int64] = self._host.numpy()
        # On the CPU both are the same memory, and an upload costs nothing.
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)

    def host(self, length: int) -> npt.NDArray[np.int64]:
        return self._numpy[: self._columns * length].reshape(self._columns, length)

    def upload(self, length: int) -> torch.Tensor:
        size = self._columns * length
        if self._device is not self._host:
            # The next step is laid out before this one has run, so this step needs its own copy.
            self._device[:size].copy_(pinned(self._host[:size]), non_blocking=True)
        return self._device[:size].view(self._columns, length)
