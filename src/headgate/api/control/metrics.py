"""GET /metrics."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.metrics import query_engines
from headgate.api.accounting.metrics_page import MetricsPage
from headgate.api.host import host_of

SCRAPE_TIMEOUT_S = 1.0  # an engine that takes longer is reported as down


async def metrics(request: Request) -> Response:
    host = host_of(request)
    page = MetricsPage(
        version=host.version,
        model=host.model_name,
        metrics=host.ledger.metrics,
        in_flight=host.ledger.in_flight,
        limit=host.ledger.limit,
        engines=await query_engines(host.replicas, SCRAPE_TIMEOUT_S),
        tasks=len(asyncio.all_tasks()),
    )
    return Response(page.render(), media_type=CONTENT_TYPE_LATEST)
