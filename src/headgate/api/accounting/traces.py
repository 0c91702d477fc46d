"""One OpenTelemetry span per request, for those who collect them.

The libraries are an optional extra and are imported here alone, when an endpoint is configured. A span is made when its
request has ended, from the usage record: nothing is done for it while tokens flow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headgate.contract.requests import UsageRecord

log = logging.getLogger(__name__)

Trace = Callable[[UsageRecord], None]

NS = 1_000_000_000
EXPORT_TIMEOUT_S = 2  # a collector that is gone holds up our end by no more than that


@contextmanager
def tracing(endpoint: str | None, model: str, version: str) -> Iterator[Trace | None]:
    """What to call with every usage record; None if there is nowhere to send spans to."""
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
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

    def trace(usage: UsageRecord) -> None:
        start_ns = int(usage.arrived * NS)
        span = tracer.start_span(f"{usage.kind} {model}", start_time=start_ns, attributes=attributes(usage, model))
        if usage.first_token_s is not None:
            span.add_event("first token", timestamp=start_ns + int(usage.first_token_s * NS))
        span.end(start_ns + int(usage.elapsed_s * NS))

    try:
        yield trace
    finally:
        provider.shutdown()


def attributes(usage: UsageRecord, model: str) -> dict[str, str | int | float]:
    """The names of OpenTelemetry's conventions for generative AI, and ours for the rest."""
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
