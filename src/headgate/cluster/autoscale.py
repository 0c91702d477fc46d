"""Autoscaling: a pure function from observed load to a number of servers, and a loop that applies it.

The number grows when, for a few seconds, requests wait too long or KV is nearly full, and only after the servers
already requested are ready. It shrinks by one when, for minutes, no request has waited and the remaining servers
would be at most half full. The gap between the two conditions is wide, so that noise around a constant load changes
nothing. If the number must grow again soon after it shrank, the wait before the next shrink doubles.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headgate.errors import RequestError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    least: int
    most: int

    @classmethod
    def of(cls, text: str, where: str) -> ScaleBounds:
        found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise RequestError(f"{where} must be LEAST:MOST with 1 <= LEAST <= MOST, such as 1:6, not {text!r}")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The observed load of the servers of one role."""

    now_s: float
    wanted: int  # requested number of servers
    ready: int  # servers that accept requests
    queue_s: float  # age of the oldest waiting request
    kv_usage: float  # share of KV blocks that are held, 0 to 1
    busy: float  # running sequences, as a share of those that may run

    @property
    def fullness(self) -> float:
        return max(self.kv_usage, self.busy)


@dataclass(frozen=True, slots=True)
class Thresholds:
    grow_queue_s: float = 2.0  # grow when a request has waited this long
    grow_kv_usage: float = 0.9  # or grow when this share of KV is held
    grow_after_s: float = 5.0  # how long one of these two conditions must hold before the number grows
    shrink_fullness: float = 0.5  # shrink when one server fewer would have at most this share of KV and rows in use
    shrink_after_s: float = 120.0  # how long this must hold, without waiting requests, before the number shrinks
    longest_patience_s: float = 3600.0  # longest wait before a shrink, after doubling
    rest_s: float = 15.0  # no change for this long after a change
    start_s: float = 300.0  # how long to wait for requested servers to be ready before requesting more


@dataclass(frozen=True, slots=True)
class AutoscaleState:
    """The state from earlier decisions on which the next one depends."""

    wanted: int
    changed_s: float
    patience_s: float  # how long the load must be low before a server is removed
    hot_since_s: float | None = None
    cool_since_s: float | None = None
    shrank_s: float | None = None

    @classmethod
    def new(cls, seen: Snapshot, thresholds: Thresholds) -> AutoscaleState:
        return cls(seen.wanted, seen.now_s, thresholds.shrink_after_s)


def decide(
    seen: Snapshot, memory: AutoscaleState, bounds: ScaleBounds, thresholds: Thresholds
) -> tuple[int, AutoscaleState]:
    """Return the new number of servers, and the state for the next decision."""
    memory = _observed(seen, memory, thresholds)
    wanted = seen.wanted
    if _should_grow(seen, memory, thresholds):
        wanted += wanted if seen.queue_s >= 4 * thresholds.grow_queue_s else 1
    elif _should_shrink(seen, memory, thresholds):
        wanted -= 1
    wanted = min(max(wanted, bounds.least), bounds.most)
    return wanted, memory if wanted == seen.wanted else _changed(seen, memory, wanted, thresholds)


def _observed(seen: Snapshot, memory: AutoscaleState, thresholds: Thresholds) -> AutoscaleState:
    if seen.wanted != memory.wanted:  # changed by `headgate scale`
        memory = replace(memory, wanted=seen.wanted, changed_s=seen.now_s, hot_since_s=None, cool_since_s=None)
    hot_since_s = memory.hot_since_s if memory.hot_since_s is not None else seen.now_s
    cool_since_s = memory.cool_since_s if memory.cool_since_s is not None else seen.now_s
    return replace(
        memory,
        hot_since_s=hot_since_s if _is_hot(seen, thresholds) else None,
        cool_since_s=cool_since_s if _is_cool(seen, thresholds) else None,
    )


def _is_hot(seen: Snapshot, thresholds: Thresholds) -> bool:
    return seen.queue_s >= thresholds.grow_queue_s or seen.kv_usage >= thresholds.grow_kv_usage


def _is_cool(seen: Snapshot, thresholds: Thresholds) -> bool:
    """Whether one server fewer would suffice."""
    if seen.wanted < 2 or seen.ready < seen.wanted or seen.queue_s > thresholds.grow_queue_s / 4:
        return False
    return seen.fullness * seen.ready / (seen.ready - 1) <= thresholds.shrink_fullness


def _should_grow(seen: Snapshot, memory: AutoscaleState, thresholds: Thresholds) -> bool:
    if memory.hot_since_s is None or seen.now_s - memory.hot_since_s < thresholds.grow_after_s:
        return False
    rested_s = seen.now_s - memory.changed_s
    return rested_s >= (thresholds.rest_s if seen.ready >= seen.wanted else thresholds.start_s)


def _should_shrink(seen: Snapshot, memory: AutoscaleState, thresholds: Thresholds) -> bool:
    if memory.cool_since_s is None or seen.now_s - memory.changed_s < thresholds.rest_s:
        return False
    return seen.now_s - memory.cool_since_s >= memory.patience_s


def _changed(seen: Snapshot, memory: AutoscaleState, wanted: int, thresholds: Thresholds) -> AutoscaleState:
    now_s = seen.now_s
    memory = replace(memory, wanted=wanted, changed_s=now_s, hot_since_s=None, cool_since_s=None)
    if wanted < seen.wanted:
        return replace(memory, shrank_s=now_s)
    regretted = memory.shrank_s is not None and now_s - memory.shrank_s <= 2 * memory.patience_s
    patience_s = 2 * memory.patience_s if regretted else thresholds.shrink_after_s
    return replace(memory, shrank_s=None, patience_s=min(patience_s, thresholds.longest_patience_s))


class Autoscaler:
    """Decides once a second and calls `want` with a new number. `look` observes the load; None means no decision."""

    def __init__(
        self,
        bounds: Mapping[str, ScaleBounds],
        look: Callable[[str, float], Snapshot | None],
        want: Callable[[Mapping[str, int]], object],
        thresholds: Thresholds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = dict(bounds)
        self._look = look
        self._want = want
        self._thresholds = thresholds or Thresholds()
        self._clock = clock
        self._memories: dict[str, AutoscaleState] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self.turn()
            except Exception:  # a bug here must not stop the fleet
                log.exception("autoscaling failed")

    def turn(self) -> None:
        for role, bounds in self._bounds.items():
            seen = self._look(role, self._clock())
            if seen is None:
                self._memories.pop(role, None)  # the load before a pause does not predict the load after it
                continue
            memory = self._memories.get(role) or AutoscaleState.new(seen, self._thresholds)
            wanted, self._memories[role] = decide(seen, memory, bounds, self._thresholds)
            if wanted != seen.wanted:
                reason = f"waited {seen.queue_s:.1f} s, KV {seen.kv_usage:.0%}, busy {seen.busy:.0%}"
                log.info("autoscale: %s %d -> %d (%s)", role, seen.wanted, wanted, reason)
                self._want({role: wanted})
