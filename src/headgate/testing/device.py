"""A device without a model: the next token is a hash of the KV that it actually reads.

Each KV entry is a hash of the token, the weights and the previous entry, written where the plan specifies. If a block
was freed too early, reused during a transfer, found under the wrong weights or never filled, the next token is
therefore wrong. A test detects this by comparing with `expected_token`.

A step runs when `land` is called, in launch order. Within a step all slices write before any slice reads, as on a
real device.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from headgate.protocol.groups import LayerGroups
from headgate.protocol.plan import Join, Logprobs, RoutedExperts, StepPlan, StepResult
from headgate.protocol.request import Pooling

Entry = int


def entry(before: Entry, token: int, version: int) -> Entry:
    """Return the KV entry of a token, given the previous entry."""
    return hash((before, token, version))


def next_entry(before: Sequence[Entry], token: int, version: int, group: int, window: int | None) -> Entry:
    """Return the entry after those of `before` in a group of layers. It depends on all that the window shows."""
    if window is None:
        return entry(before[-1] if before else group, token, version)
    return entry(hash((group, *before[max(0, len(before) - window + 1) :])), token, version)


def choose(entries: Sequence[Entry], vocab_size: int) -> int:
    """Return the token that is sampled after reading `entries`."""
    return hash(tuple(entries)) % vocab_size


def score(before: Entry, token: int) -> Logprobs:
    return Logprobs(-float(hash((before, token)) % 1000))


def expected_entries(tokens: Sequence[int], version: int, group: int = 0, window: int | None = None) -> list[Entry]:
    entries: list[Entry] = []
    for token in tokens:
        entries.append(next_entry(entries, token, version, group, window))
    return entries


def vector_of(entries: Sequence[Entry]) -> bytes:
    return array("f", [float(sum(entries) % 2**20)]).tobytes()


def expected_vector(
    tokens: Sequence[int], version: int, pooling: Pooling, windows: Sequence[int | None] = (None,)
) -> bytes:
    """Return the vector that a correct engine with weights `version` computes of `tokens`."""
    kv = [expected_entries(tokens, version, *group) for group in enumerate(windows)]
    return vector_of(kv[0] if pooling == "mean" else visible(kv, windows))


def expected_token(
    tokens: Sequence[int], version: int, vocab_size: int, windows: Sequence[int | None] = (None,)
) -> int:
    """Return the token that a correct engine with weights `version` samples after `tokens`."""
    kv = [expected_entries(tokens, version, *group) for group in enumerate(windows)]
    return choose(visible(kv, windows), vocab_size)


def visible(kv: Sequence[list[Entry]], windows: Sequence[int | None]) -> list[Entry]:
    """The entries that the windows of the groups show after those in `kv`."""
    shown = (entries[0 if window is None else -window :] for entries, window in zip(kv, windows, strict=True))
    return list(chain.from_iterable(shown))


class FakeDevice:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        vocab_size: int,
        version: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.groups = LayerGroups(block_size, windows)
        self.version = version
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.kv: list[list[Entry]] = [[-1] * block_size for _ in range(num_blocks)]
        self._tokens: list[list[int]] = [[] for _ in range(max_rows)]
        self._tables: list[list[int]] = [[] for _ in range(max_rows)]
        self._scored: list[range] = [range(0)] * max_rows  # by row: prompt positions to be scored
        self._routed: dict[int, int] = {}  # by row: the first position whose experts are to be reported
        self._pooled: dict[int, tuple[Join, list[Entry]]] = {}  # by row, with the entries so far
        self._queue: deque[StepPlan] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def land(self, lengths: Sequence[int] = ()) -> StepResult:
        """Run the oldest launched step. `lengths` has the number of tokens for each slice that samples; default 1."""
        plan = self._queue.popleft()
        assert plan.version == self.version, "weights changed under a launched step"
        for join in plan.joins:
            self._tokens[join.row] = list(join.tokens)
            self._tables[join.row] = list(join.blocks)
            scored = range(join.sampling.prompt_logprobs_start, join.prompt_len)
            self._scored[join.row] = range(0) if join.sampling.prompt_logprobs is None else scored
            self._routed.pop(join.row, None)
            if join.sampling.return_routed_experts:
                self._routed[join.row] = join.sampling.routed_experts_prompt_start
            self._pooled.pop(join.row, None)
            if join.pooling is not None:
                self._pooled[join.row] = join, []
        for row, blocks in plan.grown:
            self._tables[row] += blocks
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._write(row, start, count)
        tokens = self._sample(plan, iter(lengths or repeat(1)))
        routed = self._report_routed(plan) if self._routed else {}
        vectors = self._pool(plan) if self._pooled else {}
        return StepResult(
            plan.step, tokens, {}, self._score(plan), lengths=list(lengths), routed=routed, vectors=vectors
        )

    def forget(self) -> None:
        """Lose all KV."""
        self.kv = [[-1] * self.block_size for _ in self.kv]

    def write_tokens(self, row: int, position: int, tokens: list[int]) -> None:
        """Replace sampled tokens with those of another device."""
        self._tokens[row][position:] = tokens

    def read(self, row: int, group: int, start: int, stop: int) -> list[Entry]:
        """The entries of a group of layers, through the row's block table."""
        table, size, count = self._tables[row], self.block_size, len(self.groups)
        return [self.kv[table[position // size * count + group]][position % size] for position in range(start, stop)]

    def read_visible(self, row: int, group: int, stop: int) -> list[Entry]:
        """The entries that the window of a group shows to the token at `stop - 1`."""
        window = self.groups.windows[group]
        return self.read(row, group, 0 if window is None else max(0, stop - window), stop)

    def _write(self, row: int, start: int, count: int) -> None:
        assert count > 0, "a slice with nothing to compute has nothing to sample from"
        table, tokens, size = self._tables[row], self._tokens[row], self.block_size
        for position in range(start, start + count):
            for group, window in enumerate(self.groups.windows):
                # Read through the block table: another sequence may have written the previous entries.
                seen = 1 if window is None else window - 1
                before = self.read(row, group, max(0, position - seen), position)
                block = table[position // size * len(self.groups) + group]
                self.kv[block][position % size] = next_entry(before, tokens[position], self.version, group, window)

    def _sample(self, plan: StepPlan, lengths: Iterator[int]) -> list[int]:
        sampled = []
        for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            if samples:
                end = start + count
                kv = [self.read_visible(row, group, end) for group in range(len(self.groups))]
                tokens = self._choose_run(row, kv, next(lengths))
                self.write_tokens(row, end, tokens)
                sampled += tokens
        return sampled

    def _choose_run(self, row: int, kv: list[list[Entry]], length: int) -> list[int]:
        """Return the next tokens after `kv`. Their KV is not written here; later slices compute it."""
        tokens: list[int] = []
        for _ in range(length):
            tokens.append(self._choose(row, visible(kv, self.groups.windows)))
            for group, window in enumerate(self.groups.windows):
                kv[group].append(next_entry(kv[group], tokens[-1], self.version, group, window))
        return tokens

    def _choose(self, row: int, entries: list[Entry]) -> int:
        return choose(entries, self.vocab_size)

    def _score(self, plan: StepPlan) -> dict[int, tuple[Logprobs, ...]]:
        scores = {}
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            first, stop = max(start + 1, self._scored[row].start), min(start + count + 1, self._scored[row].stop)
            if first < stop:
                entries, tokens = self.read(row, 0, first - 1, stop - 1), self._tokens[row]
                scores[i] = tuple(map(score, entries, tokens[first:stop]))
        return scores

    def _report_routed(self, plan: StepPlan) -> dict[int, RoutedExperts]:
        """As a real device does, with the KV of each token in the place of its experts."""
        routed = {}
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            first, end = self._routed.get(row), start + count
            if first is not None and first < end:
                routed[i] = RoutedExperts(first, array("q", self.read(row, 0, first, end)).tobytes())
                self._routed[row] = end
        return routed

    def _pool(self, plan: StepPlan) -> dict[int, bytes]:
        """As a real device does: a mean is a sum over the slices of a prompt, which must not leave any token out."""
        vectors = {}
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            if row not in self._pooled:
                continue
            (join, entries), end = self._pooled[row], start + count
            if join.pooling == "mean":
                assert start == len(entries), "the sum of a prompt lacks the tokens before this slice"
                entries += self.read(row, 0, start, end)
            if end == join.prompt_len:
                groups = range(len(self.groups))
                shown = [entry for group in groups for entry in self.read_visible(row, group, end)]
                vectors[i] = vector_of(entries if join.pooling == "mean" else shown)
                del self._pooled[row]
        return vectors
