"""Writes one HTTP response, complete or as server-sent events, to a client that may disconnect at any time.

A `WriterResponse` runs its work while it watches the connection; when the client disconnects, the work is cancelled.
The response starts with the first byte of the answer, so an error before that can still set the status.

Events are written directly to ASGI, one `send` each. A stream is never silent for longer than `keep_alive_s`:
comments fill the gaps. Clients ignore comments, and proxies see that the connection is in use.

The HTTP server puts two entries into `scope["state"]`: TRANSPORT, the connection; and STALLED, set if it has closed
the connection because the client did not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headgate.protocol.output import Cause

TRANSPORT, STALLED = "transport", "stalled"
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


class ResponseWriter:
    """Writes the response to one request."""

    def __init__(self, send: Send, transport: asyncio.Transport | None = None) -> None:
        self._send = self.raw = send  # `raw` is for a complete ASGI response that writes itself
        self.transport = transport  # the client's connection, if the response waits for the client to read
        self.on_left: Callable[[Cause], None] | None = (
            None  # called when the client disconnects, before the cancellation
        )
        self._clock = asyncio.get_running_loop().time
        self._sent_s = self._clock()
        self.headers: list[tuple[bytes, bytes]] = []  # additional headers
        self.started = False
        self.ended = False
        self.given_back = False  # the answer is incomplete and another server must continue it

    async def send_json(self, body: bytes, status: int = 200) -> None:
        length = str(len(body)).encode()
        kind = (b"content-type", b"application/json")
        await self._start(status, [kind, (b"content-length", length), *self.headers])
        self.ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_event(self, event: bytes) -> None:
        if not self.started:
            await self._start_events()
        self._sent_s = self._clock()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self, event: bytes) -> None:
        """Send the last event."""
        if not self.started:
            await self._start_events()
        self.ended = True
        await self._send({"type": "http.response.body", "body": event})

    async def _start_events(self) -> None:
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await self._start(200, [kind, (b"cache-control", b"no-cache"), *self.headers])

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    @asynccontextmanager
    async def kept_alive(self, interval_s: float) -> AsyncIterator[None]:
        """Send a comment whenever nothing was sent for `interval_s`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat(interval_s))
                try:
                    yield
                finally:
                    beating.cancel()
        except BaseExceptionGroup as failures:
            raise innermost(failures) from None

    async def _beat(self, interval_s: float) -> None:
        while True:
            silent_s = self._clock() - self._sent_s
            if silent_s >= interval_s:
                await self.send_event(COMMENT)
                silent_s = 0.0
            await asyncio.sleep(interval_s - silent_s)


class WriterResponse(Response):
    """A response that `work` writes; `work` is cancelled if the client disconnects."""

    def __init__(self, work: Callable[[ResponseWriter], Awaitable[None]]) -> None:
        self._work = work  # the fields of the base class are unused; handlers must return a Response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        writer = ResponseWriter(send, state.get(TRANSPORT))
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(_watch(receive, writer, state))
                try:
                    await self._work(writer)
                finally:
                    watching.cancel()
        except BaseExceptionGroup as failures:
            # A disconnected client is not an error. If there are several errors, the first one caused the others.
            first = innermost(failures)
            if not isinstance(first, ClientGone):
                raise first from None


async def _watch(receive: Receive, writer: ResponseWriter, state: Mapping[str, object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if writer.ended:
        return  # the client has the whole answer, and the work may go on without it
    if writer.on_left is not None:
        writer.on_left("client_stalled" if state.get(STALLED) else "client_disconnect")
    raise ClientGone


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
