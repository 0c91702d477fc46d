"""Prometheus metrics: counters of this process, and the status that its engines report for each scrape.

Only the event loop uses these objects, so counting needs no lock: a histogram is a list of integers, and an observation on
the token path is one bisection. The prometheus library only writes the page.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headgate.contract.dashboard import BETWEEN_TOKENS_S, FIRST_TOKEN_S
from headgate.edge.metrics import PREFIX, by_label, counter, gauge
from headgate.engine.replicas import Replica
from headgate.errors import EngineDead
from headgate.protocol.command import State
from headgate.protocol.message import EngineInfo, Pong, TransferCounts

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

    def family(self, name: str, help: str) -> HistogramMetricFamily:
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self.counts)), strict=True))
        return HistogramMetricFamily(PREFIX + name, help, buckets=buckets, sum_value=self.sum)


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
    """The counters of this process; written by the ledger."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    whole_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_REQUEST_S))
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by finish reason and cause
    refused: Counter[str] = field(default_factory=Counter)  # requests that were not accepted, by error code
    aborts: Counter[str] = field(default_factory=Counter)  # choices, by cause
    tokens: Counter[str] = field(default_factory=Counter)  # by kind: prompt, cached, output, engine
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
    outdated: bool = False  # has other weights than the fleet, and gets no requests


@dataclass(frozen=True, kw_only=True)
class MetricsPage:
    """The content of `/metrics` for one scrape."""

    version: str
    model: str
    metrics: ServerMetrics
    in_flight: int
    limit: int
    engines: Sequence[EngineView]
    tasks: int = 0  # number of tasks of the event loop

    def render(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(_ServerFamilies(self))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        yield from self._about_us()
        yield from self._about_requests()
        yield from self._about_control()
        yield from self._about_engines()

    def _about_us(self) -> Iterator[Metric]:
        build = {"version": self.version, "model": self.model}
        yield InfoMetricFamily(PREFIX + "build", "Version and model.", value=build)
        yield gauge("num_requests_in_flight", "Choices accepted and not ended.", self.in_flight)
        yield gauge("max_requests_in_flight", "Limit of choices in flight; more are refused with 429.", self.limit)
        yield gauge("tasks", "Tasks of the event loop.", self.tasks)

    def _about_requests(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield metrics.first_token.family("time_to_first_token_seconds", "From acceptance to the first token.")
        yield metrics.between_tokens.family("inter_token_latency_seconds", "From one token of a choice to the next.")
        yield metrics.whole_request.family("e2e_request_latency_seconds", "From acceptance to the end.")
        requests = CounterMetricFamily(
            PREFIX + "requests", "Accepted requests that have ended.", labels=("finish_reason", "cause")
        )
        for (reason, cause), count in metrics.requests.items():
            requests.add_metric((reason, cause), count)
        yield requests
        yield by_label("requests_refused", "Requests refused before they were accepted.", "code", metrics.refused)
        yield by_label("aborts", "Choices that were aborted.", "cause", metrics.aborts)
        yield by_label(
            "tokens",
            "Tokens of ended choices. prompt includes cached; engine: all generated tokens, delivered or not.",
            "kind",
            metrics.tokens,
        )

    def _about_control(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield by_label("pauses", "Pauses that were requested.", "mode", metrics.pauses)
        yield counter(
            "paused_seconds", "Total time from pause requests to the following resumes.", metrics.paused.elapsed_s
        )
        yield counter("aborts_ignored", "Abort calls that named no request.", metrics.aborts_ignored)
        states = GaugeMetricFamily(
            PREFIX + "engine_state", "1 for the state an engine is in.", labels=("engine", "state")
        )
        for index, pong in ((view.index, view.pong) for view in self.engines if view.pong is not None):
            for state in get_args(State):
                states.add_metric((str(index), state), pong.status.state == state)
        yield states

    def _about_engines(self) -> Iterator[Metric]:
        pongs = {view.index: view.pong.status for view in self.engines if view.pong is not None}
        yield by_engine(
            "engine_up", "Whether the engine answers.", {v.index: v.pong is not None for v in self.engines}
        )
        restarts = {view.index: view.restarts for view in self.engines}
        yield by_engine("engine_restarts", "Restarts of the engine.", restarts, total=True)
        for name, help, field_name, total in _STATUS:
            values = {index: getattr(status, field_name) for index, status in pongs.items()}
            yield by_engine(name, help, values, total=total)
        yield from _about_transfers({index: status.moved for index, status in pongs.items()})
        usage = {
            view.index: view.pong.status.held_blocks / view.info.num_blocks
            for view in self.engines
            if view.pong is not None and view.info is not None
        }
        yield by_engine("kv_cache_usage", "Fraction of KV blocks that running requests hold, from 0 to 1.", usage)


# name, help, field of EngineStatus, whether it only grows
_STATUS = (
    ("num_requests_running", "Sequences that are being computed.", "running", False),
    ("num_requests_waiting", "Sequences that wait in the engine.", "waiting", False),
    ("kv_blocks_held", "KV blocks that running requests hold.", "held_blocks", False),
    ("kv_blocks_cached", "KV blocks kept only as cached prefixes.", "cached_blocks", False),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prompt_tokens", True),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens", True),
    ("preemptions", "Preemptions: sequences that had to release their blocks.", "preemptions", True),
    ("abort_messages", "Abort messages that the engine has received.", "abort_messages", True),
    ("generation_tokens", "Tokens that the engine has generated, delivered or not.", "output_tokens", True),
    ("kv_leases", "Prompts whose KV is kept for another engine.", "leases", False),
    ("kv_blocks_leased", "KV blocks kept for other engines; included in those held.", "leased_blocks", False),
    ("kv_leases_expired", "Leases that expired before the KV was fetched.", "leases_expired", True),
    ("kv_fetches", "Prompts whose KV is being fetched from another engine.", "fetches", False),
    ("kv_transfers", "Prompts whose KV came from another engine.", "transfers", True),
    ("kv_transfers_lost", "Prompts computed here after a fetch had failed.", "transfers_lost", True),
    ("rescheduled", "Answers returned for another server to resume.", "rescheduled", True),
    ("weight_version", "Version of the weights.", "version", False),
)


def _about_transfers(moved: Mapping[int, TransferCounts]) -> Iterator[Metric]:
    size = CounterMetricFamily(
        PREFIX + "kv_transfer_bytes", "KV moved, by direction.", labels=("engine", "direction")
    )
    failures = CounterMetricFamily(
        PREFIX + "kv_transfer_failures", "Failed fetches, by cause.", labels=("engine", "cause")
    )
    for index, counts in moved.items():
        size.add_metric((str(index), "received"), counts.received_bytes)
        size.add_metric((str(index), "sent"), counts.sent_bytes)
        for cause, count in counts.failures.items():
            failures.add_metric((str(index), cause), count)
    yield size
    yield failures
    seconds = {index: counts.fetch_s for index, counts in moved.items()}
    yield by_engine("kv_fetch_seconds", "Total time that prompts waited for their KV.", seconds, total=True)


class _ServerFamilies(Collector):
    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        return self._page.families()


def by_engine(name: str, help: str, values: Mapping[int, float], *, total: bool = False) -> Metric:
    kind = CounterMetricFamily if total else GaugeMetricFamily
    family = kind(PREFIX + name, help, labels=("engine",))
    for index, value in values.items():
        family.add_metric((str(index),), value)
    return family


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
