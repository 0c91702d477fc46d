"""GET /openapi.json."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headgate.api.host import host_of
from headgate.contract.openapi import server_description


async def openapi(request: Request) -> Response:
    return Response(server_description(host_of(request).version), media_type="application/json")
