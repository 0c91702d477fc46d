"""OpenTelemetry spans."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

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


# ------------------------------------------------------------------------------------------------------- parent spans


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector: its address, and the bodies that it has received."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def exported_span(monkeypatch: pytest.MonkeyPatch, **fields: str) -> Any:
    """The span that a collector receives for USAGE with these fields; None if there is none."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with tracing(url, "m", "1") as trace:
            trace(msgspec.structs.replace(USAGE, **fields))
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = [
        s for r in requests for resource in r.resource_spans for scope in resource.scope_spans for s in scope.spans
    ]
    return spans[0] if spans else None


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_has_the_clients_span_as_its_parent(monkeypatch):
    span = exported_span(monkeypatch, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=a")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, SPAN, "vendor=a")
    assert span.name == "chat m"


def test_a_request_without_a_trace_begins_one(monkeypatch):
    span = exported_span(monkeypatch)
    assert not span.parent_span_id and span.trace_id.hex() != TRACE


def test_a_request_of_a_trace_that_is_not_sampled_sends_no_span(monkeypatch):
    assert exported_span(monkeypatch, traceparent=f"00-{TRACE}-{SPAN}-00") is None
