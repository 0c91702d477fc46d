"""Constructors of Prometheus metric families, for servers and routers."""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

PREFIX = "headgate:"


def gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value=value)


def counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help, value=value)


def by_label(name: str, help: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
