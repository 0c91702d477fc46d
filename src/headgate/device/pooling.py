"""Vectors of prompts: the hidden state of the last token, or the mean of those of all tokens.

A mean is the sum of what each slice of the prompt adds, kept between steps by row. The sum is in float64 and in the
order of the tokens, so on a CPU it does not depend on how steps divide the prompt. A sequence that joins again after a
preemption begins a new sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from headgate.device.inputs import Layout
from headgate.protocol.plan import Join, StepPlan
from headgate.protocol.request import Pooling

RUN = 256  # tokens that are added at once, which bounds the memory for sums in float64


@dataclass(frozen=True, slots=True)
class StepVectors:
    """The vectors of the prompts that a step completes. On a GPU they may not have arrived on the host yet."""

    slices: tuple[int, ...]
    values: torch.Tensor  # [slices, hidden] float32

    def to_host(self) -> StepVectors:
        return replace(self, values=self.values.to("cpu", non_blocking=True))

    def read(self) -> dict[int, bytes]:
        """The vectors by slice. The values must have arrived."""
        return {slice: vector.tobytes() for slice, vector in zip(self.slices, self.values.numpy(), strict=True)}


class Pooler:
    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}  # by row

    def join(self, joins: Iterable[Join]) -> None:
        """Must be called with the joins of every plan, because a row may have belonged to another prompt."""
        for join in joins:
            self._prompts.pop(join.row, None)
            if join.pooling is not None:
                self._prompts[join.row] = _Prompt(join.prompt_len, join.pooling)

    def needs(self, plan: StepPlan) -> bool:
        """Whether the hidden states of `plan` are needed."""
        return bool(self._prompts) and not self._prompts.keys().isdisjoint(plan.rows)

    def pool(self, layout: Layout, hidden: torch.Tensor) -> StepVectors | None:
        """Take what a step computed; returns the vectors of the prompts that it completes."""
        vectors: dict[int, torch.Tensor] = {}
        rows, ends, bounds = layout.rows.tolist(), layout.ends.tolist(), layout.query_starts.tolist()
        for slice, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if (prompt := self._prompts.get(row)) is None:
                continue
            prompt.add(hidden[bounds[slice] : bounds[slice + 1]])
            if end == prompt.length:
                vectors[slice] = self._prompts.pop(row).vector()
        return StepVectors(tuple(vectors), torch.stack(list(vectors.values()))) if vectors else None


class _Prompt:
    def __init__(self, length: int, pooling: Pooling) -> None:
        self.length = length
        self._averages = pooling == "mean"
        self._state: torch.Tensor | None = None  # of the last token so far, or the sum of all

    def add(self, states: torch.Tensor) -> None:
        if not self._averages:
            self._state = states[-1].float()
            return
        for run in torch.split(states, RUN):
            terms = run.double() if self._state is None else torch.cat((self._state[None], run.double()))
            self._state = terms.cumsum(0)[-1]  # unlike `sum`, adds one token after another on a CPU

    def vector(self) -> torch.Tensor:
        assert self._state is not None
        return (self._state / self.length).float() if self._averages else self._state
