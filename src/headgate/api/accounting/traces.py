"""One OpenTelemetry span per request, if an endpoint is configured.

The libraries are an optional extra and are imported only here. A span is created from the usage record when its request has
ended, so it costs nothing while tokens are generated. Its parent is the client's span, if the request named one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headgate.contract.requests import UsageRecord
from headgate.contract.trace_context import PARENT, STATE

log = logging.getLogger(__name__)

Trace = Callable[[UsageRecord], None]

NS = 1_000_000_000
EXPORT_TIMEOUT_S = 2  # the longest that an unreachable collector delays our shutdown


@contextmanager
def tracing(endpoint: str | None, model: str, version: str) -> Iterator[Trace | None]:
    """The function to call with every usage record; None if spans cannot be sent."""
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        log.warning(
            "spans cannot be sent to %s: OpenTelemetry is not installed (pip install 'headgate[otel]')", endpoint
        )
        yield None
        return
    # The exporter reads the rest of OpenTelemetry's own environment variables.
    provider = TracerProvider(resource=Resource.create({"service.name": "headgate", "service.version": version}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
    tracer = provider.get_tracer("headgate", version)
    propagator = TraceContextTextMapPropagator()

    def trace(usage: UsageRecord) -> None:
        start_ns = int(usage.arrived * NS)
        parent = propagator.extract({PARENT: usage.traceparent, STATE: usage.tracestate}, Context())
        span = tracer.start_span(
            f"{usage.kind} {model}", context=parent, start_time=start_ns, attributes=attributes(usage, model)
        )
        if usage.first_token_s is not None:
            span.add_event("first token", timestamp=start_ns + int(usage.first_token_s * NS))
        span.end(start_ns + int(usage.elapsed_s * NS))

    try:
        yield trace
    finally:
        provider.shutdown()


def attributes(usage: UsageRecord, model: str) -> dict[str, str | int | float]:
    """Attributes named by OpenTelemetry's conventions for generative AI, and our own."""
    return {
        "gen_ai.operation.name": usage.kind,
        "gen_ai.request.model": model,
        "gen_ai.response.id": usage.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "headgate.cached_tokens": usage.cached_tokens,
        "headgate.tenant": usage.tenant,
        "headgate.finish_reason": usage.finish_reason,
        "headgate.cause": usage.cause,
        "headgate.choices": len(usage.choices),
    }
