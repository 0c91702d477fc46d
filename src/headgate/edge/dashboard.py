"""The dashboard's page and its event stream, for servers and routers."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headgate.dashboard import page
from headgate.dashboard.feed import Feed
from headgate.dashboard.frame import Viewer
from headgate.edge.sse import ClientGone, ResponseWriter, WriterResponse

SEND_TIMEOUT_S = 10.0  # a viewer that reads nothing for this long is disconnected


async def show_page(request: Request) -> Response:
    path = request.url.path
    _, media_type = page.ASSETS[path]
    return Response(page.content(path), headers=page.HEADERS, media_type=media_type)


def watched(request: Request, feed: Feed) -> Response:
    """Return a response that streams the feed until the viewer disconnects."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    viewer = Viewer(request.state.tenant, request.state.admin)

    async def stream(writer: ResponseWriter) -> None:
        with feed.watching():
            async for event in feed.events(viewer):
                await _send(writer, event)
        await writer.end(b"")

    return WriterResponse(stream)


async def _send(writer: ResponseWriter, event: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await writer.send_event(event)
    except TimeoutError:
        raise ClientGone from None
