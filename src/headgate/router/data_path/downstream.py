"""Client connections: HTTP/1.1 requests are received whole, one at a time; answers are sent as bytes.

For speed, this uses a parser in C, no stream objects, and no task per read. Requests that are too slow or too large
are refused here; all others go to the `Handler`. When a client disconnects, the object that answers its request is
notified. A client that reads nothing for too long is disconnected (`edge/outflow.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import msgspec

from headgate.contract.error_answers import error_body_at
from headgate.contract.errors import error_headers
from headgate.edge.cors import NO_PAGES, Cors
from headgate.edge.outflow import STALL_S, UNREAD_S, Outflow, limit_tls_buffer
from headgate.errors import RequestError
from headgate.router.data_path.fast_path import PYTHON, EventPipe, FastPath, request_head
from headgate.router.data_path.outbox import Outbox
from headgate.router.data_path.upstream import Headers
from headgate.router.exchange.journal import Journal

MAX_HEAD_BYTES = 64 * 2**10
MOST_PIPELINED = 32
REQUEST_S = 120.0  # longest time for a request to arrive completely
KEEP_ALIVE_S = 75.0
MOST_KNOWN_HEADS, LONGEST_KNOWN_HEAD = 1000, 8 * 2**10
LINGER_S = 2.0  # how long a refused client has to read the error


class Answering(Protocol):
    """The object that answers the current request of a connection."""

    def client_left(self) -> None: ...

    def client_full(self, full: bool) -> None:
        """Called with True when the client reads too slowly, and with False when it has caught up."""


class Head:
    """A request head, and values computed from it (`memo`), which are reused because clients repeat heads."""

    __slots__ = ("first", "headers", "keep_alive", "memo", "method", "path", "target", "version")

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.path = ""
        self.headers: Headers = []
        self.first: dict[bytes, bytes] = {}  # the first header of each name
        self.keep_alive = True
        self.version = "1.1"
        self.memo: dict[object, Any] = {}


class HttpRequest(msgspec.Struct, frozen=True, eq=False):  # created per request; cheaper than a dataclass
    head: Head
    body: bytes

    @property
    def path(self) -> str:
        return self.head.path

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of that name, which is in lower case."""
        return self.head.first.get(name)


Handler = Callable[["Downstream", HttpRequest], Answering | None]


class Connections:
    """All client connections of a router: enforces timeouts, and closes them at shutdown."""

    def __init__(
        self,
        handle: Handler,
        max_body_bytes: int,
        stall_s: float = STALL_S,
        outbox: Outbox | None = None,
        fast_path: FastPath = PYTHON,
        cors: Cors = NO_PAGES,
    ) -> None:
        self.handle = handle
        self.read_request = fast_path.request
        self.open_pipe = fast_path.pipe
        self.outbox = outbox or Outbox()
        self.max_body_bytes = max_body_bytes
        self.cors = cors
        self.stall_s = stall_s  # how long a client may read nothing
        self.closing = False
        self.heads: dict[bytes, Head] = {}  # known heads, by their bytes without the content length
        self._open: dict[Downstream, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __call__(self) -> Downstream:
        return Downstream(self)

    def opened(self, connection: Downstream) -> None:
        self._open[connection] = None

    def closed(self, connection: Downstream) -> None:
        self._open.pop(connection, None)

    def sweep(self, now_s: float) -> None:
        for connection in tuple(self._open):
            connection.sweep(now_s)

    def close(self) -> None:
        """Close idle connections now, and others after their answer. Clients that read nothing get less time."""
        self.closing, self.stall_s = True, min(self.stall_s, UNREAD_S)
        self.outbox.flush()
        for connection in tuple(self._open):
            connection.close_if_idle()

    def abort(self) -> None:
        """Abort the remaining connections."""
        self.outbox.flush()
        for connection in tuple(self._open):
            if not connection.gone:  # a connection that is gone is sending its last bytes
                connection.abort()


class Downstream(asyncio.Protocol):
    stalled = False  # whether it was closed because the client did not read
    peer = ""  # the client's address
    _outflow: Outflow

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._outbox = connections.outbox
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._head = Head()
        self._at_rest = True  # between two requests
        self._head_bytes = 0
        self._unseen_bytes = 0  # bytes received of a head that is not complete
        self._body_bytes = 0
        self._body: list[bytes] = []
        self._waiting: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._answering: Answering | None = None
        self._since_s = self._loop.time()  # when the wait for a request, or for the rest of one, began
        self._in_head = True
        self._full = False  # the client reads too slowly
        self._refusal: BadHttp | None = None
        self._cors: Headers = []  # for the head of the next answer

    # -- for the object that answers ----------------------------------------------------------

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def write(self, data: bytes) -> None:
        if self._cors:
            data, self._cors = with_headers(data, self._cors), []
        if self._transport is not None:
            self._outbox.write(self._transport, data)

    def pipe(self, journal: Journal) -> EventPipe | None:
        """Return a pipe that sends events to this client unchanged; None if the client has disconnected."""
        if self._transport is None:
            return None
        return self._connections.open_pipe(journal, self._outbox, self._transport)

    def finished(self, *, keep_alive: bool = True) -> None:
        """Called when the answer is complete, so that the next request on this connection may follow."""
        request, self._current, self._answering = self._current, None, None
        assert request is not None
        if self._transport is None or self._transport.is_closing():
            return
        if not (keep_alive and request.head.keep_alive) or self._connections.closing:
            self._outbox.flush()
            self._transport.close()
            return
        self._since_s = self._loop.time()
        self._next()
        if self._current is None and self._refusal is not None and not self._waiting:
            self._refuse(self._refusal)

    # -- asyncio.Protocol ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outflow = Outflow(self._transport)
        limit_tls_buffer(self._transport)
        self.peer = _address(transport.get_extra_info("peername"))  # not available once the connection is closed
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return None
        if self._at_rest and self._current is None and not (self._waiting or self._full):
            connections = self._connections
            known = connections.read_request(data, connections.heads, connections.max_body_bytes)
            if known is not None:
                return self._begin(HttpRequest(*known))
        rested, head = self._at_rest, self._head if self._in_head else None
        try:
            self._parser.feed_data(data)
            if self._in_head and head is self._head:  # `on_header` is not called for a header that never ends
                self._unseen_bytes += len(data)
                self._count(0)
            elif rested and self._at_rest:
                self._remember(data)
        except httptools.HttpParserUpgrade:
            self._refuse(BadHttp(400, "upgrade_refused", "this server speaks HTTP/1.1 alone"))
        except httptools.HttpParserCallbackError as error:
            refusal = error.__context__
            if not isinstance(refusal, BadHttp):
                raise
            self._refuse(refusal)
        except httptools.HttpParserError as error:
            self._refuse(BadHttp(400, "bad_http", f"this is not HTTP: {error}"))
        except BadHttp as error:
            self._refuse(error)
        return None

    def _remember(self, data: bytes) -> None:
        """Cache the parsed head, so that an identical one is not parsed again, if `data` was exactly one request."""
        key = request_head(data)
        if key is None or len(key) > LONGEST_KNOWN_HEAD or b"expect" in self._head.first or not self._head.keep_alive:
            return
        heads = self._connections.heads
        if len(heads) >= MOST_KNOWN_HEADS:
            heads.clear()
        heads[key] = self._head

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._connections.closed(self)
        self._waiting.clear()
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.client_left()

    def pause_writing(self) -> None:
        self._full = True
        if self._answering is not None:
            self._answering.client_full(True)

    def resume_writing(self) -> None:
        self._full = False
        if self._answering is not None:
            self._answering.client_full(False)
        else:
            self._next()

    # -- httptools ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._head, self._body, self._since_s = Head(), [], self._loop.time()
        self._in_head, self._at_rest = True, False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._count(0)
        if not self._in_head:
            return  # a trailer; it must not be taken for a header, because headers were already checked
        head, name = self._head, name.lower()
        head.headers.append((name, value))
        head.first.setdefault(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._unseen_bytes > MAX_HEAD_BYTES:
            raise BadHttp(431, "headers_too_large", f"the head of a request has at most {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        head, most = self._head, self._connections.max_body_bytes
        self._in_head = False
        if self._parser.should_upgrade():
            raise BadHttp(400, "upgrade_refused", "this server speaks HTTP/1.1 alone")
        head.method = self._parser.get_method().decode("ascii")
        path = head.target.partition(b"?")[0].decode("latin-1")
        head.path = unquote(path) if "%" in path else path
        head.version = self._parser.get_http_version()
        head.keep_alive = self._parser.should_keep_alive()
        length = head.first.get(b"content-length")
        if length is not None and int(length) > most:
            raise BadHttp(413, "body_too_large", f"the body has {int(length)} bytes; the maximum is {most}")
        # 100 Continue must not be sent in the middle of another answer; clients that expect one do not wait long.
        if self._current is None and head.first.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        most = self._connections.max_body_bytes
        if self._body_bytes > most:
            raise BadHttp(413, "body_too_large", f"the body has more than {most} bytes")
        if self._waiting and self._body_bytes + sum(len(request.body) for request in self._waiting) > most:
            message = f"the bodies of requests that wait on this connection have more than {most} bytes"
            raise BadHttp(429, "too_many_requests", message)
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = HttpRequest(self._head, self._body[0] if len(self._body) == 1 else b"".join(self._body))
        self._at_rest = True
        self._body, self._head_bytes, self._unseen_bytes, self._body_bytes = [], 0, 0, 0
        if len(self._waiting) >= MOST_PIPELINED:
            raise BadHttp(429, "too_many_requests", "too many requests wait on this connection")
        self._waiting.append(request)
        self._next()

    def _next(self) -> None:
        if self._current is None and self._waiting and not self._full and not self.gone:
            self._begin(self._waiting.popleft())

    def _begin(self, request: HttpRequest) -> None:
        self._current = request
        if self._connections.cors:
            self._cors = self._connections.cors.headers(request.head.headers)
        answering = self._connections.handle(self, request)
        if self._current is request:  # the request was not answered at once
            self._answering = answering

    # -- timeouts and refusals ---------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        if self._outflow.stalled_s(now_s) >= self._connections.stall_s:
            self.stalled = True
            self.abort()  # notifies the object that answers, which releases its resources
            return
        if self._current is not None:
            return
        if self._refusal is not None:
            if now_s - self._since_s > LINGER_S:
                self.abort()
            return
        partial = self._head_bytes or self._unseen_bytes or self._body_bytes
        if partial and now_s - self._since_s > REQUEST_S:
            self._refuse(BadHttp(408, "request_timeout", f"the request did not arrive within {REQUEST_S:g} s"))
        elif not partial and now_s - self._since_s > KEEP_ALIVE_S:
            self.abort()

    def close_if_idle(self) -> None:
        if self._current is None and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, error: BadHttp) -> None:
        """Answer an invalid request after all valid ones, then close the connection."""
        self._refusal = error
        if self._transport is not None and self._current is None and not self._waiting and not self.gone:
            self._since_s = self._loop.time()
            self._cors = self._connections.cors.headers(self._head.headers)
            self.write(error_answer(error, keep_alive=False))
            # Closing while the client is sending would reset the connection, and the client might not read the error.
            self._outbox.flush()
            if self._transport.can_write_eof():  # TLS cannot; the client then waits until `sweep` closes
                self._transport.write_eof()


def _address(peer: Any) -> str:
    return f"{peer[0]}:{peer[1]}" if peer else ""


class BadHttp(RequestError):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.status = status


REASONS = {
    200: b"OK",
    202: b"Accepted",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


def with_headers(answer: bytes, headers: Headers) -> bytes:
    """Add headers to the beginning of an answer, unless it has the first of them: a worker may have set it."""
    status, _, rest = answer.partition(b"\r\n")
    if headers[0][0] in rest.partition(b"\r\n\r\n")[0].lower():
        return answer
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b\r\n%b%b" % (status, lines, rest)


def answer_head(status: int, headers: Headers) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b"Unknown"), lines)


def error_answer(
    error: RequestError,
    headers: Headers = [],  # noqa: B006
    *,
    path: str = "",
    request_id: str = "",
    keep_alive: bool = True,
) -> bytes:
    body = error_body_at(path, error, request_id)
    lines: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if not keep_alive:
        lines.append((b"connection", b"close"))
    lines += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    return answer_head(error.status, lines + headers) + body
