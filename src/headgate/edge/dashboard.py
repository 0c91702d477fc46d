"""The dashboard's page and its stream of events, as servers and routers serve them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headgate.dashboard import page
from headgate.dashboard.feed import Feed
from headgate.dashboard.frame import Viewer
from headgate.edge.sse import ClientGone, ResponseWriter, WriterResponse

SEND_TIMEOUT_S = 10.0  # a viewer that has not read for so long has gone


async def show_page(request: Request) -> Response:
    path = request.url.path
    _, media_type = page.ASSETS[path]
    return Response(page.content(path), headers=page.HEADERS, media_type=media_type)


def watched(request: Request, feed: Feed) -> Response:
    """The feed as an answer that lasts until the viewer leaves."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    viewer = Viewer(request.state.tenant, request.state.admin)

    async def tell(reply: ResponseWriter) -> None:
        with feed.watching():
            async for event in feed.events(viewer):
                await _send(reply, event)
        await reply.end(b"")

    return WriterResponse(tell)


async def _send(reply: ResponseWriter, event: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await reply.send_event(event)
    except TimeoutError:
        raise ClientGone from None
