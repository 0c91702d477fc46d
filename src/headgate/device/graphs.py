"""Runs whole steps as CUDA graphs: from device rows to sampled tokens, with one call by the host.

A step whose slices each compute and sample one token (a decode step) runs as a graph, captured once per batch size
and context class. Other steps are mixed. They can run as graphs too, one per number of tokens, unless a step has so
much to compute that the device stays busy while the host launches its kernels one by one. Mixed graphs are optional
because decode graphs run slower next to them, for an unknown reason (see docs/performance.md).

The host uploads a few numbers per slice and replays the graph, which reads everything else (tokens, block tables,
positions) from the rows. Every address in a graph is fixed: rows, cache, weights, and the buffers below. Batches
between two sizes are padded with slices of row -1, which read nothing and write nothing. A graph draws greedily or
with Gumbel noise, and computes the log-probability of the token it draws; the runner applies all other changes to the
logits afterwards.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headgate.collector import collector_off
from headgate.device.rows import Records, Rows, upload
from headgate.device.sampling.draw import stream_keys
from headgate.device.sampling.logprobs import score_factors
from headgate.layers.backend import KV
from headgate.layers.batch import Batch, of_groups
from headgate.layers.triton.draw import Finalists
from headgate.layers.triton.launch import compiled_at_once
from headgate.layers.triton.step import (
    CLOSING_COLUMN,
    COLUMNS,
    MIXED_COLUMNS,
    DrawInputs,
    Paging,
    close_step,
    open_mixed_step,
    open_step,
)
from headgate.models.network import Model
from headgate.protocol.plan import StepPlan

log = logging.getLogger(__name__)

# Longest context of each class that graphs are captured for. How attention is split depends on the class alone.
FIRST_CONTEXT, NEXT_CONTEXT = 1024, 4
# Captured before the first request; the others are captured on first use.
READY_CONTEXT, READY_TOKENS = 4096, 512
# Operations that take the device about as long as the host takes to launch the kernels of a step.
HIDDEN_WORK = 9e12


Kind = TypeVar("Kind", bound=Hashable)
Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that can be captured. It changes nothing while all of its slices are padding."""

    step: Callable[[], torch.Tensor]
    columns: torch.Tensor  # [columns, size]: the step's inputs
    tokens: torch.Tensor  # [size]: the step's output
    logprobs: torch.Tensor  # [size]: of the sampled tokens, where requested


@dataclass(frozen=True, slots=True)
class Captured:
    replay: Replay
    columns: torch.Tensor  # [columns, size]
    logits: torch.Tensor  # [size, vocab], valid until the next replay of any graph
    tokens: torch.Tensor  # [size]
    logprobs: torch.Tensor  # [size]: of the sampled tokens, where requested; graphs compute no top log-probabilities


class StepGraphs:
    """The graphs of `model` over `rows`, captured on first use."""

    def __init__(
        self,
        model: Model,
        kv: list[KV],
        rows: Rows,
        *,
        max_tokens: int,
        prompts: bool = False,
        record: Record | None = None,
    ) -> None:
        self._model, self._kv = model, kv
        self._rows, self._max_tokens = rows, max_tokens
        record = record or GraphRecorder()
        most = min(max_tokens, int(HIDDEN_WORK / work_per_token(model)))
        self.decode = DecodeGraphs(model, kv, rows, record)
        self.mixed = MixedGraphs(model, kv, rows, most, record) if prompts else None

    @torch.inference_mode()
    def capture_usual(self) -> None:
        """Capture the graphs that nearly every workload needs."""
        start = time.perf_counter()
        all_graphs: list[Graphs[Any]] = [self.decode] if self.mixed is None else [self.decode, self.mixed]
        with compiled_at_once():
            # Compile the kernels of steps that do not run as graphs, too.
            for singles in (False, True):
                self._model(padding(self._rows, self._max_tokens, singles=singles), self._kv)
            count = sum(graphs.rehearse_usual() for graphs in all_graphs)
        compiled = time.perf_counter()
        for graphs in all_graphs:
            graphs.capture_usual()
        captured_s = time.perf_counter() - compiled
        log.info("compiled kernels in %.1f s, captured %d graphs in %.1f s", compiled - start, count, captured_s)

    def forget(self) -> None:
        """Drop all graphs, because the weights or the cache are about to move. They are captured again when needed."""
        self.decode.forget()
        if self.mixed is not None:
            self.mixed.forget()


class Graphs(ABC, Generic[Kind]):
    """Graphs of one type, each captured on first use."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._captured: dict[Kind, Captured] = {}

    @abstractmethod
    def usual(self) -> list[Kind]:
        """The kinds captured before the first request, largest first, so that the others find memory in the pool."""

    @abstractmethod
    def prepare(self, kind: Kind) -> Prepared: ...

    def rehearse_usual(self) -> int:
        """Run the usual steps once, so that their kernels are compiled. Returns the number of steps."""
        for kind in self.usual():
            self.prepare(kind).step()
        return len(self.usual())

    def capture_usual(self) -> None:
        for kind in self.usual():
            self._capture(kind, self.prepare(kind))

    def forget(self) -> None:
        self._captured.clear()

    def find(self, kind: Kind) -> Captured:
        if found := self._captured.get(kind):
            return found
        prepared = self.prepare(kind)
        prepared.step()  # compiles any new kernels
        return self._capture(kind, prepared)

    def _capture(self, kind: Kind, prepared: Prepared) -> Captured:
        replay, logits = self._record(prepared.step)
        captured = self._captured[kind] = Captured(
            replay, prepared.columns, logits, prepared.tokens, prepared.logprobs
        )
        return captured


class DecodeGraphs(Graphs[tuple[int, int]]):
    """Steps whose slices each compute and sample one token, by batch size and context class."""

    def __init__(self, model: Model, kv: list[KV], rows: Rows, record: Record) -> None:
        super().__init__(record)
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sizes = batch_sizes(rows.max_rows)
        self._contexts = context_classes(rows.max_context)
        self._buffers = Buffers(rows)

    def takes(self, plan: StepPlan) -> bool:
        """Whether every slice of `plan` computes one token and samples one."""
        counts = plan.counts
        return len(counts) == sum(counts) and all(plan.samples) and bool(counts)

    def replay(self, plan: StepPlan) -> Captured:
        """Run `plan`. The first `len(plan.rows)` logits and tokens of the result belong to its slices."""
        size = self._sizes[bisect_left(self._sizes, len(plan.rows))]
        context = self._contexts[bisect_left(self._contexts, max(plan.starts) + 1)]
        captured = self.find((size, context))
        upload(self._columns(plan, size), captured.columns)
        captured.replay()
        return captured

    def usual(self) -> list[tuple[int, int]]:
        contexts = [context for context in self._contexts if context <= READY_CONTEXT] or self._contexts[:1]
        return [(size, context) for context in contexts for size in reversed(self._sizes)]

    def prepare(self, kind: tuple[int, int]) -> Prepared:
        size, context = kind
        buffers, paging = self._buffers, self._buffers.paging
        batch, draw_inputs = buffers.batch(size, context), buffers.draw_inputs(size)
        columns = buffers.columns[: COLUMNS * size].view(COLUMNS, size)
        tokens, logprobs = buffers.tokens[:size], buffers.logprobs[:size]
        columns.fill_(-1)
        columns[-1].copy_(torch.arange(size))

        def step() -> torch.Tensor:
            for tables, part in zip(paging, batch.groups or (batch,), strict=True):
                open_step(columns, tables, part, draw_inputs)
            logits = self._model.logits(self._model(batch, self._kv))
            close_step(columns, paging[0], logits, draw_inputs, buffers.finalists, tokens, logprobs)
            return logits

        return Prepared(step, columns, tokens, logprobs)

    def _columns(self, plan: StepPlan, size: int) -> npt.NDArray[np.int64]:
        """The inputs of `open_step`, one column per slice."""
        used = len(plan.rows)
        columns = np.full((COLUMNS, size), -1, dtype=np.int64)
        columns[0, :used] = plan.rows
        columns[1, :used] = plan.starts
        columns[2, :used] = self._rows.grow_in_place(plan)
        records = self._rows.sampling[columns[0, :used]]
        columns[3, :used] = draw_bits(records)
        columns[4, :used] = stream_keys(records["seed"], columns[1, :used] + 1).view(np.int64)
        columns[5] = np.argsort(-columns[1], kind="stable")
        return columns


class MixedGraphs(Graphs[int]):
    """Steps of at most `most` tokens. Each slice may have any number of them, and may or may not sample."""

    def __init__(self, model: Model, kv: list[KV], rows: Rows, most: int, record: Record) -> None:
        super().__init__(record)
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sizes = token_sizes(most)
        self._buffers = MixedBuffers(rows, most)

    def takes(self, plan: StepPlan) -> bool:
        return 0 < sum(plan.counts) <= self._sizes[-1]

    def replay(self, plan: StepPlan) -> Captured:
        """Run `plan`, once the rows have it. The first `len(plan.rows)` logits and tokens belong to its slices."""
        captured = self.find(self._sizes[bisect_left(self._sizes, sum(plan.counts))])
        upload(self._columns(plan, captured.columns.shape[1]), captured.columns)
        captured.replay()
        return captured

    def usual(self) -> list[int]:
        return [size for size in reversed(self._sizes) if size <= READY_TOKENS]

    def prepare(self, kind: int) -> Prepared:
        buffers, slices = self._buffers, min(kind, self._rows.max_rows)
        batch, draw_inputs = buffers.batch(kind, slices), buffers.draw_inputs(slices)
        columns = buffers.columns[: MIXED_COLUMNS * slices].view(MIXED_COLUMNS, slices)
        last, tokens, logprobs = buffers.last[:slices], buffers.tokens[:slices], buffers.logprobs[:slices]
        columns.fill_(-1)
        columns[2:4] = 0
        columns[-1].copy_(torch.arange(slices))

        def step() -> torch.Tensor:
            for tables, part in zip(buffers.paging, batch.groups or (batch,), strict=True):
                open_mixed_step(columns, tables, part, draw_inputs, last)
            logits = self._model.logits(self._model(batch, self._kv).index_select(0, last))
            closing = columns[CLOSING_COLUMN:]
            close_step(closing, buffers.paging[0], logits, draw_inputs, buffers.finalists, tokens, logprobs)
            return logits

        return Prepared(step, columns, tokens, logprobs)

    def _columns(self, plan: StepPlan, slices: int) -> npt.NDArray[np.int64]:
        """The inputs of `open_mixed_step`, one column per slice."""
        used, counts, starts = len(plan.rows), np.array(plan.counts), np.array(plan.starts)
        ends, first = starts + counts, np.cumsum(counts)
        columns = np.full((MIXED_COLUMNS, slices), -1, dtype=np.int64)
        columns[0, :used] = plan.rows
        columns[1, :used] = starts
        columns[2], columns[3] = 0, first[-1]
        columns[2, :used] = counts
        columns[3, :used] = first - counts
        columns[4, :used] = np.where(plan.samples, columns[0, :used], -1)
        columns[5, :used] = ends - 1
        records = self._rows.sampling[columns[0, :used]]
        columns[6, :used] = draw_bits(records)
        columns[7, :used] = stream_keys(records["seed"], ends).view(np.int64)
        columns[8] = np.argsort(-columns[5], kind="stable")
        return columns


class GraphRecorder:
    """Records graphs that share memory, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """Record `step`. Returns a function that replays it, and the tensor that will hold its result."""
        graph = torch.cuda.CUDAGraph()
        # Thread-local capture, because another thread may wait for a launched step. The collector is off, because
        # freeing device memory of a closed engine during the capture would invalidate the graph.
        with collector_off(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        return graph.replay, result


class Buffers:
    """Buffers shared by graphs of all sizes, because only one of them runs at a time."""

    def __init__(self, rows: Rows) -> None:
        self.paging = [Paging(rows.tokens, tables, rows.block_size) for tables in rows.tables]  # of each group
        device, most = rows.tokens.device, rows.max_rows
        self.columns = torch.full((COLUMNS * most,), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.finalists = Finalists(most, rows.vocab_size, device)
        self._ids, self._positions, self._keys = torch.zeros(3, most, dtype=torch.int64, device=device).unbind()
        self._slots = torch.zeros(rows.groups, most, dtype=torch.int64, device=device)
        self._temperatures, self._factors, self.logprobs = torch.zeros(3, most, device=device).unbind()
        self._contexts, self._order = torch.zeros(2, most, dtype=torch.int32, device=device).unbind()
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows.groups, most, rows.tables.shape[2], dtype=torch.int32, device=device)

    def batch(self, size: int, max_context: int) -> Batch:
        batch = Batch(
            tokens=self._ids[:size],
            positions=self._positions[:size],
            slots=self._slots[0, :size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[0, :size],
            max_query=1,
            max_context=max_context,
            order=self._order[:size],
        )
        return of_groups(
            [
                replace(batch, slots=slots[:size], block_tables=tables[:size])
                for slots, tables in zip(self._slots, self._tables, strict=True)
            ]
        )

    def draw_inputs(self, size: int) -> DrawInputs:
        return DrawInputs(self._temperatures[:size], self._keys[:size], self._factors[:size])


class MixedBuffers:
    def __init__(self, rows: Rows, most: int) -> None:
        self.paging = [Paging(rows.tokens, tables, rows.block_size) for tables in rows.tables]  # of each group
        device, slices = rows.tokens.device, min(most, rows.max_rows)
        self.columns = torch.full((MIXED_COLUMNS * slices,), -1, dtype=torch.int64, device=device)
        self.last, self.tokens, self._keys = torch.zeros(3, slices, dtype=torch.int64, device=device).unbind()
        self.finalists = Finalists(slices, rows.vocab_size, device)
        self._ids, self._positions = torch.zeros(2, most, dtype=torch.int64, device=device).unbind()
        self._slots = torch.zeros(rows.groups, most, dtype=torch.int64, device=device)
        self._temperatures, self._factors, self.logprobs = torch.zeros(3, slices, device=device).unbind()
        self._contexts, self._order = torch.zeros(2, slices, dtype=torch.int32, device=device).unbind()
        self._starts = torch.zeros(slices + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows.groups, slices, rows.tables.shape[2], dtype=torch.int32, device=device)
        self._max_context = rows.max_context

    def batch(self, size: int, slices: int) -> Batch:
        batch = Batch(
            tokens=self._ids[:size],
            positions=self._positions[:size],
            slots=self._slots[0, :size],
            query_starts=self._starts[: slices + 1],
            context_lens=self._contexts[:slices],
            block_tables=self._tables[0, :slices],
            max_query=size,
            max_context=self._max_context,
            order=self._order[:slices],
            singles=True,
        )
        return of_groups(
            [
                replace(batch, slots=slots[:size], block_tables=tables[:slices])
                for slots, tables in zip(self._slots, self._tables, strict=True)
            ]
        )

    def draw_inputs(self, slices: int) -> DrawInputs:
        return DrawInputs(self._temperatures[:slices], self._keys[:slices], self._factors[:slices])


def padding(rows: Rows, tokens: int, *, singles: bool) -> Batch:
    """A batch of `tokens` padding tokens, which belong to no sequence."""
    device, slices = rows.tokens.device, min(tokens, rows.max_rows)
    nothing = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = Batch(
        tokens=nothing,
        positions=nothing,
        slots=nothing - 1,
        query_starts=torch.zeros(slices + 1, dtype=torch.int32, device=device),
        context_lens=torch.zeros(slices, dtype=torch.int32, device=device),
        block_tables=torch.zeros(slices, rows.tables.shape[2], dtype=torch.int32, device=device),
        max_query=tokens,
        max_context=rows.max_context,
        singles=singles,
    )
    return of_groups([batch] * rows.groups)


def work_per_token(model: Model) -> int:
    """Operations per token: two for each number in the matrices of the layers."""
    return max(1, sum(2 * math.prod(parameter.shape) for name, parameter in model.parameters() if "layers" in name))


def token_sizes(most: int) -> list[int]:
    return [2**power for power in range(5, most.bit_length()) if 2**power < most] + [most]


def batch_sizes(most: int) -> list[int]:
    """Sizes get coarser as they grow: a padded slice costs little in a large batch."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most, 64)]
    return [size for size in steps if size < most] + [most]


def context_classes(most: int) -> list[int]:
    classes = [FIRST_CONTEXT]
    while classes[-1] < most:
        classes.append(classes[-1] * NEXT_CONTEXT)
    return classes


def draw_bits(records: Records) -> npt.NDArray[np.int64]:
    """For each row, the bits of its temperature, and above them those of its factor (see `layers.triton.step`)."""
    temperatures: npt.NDArray[np.int64] = bits_of(records["temperature"]).astype(np.int64)
    if not np.any(records["logprobs"] >= 0):
        return temperatures
    return temperatures | bits_of(score_factors(records)).astype(np.int64) << 32


def bits_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values).view(np.int32)
