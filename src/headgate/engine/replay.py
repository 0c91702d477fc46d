"""Replays a crash: runs the plans of a crash file again on the fake device.

Each slice must find, through the block table of its row, exactly the KV of the tokens before it. The first plan with
a slice that does not is the faulty one, or follows it closely. The file may begin in the middle of a run: the state
that earlier plans set up is then assumed to be correct, row by row and block by block, until a recorded plan changes
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import msgspec

from headgate.engine.evidence import Evidence, RecordedStep, read_evidence
from headgate.protocol.plan import StepPlan
from headgate.testing.device import Entry, FakeDevice, expected_entries


@dataclass(frozen=True, slots=True)
class Replay:
    steps: int  # how many plans were run
    step: int | None = None  # the number of the first inconsistent plan
    fault: str | None = None  # what is wrong with that plan
    error: str = ""  # the exception that ended the engine

    def __str__(self) -> str:
        found = "every plan is consistent" if self.fault is None else f"plan {self.step}: {self.fault}"
        return f"replayed {self.steps} plans; {found}"


class Inconsistent(Exception):
    """A plan that no device could execute correctly."""


def replay(path: str | Path) -> Replay:
    evidence = read_evidence(path)
    replayer = Replayer(evidence)
    for count, step in enumerate(evidence.steps):
        try:
            replayer.run(step)
        except Inconsistent as fault:
            return Replay(count, step.plan.step, str(fault), evidence.error)
    return Replay(len(evidence.steps), error=evidence.error)


@dataclass
class Row:
    """The state of a device row since its recorded `Join`."""

    tokens: list[int]
    blocks: list[int]
    mixed: bool = False  # its KV was computed with several versions of the weights and cannot be compared


@dataclass
class Replayer:
    evidence: Evidence
    rows: dict[int, Row] = field(default_factory=dict)
    writers: dict[int, tuple[int, int]] = field(default_factory=dict)  # block -> last row to write it, and that step
    filled: set[int] = field(default_factory=set)  # blocks that a transfer or an unrecorded row wrote

    def __post_init__(self) -> None:
        evidence = self.evidence
        self.device = FakeDevice(
            *(evidence.num_blocks, evidence.block_size, evidence.max_rows, evidence.vocab_size),
            version=evidence.steps[0].plan.version if evidence.steps else 0,
            windows=evidence.windows,
        )
        self.whole = bool(evidence.steps) and evidence.steps[0].plan.step == 0  # no earlier plans are missing

    def run(self, step: RecordedStep) -> None:
        plan = step.plan
        self._change_weights(plan.version)
        self._seat(plan)
        known = [i for i, row in enumerate(plan.rows) if self._knows(row)]
        for i in known:
            self._check_shape(plan, i)
        self._trust(plan, known)
        self.device.launch(only_known(plan, known))
        self.device.land()
        for i in known:
            self._note_writes(plan, i)
        for i in known:
            self._check_reads(plan, i)
        self._learn_tokens(step)

    def _change_weights(self, version: int) -> None:
        if version != self.device.version:
            self.device.version = version
            for row in self.rows.values():
                row.mixed = True

    def _seat(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._check_row(join.row)
            self._check_blocks(join.blocks)
            self.rows[join.row] = Row(list(join.tokens), list(join.blocks))
        for number, blocks in plan.grown:
            self._check_row(number)
            self._check_blocks(blocks)
            if row := self.rows.get(number):
                row.blocks += blocks
            else:
                self._mark_as_filled(blocks)
        for fetch in plan.fetches:
            self._check_blocks(fetch.blocks)
            self._mark_as_filled(fetch.blocks)

    def _mark_as_filled(self, blocks: tuple[int, ...]) -> None:
        """Note that a transfer, or a row that joined before the first recorded plan, writes these blocks."""
        for block in blocks:
            self.device.kv[block] = [-1] * self.evidence.block_size
            self.writers.pop(block, None)
            self.filled.add(block)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.evidence.max_rows:
            raise Inconsistent(f"row {row} does not exist; there are {self.evidence.max_rows}")

    def _check_blocks(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if not 0 <= block < self.evidence.num_blocks:
                raise Inconsistent(f"block {block} does not exist; there are {self.evidence.num_blocks}")

    def _knows(self, row: int) -> bool:
        self._check_row(row)
        if row not in self.rows and self.whole:
            raise Inconsistent(f"row {row} computes, and no sequence has joined it")
        return row in self.rows

    def _check_shape(self, plan: StepPlan, i: int) -> None:
        number, start, count = plan.rows[i], plan.starts[i], plan.counts[i]
        row, end = self.rows[number], start + count
        if plan.rows.index(number) != i:
            raise Inconsistent(f"row {number} has two slices")
        if count < 1:
            raise Inconsistent(f"row {number} has nothing to compute")
        if end > len(row.tokens):
            raise Inconsistent(f"row {number} computes to position {end} and has {len(row.tokens)} tokens")
        if end > len(row.blocks) // len(self.device.groups) * self.evidence.block_size:
            raise Inconsistent(f"row {number} computes to position {end} and has {len(row.blocks)} blocks")
        if plan.samples[i] and end != len(row.tokens):
            raise Inconsistent(f"row {number} samples after position {end} of {len(row.tokens)}")

    def _trust(self, plan: StepPlan, known: list[int]) -> None:
        """Assume that KV is correct if a slice reads it, no recorded plan wrote it, and an earlier plan may have."""
        size = self.evidence.block_size
        for i in known:
            for position, block, correct in self._visible(plan, i, plan.starts[i]):
                if self.device.kv[block][position % size] == -1 and self._may_be_filled(block):
                    self.device.kv[block][position % size] = correct

    def _visible(self, plan: StepPlan, i: int, stop: int) -> Iterator[tuple[int, int, Entry]]:
        """The positions before `stop` that a slice reads, each with its block and the correct entry."""
        row, size, groups = self.rows[plan.rows[i]], self.evidence.block_size, self.device.groups
        for group, window in enumerate(groups.windows):
            correct = expected_entries(row.tokens[:stop], plan.version, group, window)
            first = 0 if window is None else max(0, plan.starts[i] - window + 1)
            for position in range(first, stop):
                yield position, row.blocks[position // size * len(groups) + group], correct[position]

    def _may_be_filled(self, block: int) -> bool:
        return block not in self.writers and (not self.whole or block in self.filled)

    def _note_writes(self, plan: StepPlan, i: int) -> None:
        size, count, row = self.evidence.block_size, len(self.device.groups), self.rows[plan.rows[i]]
        for position in range(plan.starts[i], plan.starts[i] + plan.counts[i]):
            stripe = position // size * count
            for block in row.blocks[stripe : stripe + count]:
                self.writers[block] = plan.rows[i], plan.step

    def _check_reads(self, plan: StepPlan, i: int) -> None:
        number, end = plan.rows[i], plan.starts[i] + plan.counts[i]
        row, size = self.rows[number], self.evidence.block_size
        for position, block, correct in self._visible(plan, i, end):
            found = self.device.kv[block][position % size]
            if found == -1:
                raise Inconsistent(
                    f"row {number} reads position {position} in block {block}, which was never written"
                )
            if not row.mixed and found != correct:
                raise Inconsistent(
                    f"row {number} reads position {position} in block {block}{self._written_by(block)}"
                )

    def _written_by(self, block: int) -> str:
        if block not in self.writers:
            return ", which holds other KV"
        return ", which row {} wrote last, in plan {}, with other KV".format(*self.writers[block])

    def _learn_tokens(self, step: RecordedStep) -> None:
        """Give the fake device the tokens that the real device sampled."""
        plan, tokens, lengths = step.plan, iter(step.tokens or ()), iter(step.lengths or repeat(1))
        for number, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            if samples:
                # A step that never landed sampled unknown tokens, which no recorded plan uses.
                sampled = [next(tokens, 0) for _ in range(next(lengths))]
                if row := self.rows.get(number):
                    row.tokens[start + count :] = sampled
                    self.device.write_tokens(number, start + count, sampled)


def only_known(plan: StepPlan, known: list[int]) -> StepPlan:
    """`plan` without the slices of rows whose `Join` was not recorded."""
    rows = {plan.rows[i] for i in known} | {join.row for join in plan.joins}
    return msgspec.structs.replace(
        plan,
        rows=[plan.rows[i] for i in known],
        starts=[plan.starts[i] for i in known],
        counts=[plan.counts[i] for i in known],
        samples=[plan.samples[i] for i in known],
        grown=tuple((row, blocks) for row, blocks in plan.grown if row in rows),
    )
