"""Whole decode steps as CUDA graphs: from device rows to sampled tokens, in one call of the host.

A step whose slices each compute one token and sample one runs as a graph, captured once for each size of batch and
class of context. The host uploads a few numbers per slice and replays; all else (tokens, block tables, positions) the
graph reads from the rows. Every address in a graph is fixed: rows, cache, weights, and the buffers below.

Batches between two sizes are padded with slices of row -1, which read nothing and are written nowhere. A graph draws
greedily or with Gumbel noise; what else a row may want done to its logits is done to them afterwards, by the runner.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headgate.layers.backend import KV
from headgate.layers.batch import Batch
from headgate.layers.triton.draw import Finalists
from headgate.layers.triton.step import COLUMNS, Paging, Told, close_step, open_step
from headgate.protocol.plan import StepPlan
from headgate.worker.draw import stream_keys
from headgate.worker.model import Model
from headgate.worker.rows import Rows, upload

log = logging.getLogger(__name__)

# Longest contexts that graphs are captured for: how attention is cut depends on the class alone.
FIRST_CONTEXT, NEXT_CONTEXT = 1024, 4
# Classes captured before the first request; the others when they are met.
READY_CONTEXT = 4096


Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Captured:
    replay: Replay
    columns: torch.Tensor  # [COLUMNS, size]
    logits: torch.Tensor  # [size, vocab], good until the next replay of any graph
    tokens: torch.Tensor  # [size]


class DecodeGraphs:
    """Graphs of `model` over `rows`, captured when they are first needed."""

    def __init__(self, model: Model, kv: list[KV], rows: Rows, record: Record | None = None) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._sizes = batch_sizes(rows.max_rows)
        self._contexts = context_classes(rows.max_context)
        self._captured: dict[tuple[int, int], Captured] = {}
        self._record = record or Recorder()
        self._buffers = Buffers(rows)

    def takes(self, plan: StepPlan) -> bool:
        """Whether every slice of `plan` computes one token and samples one."""
        counts = plan.counts
        return len(counts) == sum(counts) and all(plan.samples) and bool(counts)

    def replay(self, plan: StepPlan) -> Captured:
        """Run `plan`; its first `len(plan.rows)` logits and tokens are its slices'."""
        size = self._sizes[bisect_left(self._sizes, len(plan.rows))]
        context = self._contexts[bisect_left(self._contexts, max(plan.starts) + 1)]
        captured = self._captured.get((size, context)) or self._capture(size, context)
        upload(self._columns(plan, size), captured.columns)
        captured.replay()
        return captured

    @torch.inference_mode()
    def capture_usual(self) -> None:
        """Capture what nearly every load needs, largest first, so that the others find memory in the pool."""
        start = time.perf_counter()
        usual = [context for context in self._contexts if context <= READY_CONTEXT] or self._contexts[:1]
        for context in usual:
            for size in reversed(self._sizes):
                self._capture(size, context)
        log.info("captured %d graphs in %.1f s", len(self._captured), time.perf_counter() - start)

    def forget(self) -> None:
        """The weights or the cache are about to move: capture anew what is needed next."""
        self._captured.clear()

    def _columns(self, plan: StepPlan, size: int) -> npt.NDArray[np.int64]:
        """What `open_step` is told of each slice."""
        used = len(plan.rows)
        columns = np.full((COLUMNS, size), -1, dtype=np.int64)
        columns[0, :used] = plan.rows
        columns[1, :used] = plan.starts
        columns[2, :used] = self._rows.grow_in_place(plan)
        records = self._rows.sampling[columns[0, :used]]
        columns[3, :used] = bits_of(records["temperature"])
        columns[4, :used] = stream_keys(records["seed"], columns[1, :used] + 1).view(np.int64)
        columns[5] = np.argsort(-columns[1], kind="stable")
        return columns

    def _capture(self, size: int, context: int) -> Captured:
        buffers, paging = self._buffers, self._buffers.paging
        batch, told = buffers.batch(size, context), buffers.told(size)
        columns, tokens = buffers.columns[: COLUMNS * size].view(COLUMNS, size), buffers.tokens[:size]
        columns.fill_(-1)
        columns[-1].copy_(torch.arange(size))

        def step() -> torch.Tensor:
            open_step(columns, paging, batch, told)
            logits = self._model.logits(self._model(batch, self._kv))
            close_step(columns, paging, logits, told, buffers.finalists, tokens)
            return logits

        step()  # compiles what is new; all slices are padding, so it changes nothing
        replay, logits = self._record(step)
        captured = self._captured[size, context] = Captured(replay, columns, logits, tokens)
        return captured


class Recorder:
    """Makes graphs that share their memory, for only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """How to run `step` again, and the tensor that its result will be in."""
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another may wait for a step that has been launched.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        return graph.replay, result


class Buffers:
    """What graphs of all sizes share: only one of them runs at a time."""

    def __init__(self, rows: Rows) -> None:
        self.paging = Paging(rows.tokens, rows.tables, rows.block_size)
        device, most = rows.tokens.device, rows.max_rows
        self.columns = torch.full((COLUMNS * most,), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.finalists = Finalists(most, rows.vocab_size, device)
        self._ids, self._positions, self._slots, self._keys = torch.zeros(
            4, most, dtype=torch.int64, device=device
        ).unbind()
        self._temperatures = torch.zeros(most, device=device)
        self._contexts, self._order = torch.zeros(2, most, dtype=torch.int32, device=device).unbind()
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, rows.tables.shape[1], dtype=torch.int32, device=device)

    def batch(self, size: int, max_context: int) -> Batch:
        return Batch(
            tokens=self._ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            block_tables=self._tables[:size],
            max_query=1,
            max_context=max_context,
            order=self._order[:size],
        )

    def told(self, size: int) -> Told:
        return Told(self._temperatures[:size], self._keys[:size])


def batch_sizes(most: int) -> list[int]:
    """Ever coarser: a padded slice costs little in a large batch."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most, 64)]
    return [size for size in steps if size < most] + [most]


def context_classes(most: int) -> list[int]:
    classes = [FIRST_CONTEXT]
    while classes[-1] < most:
        classes.append(classes[-1] * NEXT_CONTEXT)
    return classes


def bits_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values).view(np.int32)
