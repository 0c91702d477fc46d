"""What is at `/`: where the dashboard, the API description and the documentation are."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.dashboard import page

LINKS = {
    "service": "headgate",
    "dashboard": page.PATH,
    "api": "/openapi.json",
    "models": "/v1/models",
    "documentation": "docs/api.md of the repository",
}
VARY = {"vary": "Accept"}


async def show_root(request: Request) -> Response:
    """A page for browsers, JSON for all others."""
    if "text/html" in request.headers.get("accept", ""):
        return Response(page.content(page.ROOT), headers=page.HEADERS | VARY, media_type="text/html")
    return Response(msgspec.json.encode(LINKS), headers=VARY, media_type="application/json")
