"""The page of `GET /metrics` of a server: the counters of its process, and the status of its engines at the scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headgate.api.accounting.metrics import EngineView, Histogram, ServerMetrics
from headgate.api.accounting.vllm_metrics import vllm_families
from headgate.edge.metrics import PREFIX, by_label, counter, gauge
from headgate.protocol.command import State
from headgate.protocol.message import TransferCounts


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
        yield from vllm_families(self.model, self.metrics, self.engines)

    def _about_us(self) -> Iterator[Metric]:
        build = {"version": self.version, "model": self.model}
        yield InfoMetricFamily(PREFIX + "build", "Version and model.", value=build)
        yield gauge("num_requests_in_flight", "Choices accepted and not ended.", self.in_flight)
        yield gauge("max_requests_in_flight", "Limit of choices in flight; more are refused with 429.", self.limit)
        yield gauge("tasks", "Tasks of the event loop.", self.tasks)

    def _about_requests(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield _histogram(metrics.first_token, "time_to_first_token_seconds", "From acceptance to the first token.")
        yield _histogram(
            metrics.between_tokens, "inter_token_latency_seconds", "From one token of a choice to the next."
        )
        yield _histogram(metrics.whole_request, "e2e_request_latency_seconds", "From acceptance to the end.")
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


def _histogram(histogram: Histogram, name: str, help: str) -> Metric:
    return HistogramMetricFamily(PREFIX + name, help, buckets=histogram.buckets, sum_value=histogram.sum)


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
