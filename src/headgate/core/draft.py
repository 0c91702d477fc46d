"""A step plan under construction: the plan's columns, which the scheduler fills, and the remaining token budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.core.sequence import Sequence
from headgate.protocol.groups import ABSENT
from headgate.protocol.plan import Fetch, Join, StepPlan


@dataclass(slots=True)
class StepDraft:
    budget: int  # tokens that may still be planned
    groups: int  # of layers: blocks per stripe
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    grown: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)

    def add_slice(self, seq: Sequence, start: int, count: int, samples: bool) -> None:
        self.budget -= count
        self.sequences.append(seq)
        self.rows.append(seq.row)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(samples)
        if seq.shown < seq.stripes:
            self._show_blocks(seq)

    def _show_blocks(self, seq: Sequence) -> None:
        blocks = tuple(seq.blocks[seq.shown * self.groups : seq.stripes * self.groups])
        if seq.shown:
            self.grown.append((seq.row, blocks))
        else:
            request = seq.request
            if ABSENT in blocks:
                blocks = tuple(max(block, 0) for block in blocks)  # not read, but must name a block
            self.joins.append(
                Join(
                    seq.row,
                    tuple(seq.tokens),
                    seq.prompt_len,
                    request.sampling,
                    blocks,
                    request.adapter,
                    request.pooling,
                )
            )
        seq.shown = seq.stripes

    def plan(self, step: int, version: int) -> StepPlan:
        return StepPlan(
            step=step,
            version=version,
            rows=self.rows,
            starts=self.starts,
            counts=self.counts,
            samples=self.samples,
            joins=tuple(self.joins),
            grown=tuple(self.grown),
            fetches=tuple(self.fetches),
        )
