"""Computes rates and percentiles from monotonic counters.

Counters come from several sources, which may restart at zero, appear and disappear. Growth is therefore computed per
source and is never negative, and a new source has no growth. A source that is missing from a sample has no growth
either; its growth in the meantime is added when it reappears.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec

WINDOW_S = 10.0  # period over which percentiles and the hit rate are computed; one second has too few requests


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int = 0  # output tokens
    prompt_tokens: int = 0  # prompt tokens looked up in the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    requests: int = 0
    retries: int = 0
    resumes: int = 0
    aborts: dict[str, int] = {}  # by cause
    first_token: tuple[int, ...] = ()  # histogram counts; see HistogramBounds
    between_tokens: tuple[int, ...] = ()


NUMBERS = ("tokens", "prompt_tokens", "cached_tokens", "requests", "retries", "resumes")


def grown(now: Counts, then: Counts) -> Counts:
    """Return the growth from `then` to `now`; a counter that has fallen was restarted at zero."""
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
    """Return the value below which `share` of the observations lie, interpolated within a bucket.

    None if there are no observations.
    """
    total = sum(counts)
    if not total:
        return None
    left = share * total
    for index, count in enumerate(counts):
        if count and left <= count:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low  # the last bucket has no upper bound
            return low + (high - low) * left / count
        left -= count
    return bounds[-1]


Sources = Mapping[str, Counts]


class Meter:
    """Keeps the counts of the last window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, Sources]] = deque()
        self._seen_s: dict[str, float] = {}  # when each source was last read

    def read(self, at_s: float, sources: Sources) -> None:
        self._seen_s |= dict.fromkeys(sources, at_s)
        before = self._readings[-1][1] if self._readings else {}
        missing = {name: counts for name, counts in before.items() if at_s - self._seen_s[name] < self._window_s}
        self._seen_s = {name: self._seen_s[name] for name in (*missing, *sources)}
        self._readings.append((at_s, {**missing, **sources}))
        while len(self._readings) > 2 and at_s - self._readings[1][0] >= self._window_s:
            self._readings.popleft()

    @property
    def step_s(self) -> float:
        """Time between the last two readings; 0 if there are fewer."""
        return self._readings[-1][0] - self._readings[-2][0] if len(self._readings) > 1 else 0.0

    def step(self) -> dict[str, Counts]:
        """Growth since the previous reading, by source."""
        return self._since(-2)

    def window(self) -> Counts:
        """Growth over the whole window."""
        return together(self._since(0).values())

    def _since(self, index: int) -> dict[str, Counts]:
        if len(self._readings) < 2:
            return {}
        then, now = self._readings[index][1], self._readings[-1][1]
        return {name: grown(counts, then[name]) for name, counts in now.items() if name in then}
