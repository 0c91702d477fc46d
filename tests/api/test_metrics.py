"""The Prometheus metrics page."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from headgate.api.accounting.metrics import EngineView, Histogram, MetricsPage, ServerMetrics
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


def page(metrics: ServerMetrics | None = None) -> MetricsPage:
    answering = EngineView(0, 0, INFO, Pong(1, 0.1, STATUS))
    silent = EngineView(1, 2, INFO, None)
    return MetricsPage(
        version="1.2",
        model="m",
        metrics=metrics or ServerMetrics(),
        in_flight=7,
        limit=9,
        engines=[answering, silent],
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
    (family,) = [histogram.family("x", "y")]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 2, "1.0": 6, "+Inf": 7}
    assert math.isclose(histogram.sum, 0.05 + 0.1 + 0.5 + 7 + 0.6)
