"""Rates and percentiles out of counts that only grow.

Counts come from several sources, each of which may be started again and then begins at nothing, or appear and go. So
growth is taken per source, is never negative, and a source that has just appeared has not grown. One that is silent for
a moment has not grown either: what it has done meanwhile counts when it speaks again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

WINDOW_S = 10.0  # of percentiles and of the hit rate: a second alone has too few requests


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int = 0  # of answers
    prompt_tokens: int = 0  # looked up in the prefix cache
    cached_tokens: int = 0  # and found there
    requests: int = 0
    retries: int = 0
    resumes: int = 0
    aborts: dict[str, int] = {}  # by cause
    first_token: tuple[int, ...] = ()  # a histogram, without its bounds
    between_tokens: tuple[int, ...] = ()


NUMBERS = ("tokens", "prompt_tokens", "cached_tokens", "requests", "retries", "resumes")


def grown(now: Counts, then: Counts) -> Counts:
    """By how much; a count that has fallen began anew in between."""
    aborts = {cause: _grown(count, then.aborts.get(cause, 0)) for cause, count in now.aborts.items()}
    return Counts(
        **{name: _grown(getattr(now, name), getattr(then, name)) for name in NUMBERS},
        aborts={cause: count for cause, count in aborts.items() if count},
        first_token=_all_grown(now.first_token, then.first_token),
        between_tokens=_all_grown(now.between_tokens, then.between_tokens),
    )


def _grown(now: int, then: int) -> int:
    return now - then if now >= then else now


def _all_grown(now: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
    return tuple(_grown(a, b) for a, b in zip_longest(now, then, fillvalue=0))


def together(counts: Iterable[Counts]) -> Counts:
    all = list(counts)
    aborts: Counter[str] = Counter()
    for each in all:
        aborts.update(each.aborts)
    return Counts(
        **{name: sum(getattr(each, name) for each in all) for name in NUMBERS},
        aborts=dict(aborts),
        first_token=_sums(each.first_token for each in all),
        between_tokens=_sums(each.between_tokens for each in all),
    )


def _sums(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*histograms, fillvalue=0)))


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Below which `share` of the observations lie, as if they were spread evenly in their bucket; None without any."""
    total = sum(counts)
    if not total:
        return None
    left = share * total
    for index, count in enumerate(counts):
        if count and left <= count:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low  # beyond the last bound nobody knows how far
            return low + (high - low) * left / count
        left -= count
    return bounds[-1]


Sources = Mapping[str, Counts]


class Meter:
    """Remembers counts for as long as the window is."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, Sources]] = deque()
        self._heard_s: dict[str, float] = {}  # when each source last spoke

    def read(self, at_s: float, sources: Sources) -> None:
        self._heard_s |= dict.fromkeys(sources, at_s)
        before = self._readings[-1][1] if self._readings else {}
        silent = {name: counts for name, counts in before.items() if at_s - self._heard_s[name] < self._window_s}
        self._heard_s = {name: self._heard_s[name] for name in (*silent, *sources)}
        self._readings.append((at_s, {**silent, **sources}))
        while len(self._readings) > 2 and at_s - self._readings[1][0] >= self._window_s:
            self._readings.popleft()

    @property
    def step_s(self) -> float:
        """Between the last two readings; 0 if there are not two."""
        return self._readings[-1][0] - self._readings[-2][0] if len(self._readings) > 1 else 0.0

    def step(self) -> dict[str, Counts]:
        """What has grown since the last reading, by source."""
        return self._since(-2)

    def window(self) -> Counts:
        """What has grown in the whole window."""
        return together(self._since(0).values())

    def _since(self, index: int) -> dict[str, Counts]:
        if len(self._readings) < 2:
            return {}
        then, now = self._readings[index][1], self._readings[-1][1]
        return {name: grown(counts, then[name]) for name, counts in now.items() if name in then}
