"""Metrics of a server under vLLM's names, which gateways and autoscalers for model servers read.

Such readers take the first sample of a name, so values are summed over the engines of the server: one sample per name and
label value. A name whose meaning cannot be matched is left out. Counters are those of this process, because the sum over
engines would fall when one of them restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from headgate.api.accounting.metrics import EngineView, Histogram, ServerLoad, ServerMetrics, load_of

PREFIX = "vllm:"
MODEL = "model_name"
FINISHED = ("stop", "length", "abort", "error")  # vLLM's finish reasons


@dataclass(frozen=True, slots=True)
class LoadGauge:
    """The current load of the engines; without a sample if no engine answers."""

    name: str
    help: str
    value: Callable[[ServerLoad], float]

    def family(self, model: str, metrics: ServerMetrics, load: ServerLoad | None) -> Metric:
        family = GaugeMetricFamily(PREFIX + self.name, self.help, labels=(MODEL,))
        if load is not None:
            family.add_metric((model,), self.value(load))
        return family


@dataclass(frozen=True, slots=True)
class ProcessCounter:
    name: str
    help: str
    value: Callable[[ServerMetrics], float]

    def family(self, model: str, metrics: ServerMetrics, load: ServerLoad | None) -> Metric:
        family = CounterMetricFamily(PREFIX + self.name, self.help, labels=(MODEL,))
        family.add_metric((model,), self.value(metrics))
        return family


@dataclass(frozen=True, slots=True)
class ProcessHistogram:
    name: str
    help: str
    value: Callable[[ServerMetrics], Histogram]

    def family(self, model: str, metrics: ServerMetrics, load: ServerLoad | None) -> Metric:
        family, histogram = HistogramMetricFamily(PREFIX + self.name, self.help, labels=(MODEL,)), self.value(metrics)
        family.add_metric((model,), histogram.buckets, histogram.sum)
        return family


class CacheConfig:
    """The size of the KV cache, as labels."""

    name = "cache_config_info"
    help = "Tokens per KV block, and KV blocks of all engines; always 1."

    def family(self, model: str, metrics: ServerMetrics, load: ServerLoad | None) -> Metric:
        family = GaugeMetricFamily(PREFIX + self.name, self.help, labels=(MODEL, "block_size", "num_gpu_blocks"))
        if load is not None:
            family.add_metric((model, str(load.block_size), str(load.num_blocks)), 1)
        return family


class RequestsByReason:
    """Requests that another server continues are left out: that server counts them."""

    name = "request_success"
    help = "Requests that have ended, by finish reason."

    def family(self, model: str, metrics: ServerMetrics, load: ServerLoad | None) -> Metric:
        family = CounterMetricFamily(PREFIX + self.name, self.help, labels=(MODEL, "finished_reason"))
        for finished in FINISHED:
            ended = sum(count for (reason, _), count in metrics.requests.items() if reason == finished)
            family.add_metric((model, finished), ended)
        return family


VllmMetric = LoadGauge | ProcessCounter | ProcessHistogram | CacheConfig | RequestsByReason

VLLM_METRICS: tuple[VllmMetric, ...] = (
    LoadGauge("num_requests_running", "Sequences that are being computed.", lambda load: load.running),
    LoadGauge("num_requests_waiting", "Sequences that wait in an engine.", lambda load: load.waiting),
    LoadGauge("kv_cache_usage_perc", "Fraction of KV blocks in use, from 0 to 1.", lambda load: load.cache_usage),
    LoadGauge("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", lambda load: load.cache_usage),
    CacheConfig(),
    ProcessCounter("prompt_tokens", "Prompt tokens of ended choices.", lambda metrics: metrics.tokens["prompt"]),
    ProcessCounter("generation_tokens", "Tokens generated for answers.", lambda metrics: metrics.received_tokens),
    ProcessCounter(
        "prefix_cache_queries", "Prompt tokens of ended choices.", lambda metrics: metrics.tokens["prompt"]
    ),
    ProcessCounter(
        "prefix_cache_hits",
        "Prompt tokens of ended choices that the prefix cache had.",
        lambda metrics: metrics.tokens["cached"],
    ),
    RequestsByReason(),
    ProcessHistogram(
        "time_to_first_token_seconds", "From acceptance to the first token.", lambda metrics: metrics.first_token
    ),
    ProcessHistogram(
        "inter_token_latency_seconds",
        "From one token of a choice to the next.",
        lambda metrics: metrics.between_tokens,
    ),
    ProcessHistogram(
        "time_per_output_token_seconds",
        "The older name of inter_token_latency_seconds.",
        lambda metrics: metrics.between_tokens,
    ),
    ProcessHistogram(
        "e2e_request_latency_seconds", "From acceptance to the end.", lambda metrics: metrics.whole_request
    ),
)


def vllm_families(model: str, metrics: ServerMetrics, engines: Sequence[EngineView]) -> Iterator[Metric]:
    load = load_of(engines)
    for row in VLLM_METRICS:
        yield row.family(model, metrics, load)
