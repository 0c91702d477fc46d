"""Passes control requests, which the data path receives as a whole, to an ASGI app."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message

from headgate.router.data_path.downstream import Answering, Downstream, HttpRequest, answer_head
from headgate.router.data_path.upstream import Headers

log = logging.getLogger(__name__)


class Bridge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, client: Downstream, request: HttpRequest) -> Answering:
        visit = AppCall(client, request)
        visit.task = asyncio.get_running_loop().create_task(visit.run(self._app))
        self._tasks.add(visit.task)
        visit.task.add_done_callback(self._tasks.discard)
        return visit

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class AppCall:
    """One call of the app."""

    def __init__(self, client: Downstream, request: HttpRequest) -> None:
        self._client = client
        self._request = request
        self._asked = False
        self._left = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._started = False
        self._ended = False
        self._chunked = False
        self._whole = True
        self._head: tuple[int, Headers] | None = None
        self.task: asyncio.Task[None] | None = None

    def client_left(self) -> None:
        self._left.set()
        self._drained.set()

    def client_full(self, full: bool) -> None:
        (self._drained.clear if full else self._drained.set)()

    async def run(self, app: ASGIApp) -> None:
        path, _, query = self._request.head.target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": self._request.head.version,
            "method": self._request.head.method,
            "scheme": "http",
            "path": self._request.path,
            "raw_path": path,
            "root_path": "",
            "query_string": query,
            "headers": self._request.head.headers,
        }
        try:
            await app(scope, self._receive, self._send)
            self._check_whole()
        except Exception:  # raised after the response began; the gate turns earlier errors into responses
            log.exception("%s %s failed", self._request.head.method, scope["path"])
            self._client.abort()

    def _check_whole(self) -> None:
        """Close the connection if the app stopped in the middle of its response."""
        if not self._ended and not self._client.gone:
            self._client.abort()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message["status"], [(bytes(k), bytes(v)) for k, v in message.get("headers", ())]
            return
        await self._drained.wait()
        body, more = message.get("body", b""), message.get("more_body", False)
        if not self._started:
            self._start(body, more)
        elif body:
            self._client.write(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)
        self._ended = not more
        if not more and not self._client.gone:
            if self._chunked:
                self._client.write(b"0\r\n\r\n")
            self._client.finished(keep_alive=self._whole or self._chunked)

    def _start(self, body: bytes, more: bool) -> None:
        assert self._head is not None
        self._started = True
        status, headers = self._head
        if not more:
            if not any(name == b"content-length" for name, _ in headers):
                headers.append((b"content-length", b"%d" % len(body)))
        elif self._request.head.version == "1.1":
            self._chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        else:
            self._whole = False
        if self._request.head.method == "HEAD":
            body = b""
        self._client.write(answer_head(status, headers) + body)
