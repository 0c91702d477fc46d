"""Load reports in response headers."""

from __future__ import annotations

import json

import pytest

from headgate.contract.load_report import load_report

METRICS = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


@pytest.mark.parametrize("format", ["TEXT", "text", " Text"])
def test_a_report_as_text(format):
    assert load_report(format, METRICS) == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )


@pytest.mark.parametrize("format", ["JSON", "json"])
def test_a_report_as_json(format):
    kind, _, report = load_report(format, METRICS).partition(" ")
    assert kind == "JSON" and json.loads(report) == {"named_metrics": METRICS}


@pytest.mark.parametrize("format", ["", "BIN", "protobuf"])
def test_an_unknown_format_gets_no_report(format):
    assert load_report(format, METRICS) is None
