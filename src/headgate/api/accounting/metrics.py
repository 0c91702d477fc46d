"""The counters of this process, and the status that its engines report on request. `metrics_page.py` writes the page.

Only the event loop uses these objects, so counting needs no lock: a histogram is a list of integers, and an observation on
the token path is one bisection.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from headgate.contract.dashboard import BETWEEN_TOKENS_S, FIRST_TOKEN_S
from headgate.engine.replicas import Replica
from headgate.errors import EngineDead
from headgate.protocol.message import EngineInfo, Pong

WHOLE_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, as Prometheus writes them, and how many values are at or below each."""
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Stopwatch:
    """The total time between starts and stops. Starting a running stopwatch, or stopping a stopped one, has no effect."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before_s = 0.0
        self._since_s: float | None = None

    def start(self) -> None:
        if self._since_s is None:
            self._since_s = self._clock()

    def stop(self) -> None:
        self._before_s, self._since_s = self.elapsed_s, None

    @property
    def elapsed_s(self) -> float:
        return self._before_s + (0.0 if self._since_s is None else self._clock() - self._since_s)


@dataclass(eq=False)
class ServerMetrics:
    """The counters of this process. The ledger counts requests and tokens; control handlers count pauses."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    whole_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_REQUEST_S))
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by finish reason and cause
    refused: Counter[str] = field(default_factory=Counter)  # requests that were not accepted, by error code
    aborts: Counter[str] = field(default_factory=Counter)  # choices, by cause
    tokens: Counter[str] = field(default_factory=Counter)  # by kind: prompt, cached, output, engine
    received_tokens: int = 0  # from engines, for answers; also of requests that have not ended
    aborts_ignored: int = 0  # abort calls that named no request
    pauses: Counter[str] = field(default_factory=Counter)  # by mode
    paused: Stopwatch = field(default_factory=lambda: Stopwatch())


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at the time of a query; `pong` is None if it did not answer."""

    index: int
    restarts: int
    info: EngineInfo | None
    pong: Pong | None
    outdated: bool = False  # the engine lacks the weights of the last update, and gets no requests


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of all engines that answer, together."""

    running: int  # sequences
    waiting: int
    held_blocks: int
    num_blocks: int
    block_size: int

    @property
    def cache_usage(self) -> float:
        """The fraction of KV blocks that running sequences hold, from 0 to 1."""
        return self.held_blocks / self.num_blocks


def load_of(engines: Sequence[EngineView]) -> ServerLoad | None:
    """None if no engine answers."""
    known = [(view.info, view.pong.status) for view in engines if view.info is not None and view.pong is not None]
    if not known:
        return None
    return ServerLoad(
        running=sum(status.running for _, status in known),
        waiting=sum(status.waiting for _, status in known),
        held_blocks=sum(status.held_blocks for _, status in known),
        num_blocks=sum(info.num_blocks for info, _ in known),
        block_size=known[0][0].block_size,
    )


async def query_engine(replica: Replica, timeout_s: float) -> EngineView:
    client = replica.client
    if client is None:
        return EngineView(replica.index, replica.restarts, None, None)
    try:
        pong = await client.ping(timeout_s)
    except (EngineDead, TimeoutError):
        return EngineView(replica.index, replica.restarts, client.info, None)
    return EngineView(replica.index, replica.restarts, client.info, pong, replica.outdated)


async def query_engines(replicas: Sequence[Replica], timeout_s: float) -> list[EngineView]:
    return await asyncio.gather(*(query_engine(replica, timeout_s) for replica in replicas))
