"""Prometheus metrics: the router's own counters and its view of the workers. A scrape sends no call to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headgate.edge.metrics import by_label, counter, gauge
from headgate.router.fleet.worker import Worker, WorkerState

if TYPE_CHECKING:
    from headgate.router.router import Router

PREFIX = "headgate:router_"
_ROUTER = "router_"  # follows the prefix that all metric names have

# name, help, value
WORKER_GAUGES: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("worker_in_flight", "Requests of this router at the worker.", lambda w: w.in_flight),
    (
        "worker_pending_tokens",
        "Estimated prompt tokens of requests without a first token.",
        lambda w: w.pending_tokens,
    ),
    ("worker_running", "Running sequences, as the worker reports.", lambda w: w.running),
    ("worker_waiting", "Waiting sequences, as the worker reports.", lambda w: w.waiting),
    ("worker_free_blocks", "KV blocks that nothing holds, as the worker reports.", lambda w: w.free_blocks),
    ("worker_weight_version", "Version of its weights; -1 if unknown.", lambda w: _version(w)),
    ("worker_failures", "Consecutive failures; three mark the worker down.", lambda w: w.failures),
    ("worker_circuit_trips", "Times it went down without answering a request in between.", lambda w: w.trips),
)


WORKER_COUNTERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("worker_errors", "Times it failed.", lambda w: w.errors),
    (
        "worker_prompt_tokens",
        "Prompt tokens of answers that report cached tokens.",
        lambda w: w.prompt_tokens,
    ),
    (
        "worker_expected_cached_tokens",
        "Prompt tokens that the router expected in its cache.",
        lambda w: w.expected_tokens,
    ),
    ("worker_cached_tokens", "Prompt tokens found in its cache, as the worker reports.", lambda w: w.cached_tokens),
)


def _version(worker: Worker) -> int:
    return -1 if worker.version is None else worker.version


def render(router: Router, version: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_RouterFamilies(router, version))
    return generate_latest(registry)


class _RouterFamilies(Collector):
    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(PREFIX + "build", "The version that is running.", value={"version": self._version})
        yield from _about_requests(self._router)
        yield from _about_workers(self._router)
        yield from _about_fleet(self._router)
        yield from _about_index(self._router)


def _about_requests(router: Router) -> Iterator[Metric]:
    counters, admission = router.counters, router.admission
    yield counter(_ROUTER + "requests", "Requests received.", counters.requests)
    yield gauge(_ROUTER + "requests_in_flight", "Requests that have not ended.", len(router.live))
    yield gauge(_ROUTER + "queue_length", "Requests waiting for admission.", admission.waiting)
    yield counter(_ROUTER + "queued", "Requests that have waited for admission.", admission.waited)
    yield counter(_ROUTER + "queue_seconds", "Time that requests have waited for admission.", admission.waited_s)
    yield by_label(_ROUTER + "requests_refused", "Requests refused by the router itself.", "code", counters.refused)
    yield by_label(
        _ROUTER + "clients_left", "Clients that left before the end of their answer.", "cause", counters.clients_left
    )
    yield by_label(_ROUTER + "chosen", "Attempts, by the reason for the choice of worker.", "reason", counters.chosen)
    yield counter(_ROUTER + "retries", "Attempts after one without output.", counters.retries)
    yield counter(_ROUTER + "resumes", "Answers resumed at another worker.", counters.resumes)
    yield counter(_ROUTER + "aborts_ignored", "Aborts that named no request.", counters.aborts_ignored)
    yield counter(
        _ROUTER + "prefills_lost",
        "Prompts computed by the decode worker because no ticket came.",
        counters.prefills_lost,
    )
    yield gauge(_ROUTER + "tasks", "Tasks of the event loop.", len(asyncio.all_tasks(router.loop)))
    yield gauge(_ROUTER + "holding", "Whether this router has paused the whole fleet.", router.holding)


def _about_workers(router: Router) -> Iterator[Metric]:
    workers = router.fleet.with_leaving
    for made, families in ((GaugeMetricFamily, WORKER_GAUGES), (CounterMetricFamily, WORKER_COUNTERS)):
        for name, help, value in families:
            family = made(PREFIX + name, help, labels=("worker",))
            for worker in workers:
                family.add_metric((worker.name,), value(worker))
            yield family
    states = GaugeMetricFamily(
        PREFIX + "worker_state", "1 for the current state.", labels=("worker", "role", "state")
    )
    for worker in workers:
        for state in get_args(WorkerState):
            states.add_metric((worker.name, worker.role, state), worker.state == state)
    yield states
    attempts = CounterMetricFamily(
        PREFIX + "attempts", "Finished attempts, by outcome.", labels=("worker", "outcome")
    )
    for (name, outcome), count in router.counters.attempts.items():
        attempts.add_metric((name, outcome), count)
    yield attempts


def _about_fleet(router: Router) -> Iterator[Metric]:
    """Metrics of a fleet that was started together with this router."""
    if router.scaler is None:
        return
    wanted = GaugeMetricFamily(PREFIX + "servers_wanted", "Wanted servers.", labels=("role",))
    ready = GaugeMetricFamily(PREFIX + "servers_ready", "Servers that accept requests.", labels=("role",))
    for family, counts in ((wanted, router.scaler.wanted), (ready, router.scaler.running)):
        for role, number in counts.items():
            family.add_metric((role,), number)
        yield family


def _about_index(router: Router) -> Iterator[Metric]:
    yield gauge(_ROUTER + "index_nodes", "Prefixes in the index.", len(router.index))
    yield gauge(_ROUTER + "index_nodes_limit", "Largest number of prefixes in the index.", router.index.max_nodes)
    yield counter(
        _ROUTER + "double_releases",
        "Times that load was released twice, which is a bug.",
        router.fleet.double_releases,
    )
