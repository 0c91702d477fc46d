"""The Prometheus metrics page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headgate.api.accounting.metrics import EngineView, Histogram, ServerMetrics
from headgate.api.accounting.metrics_page import MetricsPage
from headgate.protocol.message import EngineInfo, EngineStatus, Pong
from tests.api.serving import metric_values

INFO = EngineInfo(512, 260, (0,), 64, 32, 8, "cpu", "torch", "float32")
STATUS = EngineStatus(
    0.0, busy=True, version=3, running=2, waiting=5, held_blocks=16, prompt_tokens=90, cached_tokens=32
)

# Dashboards and alerts are written against these.
NAMES = {
    "headgate:num_requests_running",
    "headgate:num_requests_waiting",
    "headgate:kv_cache_usage",
    "headgate:prefix_cache_hits",
    "headgate:prefix_cache_queries",
    "headgate:time_to_first_token_seconds",
    "headgate:inter_token_latency_seconds",
    "headgate:e2e_request_latency_seconds",
    "headgate:requests",
    "headgate:requests_refused",
    "headgate:tokens",
    "headgate:preemptions",
    "headgate:aborts",
    "headgate:build_info",
    "headgate:weight_version",
    "headgate:engine_up",
}


ANSWERING = EngineView(0, 0, INFO, Pong(1, 0.1, STATUS))
SILENT = EngineView(1, 2, INFO, None)


def page(metrics: ServerMetrics | None = None, engines: Sequence[EngineView] = (ANSWERING, SILENT)) -> MetricsPage:
    return MetricsPage(
        version="1.2",
        model="m",
        metrics=metrics or ServerMetrics(),
        in_flight=7,
        limit=9,
        engines=engines,
    )


def test_the_page_can_be_parsed_and_has_every_promised_name():
    families = {family.name for family in text_string_to_metric_families(page().render().decode())}
    assert families >= NAMES


def test_an_engine_shows_its_status_and_one_that_does_not_answer_is_down():
    values = metric_values(page().render().decode())
    assert values['headgate:num_requests_running{engine="0"}'] == 2
    assert values['headgate:num_requests_waiting{engine="0"}'] == 5
    assert values['headgate:kv_cache_usage{engine="0"}'] == 0.25
    assert values['headgate:prefix_cache_queries_total{engine="0"}'] == 90
    assert values['headgate:prefix_cache_hits_total{engine="0"}'] == 32
    assert values['headgate:weight_version{engine="0"}'] == 3
    assert values['headgate:engine_up{engine="0"}'] == 1 and values['headgate:engine_up{engine="1"}'] == 0
    assert values['headgate:engine_restarts_total{engine="1"}'] == 2
    assert 'headgate:num_requests_running{engine="1"}' not in values


def test_counts_have_their_labels():
    metrics = ServerMetrics()
    metrics.requests["abort", "deadline"] += 2
    metrics.aborts["deadline"] += 3
    metrics.tokens["output"] += 11
    values = metric_values(page(metrics).render().decode())
    assert values['headgate:requests_total{cause="deadline",finish_reason="abort"}'] == 2
    assert values['headgate:aborts_total{cause="deadline"}'] == 3
    assert values['headgate:tokens_total{kind="output"}'] == 11


def test_a_histogram_counts_a_bound_as_below_it_and_its_buckets_add_up():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    histogram.observe(0.2, times=3)
    assert dict(histogram.buckets) == {"0.1": 2, "1.0": 6, "+Inf": 7}
    assert math.isclose(histogram.sum, 0.05 + 0.1 + 0.5 + 7 + 0.6)


# ---------------------------------------------------------------------------------------------------- vLLM's names

# The Gateway API inference extension and llm-d read the first five; AIBrix and KServe also the rest.
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
}
BUSY = EngineView(1, 0, INFO, Pong(1, 0.1, EngineStatus(0.0, busy=True, running=3, waiting=1, held_blocks=32)))


def vllm_families(page: MetricsPage) -> dict[str, Metric]:
    families = text_string_to_metric_families(page.render().decode())
    return {family.name: family for family in families if family.name.startswith("vllm:")}


def test_names_of_vllm_have_one_sample_that_sums_all_engines():
    families = vllm_families(page(engines=(ANSWERING, BUSY)))
    assert set(families) == VLLM_NAMES
    values = {name: [(each.labels, each.value) for each in family.samples] for name, family in families.items()}
    assert values["vllm:num_requests_running"] == [({"model_name": "m"}, 5)]
    assert values["vllm:num_requests_waiting"] == [({"model_name": "m"}, 6)]
    assert values["vllm:kv_cache_usage_perc"] == [({"model_name": "m"}, 48 / 128)]
    assert values["vllm:gpu_cache_usage_perc"] == values["vllm:kv_cache_usage_perc"]
    size = {"model_name": "m", "block_size": "32", "num_gpu_blocks": "128"}
    assert values["vllm:cache_config_info"] == [(size, 1)]
    samples = Counter(
        (each.name, tuple(each.labels.items())) for family in families.values() for each in family.samples
    )
    assert set(samples.values()) == {1}


def test_names_of_vllm_have_no_load_while_no_engine_answers():
    families = vllm_families(page(engines=(SILENT,)))
    assert set(families) == VLLM_NAMES
    assert not families["vllm:num_requests_waiting"].samples and not families["vllm:cache_config_info"].samples
    assert families["vllm:generation_tokens"].samples


def test_counters_and_histograms_of_vllm_are_those_of_the_process():
    metrics = ServerMetrics()
    metrics.tokens |= Counter(prompt=90, cached=32)
    metrics.received_tokens = 11
    metrics.requests |= Counter({("stop", "eos"): 2, ("stop", "stop_string"): 1, ("pd_reschedule", "preempted"): 5})
    metrics.first_token.observe(0.5)
    metrics.whole_request.observe(3.0, 2)
    values = metric_values(page(metrics).render().decode())
    assert values['vllm:prompt_tokens_total{model_name="m"}'] == 90
    assert values['vllm:prefix_cache_hits_total{model_name="m"}'] == 32
    assert values['vllm:generation_tokens_total{model_name="m"}'] == 11
    assert values['vllm:request_success_total{finished_reason="stop",model_name="m"}'] == 3
    assert values['vllm:request_success_total{finished_reason="abort",model_name="m"}'] == 0
    assert values['vllm:time_to_first_token_seconds_count{model_name="m"}'] == 1
    assert values['vllm:e2e_request_latency_seconds_sum{model_name="m"}'] == 6.0
