"""OpenTelemetry spans."""

from __future__ import annotations

import builtins
import logging

from headgate.api.accounting.traces import attributes, tracing
from headgate.contract.requests import ChoiceUsage, UsageRecord

CHOICE = ChoiceUsage(0, "stop", "eos", prompt_tokens=10, cached_tokens=4, output_tokens=3)
USAGE = UsageRecord("a", "alice", "chat", "stop", "eos", 1000.0, 0.5, 2.0, (CHOICE, CHOICE))


def test_without_an_endpoint_nothing_is_imported_or_logged(caplog):
    with tracing(None, "m", "1") as trace:
        assert trace is None
    assert not caplog.records


def test_an_endpoint_without_the_library_logs_a_warning_with_the_install_command(caplog, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with caplog.at_level(logging.WARNING), tracing("http://collector", "m", "1") as trace:
        assert trace is None
    assert "headgate[otel]" in caplog.text and "http://collector" in caplog.text


def test_a_span_has_the_values_of_the_usage_record():
    said = attributes(USAGE, "m")
    assert said["gen_ai.request.model"] == "m" and said["gen_ai.response.id"] == "a"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (20, 6)
    assert (said["headgate.cause"], said["headgate.tenant"], said["headgate.choices"]) == ("eos", "alice", 2)
