"""Numbers for Prometheus: what the router counts, and what it knows of its workers. Nobody is asked for a scrape."""

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
_OURS = "router_"  # after the prefix that every name of ours has

# name, help, value
WORKER_GAUGES: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("worker_in_flight", "Requests of ours that the worker has.", lambda w: w.in_flight),
    ("worker_pending_tokens", "Estimated prompt tokens whose first token has not come.", lambda w: w.pending_tokens),
    ("worker_running", "Sequences it computes, by its own report.", lambda w: w.running),
    ("worker_waiting", "Sequences that wait in it, by its own report.", lambda w: w.waiting),
    ("worker_free_blocks", "KV blocks that nothing holds, by its own report.", lambda w: w.free_blocks),
    ("worker_weight_version", "Version of its weights; -1 if it has none.", lambda w: _version(w)),
    ("worker_failures", "Failures in a row; at three it gets nothing more.", lambda w: w.failures),
    ("worker_circuit_trips", "Times it went down without an answer in between.", lambda w: w.trips),
)


WORKER_COUNTERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("worker_errors", "Times it failed.", lambda w: w.errors),
    (
        "worker_prompt_tokens",
        "Prompt tokens of answers that tell what was cached of them.",
        lambda w: w.prompt_tokens,
    ),
    ("worker_expected_cached_tokens", "Those that we expected in its cache.", lambda w: w.expected_tokens),
    ("worker_cached_tokens", "Those that really were, by its own word.", lambda w: w.cached_tokens),
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
        yield InfoMetricFamily(PREFIX + "build", "What is running.", value={"version": self._version})
        yield from _about_requests(self._router)
        yield from _about_workers(self._router)
        yield from _about_fleet(self._router)
        yield from _about_index(self._router)


def _about_requests(router: Router) -> Iterator[Metric]:
    counters, admission = router.counters, router.admission
    yield counter(_OURS + "requests", "Requests that came in.", counters.requests)
    yield gauge(_OURS + "requests_in_flight", "Requests that have not ended.", len(router.live))
    yield gauge(_OURS + "queue_length", "Requests that wait for their turn.", admission.waiting)
    yield counter(_OURS + "queued", "Requests that have waited for their turn.", admission.waited)
    yield counter(_OURS + "queue_seconds", "Time they have waited.", admission.waited_s)
    yield by_label(_OURS + "requests_refused", "Requests that the router itself refused.", "code", counters.refused)
    yield by_label(_OURS + "clients_left", "Clients that left before their answer's end.", "cause", counters.left)
    yield by_label(_OURS + "chosen", "Attempts, by why their worker was chosen.", "reason", counters.chosen)
    yield counter(_OURS + "retries", "Attempts after one that brought nothing.", counters.retries)
    yield counter(_OURS + "resumes", "Answers that another worker went on with.", counters.resumes)
    yield counter(_OURS + "aborts_ignored", "Aborts that did not say of what.", counters.aborts_ignored)
    yield counter(_OURS + "prefills_lost", "Prompts computed where they were answered.", counters.prefills_lost)
    yield gauge(_OURS + "tasks", "Tasks of the event loop.", len(asyncio.all_tasks(router.loop)))
    yield gauge(_OURS + "holding", "Whether the whole fleet is paused through us.", router.holding)


def _about_workers(router: Router) -> Iterator[Metric]:
    workers = router.fleet.everyone
    for made, families in ((GaugeMetricFamily, WORKER_GAUGES), (CounterMetricFamily, WORKER_COUNTERS)):
        for name, help, value in families:
            family = made(PREFIX + name, help, labels=("worker",))
            for worker in workers:
                family.add_metric((worker.name,), value(worker))
            yield family
    states = GaugeMetricFamily(
        PREFIX + "worker_state", "1 for the state it is in.", labels=("worker", "role", "state")
    )
    for worker in workers:
        for state in get_args(WorkerState):
            states.add_metric((worker.name, worker.role, state), worker.state == state)
    yield states
    attempts = CounterMetricFamily(
        PREFIX + "attempts", "Attempts that have ended, by how.", labels=("worker", "outcome")
    )
    for (name, outcome), count in router.counters.attempts.items():
        attempts.add_metric((name, outcome), count)
    yield attempts


def _about_fleet(router: Router) -> Iterator[Metric]:
    """Of a fleet that was started with us."""
    if router.scaler is None:
        return
    wanted = GaugeMetricFamily(PREFIX + "servers_wanted", "Servers that there should be.", labels=("role",))
    ready = GaugeMetricFamily(PREFIX + "servers_ready", "Servers that take requests.", labels=("role",))
    for family, counts in ((wanted, router.scaler.wanted), (ready, router.scaler.running)):
        for role, number in counts.items():
            family.add_metric((role,), number)
        yield family


def _about_index(router: Router) -> Iterator[Metric]:
    yield gauge(_OURS + "index_nodes", "Prefixes that are remembered.", len(router.index))
    yield gauge(_OURS + "index_nodes_limit", "Prefixes that may be remembered.", router.index.max_nodes)
    yield counter(
        _OURS + "double_releases", "Times a load was given back twice: a bug.", router.fleet.double_releases
    )
