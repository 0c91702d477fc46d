"""Which experts a step must report: those of the tokens it computed, and of tokens that were computed before.

A sequence that takes a row may find KV in its blocks, from the prefix cache or another engine. The first slice of the
sequence reports the experts of those tokens, too. A sequence that joins again after a preemption reports from the
start; the reader keeps what it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headgate.device.rows import Rows, to_device
from headgate.errors import UnsupportedModel
from headgate.layers.expert_record import ExpertRecord
from headgate.models.spec import Experts, ModelSpec
from headgate.protocol.plan import RoutedExperts, RoutedShape, StepPlan


def routed_shape(spec: ModelSpec) -> RoutedShape | None:
    """The shape of what is reported for each token; None if the model has no experts."""
    experts = {i: layer.mlp for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, Experts)}
    if not experts:
        return None
    tops = {each.routing.top for each in experts.values()}
    if len(tops) > 1:
        raise UnsupportedModel("routed experts cannot be kept: layers differ in the number of experts per token")
    size = 1 if max(each.count for each in experts.values()) <= 256 else 2
    return RoutedShape(layers=len(spec.layers), places=tuple(experts), top=tops.pop(), size=size)


def new_record(shape: RoutedShape, num_blocks: int, block_size: int, device: torch.device) -> ExpertRecord:
    dtype = torch.uint8 if shape.size == 1 else torch.int16
    return ExpertRecord(num_blocks, block_size, layers=len(shape.places), top=shape.top, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class StepExperts:
    """The experts of some slices of a step."""

    slices: tuple[tuple[int, int, int], ...]  # (slice, first position, number of tokens)
    ids: torch.Tensor  # [tokens of all slices, layers, top]

    def to_host(self) -> StepExperts:
        return StepExperts(self.slices, self.ids.to("cpu", non_blocking=True))

    def read(self) -> dict[int, RoutedExperts]:
        read, first = {}, 0
        ids = self.ids.numpy()
        for slice, position, count in self.slices:
            read[slice] = RoutedExperts(position, ids[first : first + count].tobytes())
            first += count
        return read


class RoutedReader:
    """Reads what the sequences in `rows` have requested out of `record`."""

    def __init__(self, record: ExpertRecord, rows: Rows) -> None:
        self.record = record
        self._rows = rows
        self._next: dict[int, int] = {}  # by row: the first position whose experts are to be reported

    def report(self, plan: StepPlan) -> StepExperts | None:
        """Read what the slices of `plan` report, after the step has written its own tokens. Call once per plan."""
        for join in plan.joins:
            self._next.pop(join.row, None)
            if join.sampling.return_routed_experts:
                self._next[join.row] = join.sampling.routed_experts_prompt_start
        slices = self._slices(plan) if self._next else []
        if not slices:
            return None
        rows = np.repeat([plan.rows[i] for i, _, _ in slices], [count for _, _, count in slices])
        positions = np.concatenate([np.arange(first, first + count) for _, first, count in slices])
        return StepExperts(tuple(slices), self.record.read(self._slots(rows, positions)))

    def _slices(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        slices = []
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            first, end = self._next.get(row), start + count
            if first is not None and first < end:
                slices.append((i, first, end - first))
                self._next[row] = end
        return slices

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        tables, block_size = self._rows.tables[0], self._rows.block_size  # of the first group of layers
        index = to_device(rows * tables.shape[1] + positions // block_size, tables.device)
        blocks = tables.view(-1)[index].long()
        return blocks * block_size + to_device(positions % block_size, tables.device)
