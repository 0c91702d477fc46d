"""Connections to workers. A connection has one request at a time; its response is delivered as calls to a `Reader`.

Every request that was sent ends with exactly one call of `ended` or `lost`. Idle connections are pooled. A connection
returns to its pool only after a complete response; otherwise it is closed, which makes the worker abort the request.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from math import inf
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headgate.config import SYSTEM_CAS
from headgate.contract.journal import RAW_HEADER
from headgate.contract.load_report import HEADER as LOAD
from headgate.router.data_path.fast_path import PYTHON, EventPipe, FastPath, answer_head
from headgate.router.data_path.outbox import Outbox
from headgate.tls import client_context, why

Headers = list[tuple[bytes, bytes]]

MOST_IDLE = 512  # most idle connections kept per worker
IDLE_S = 55.0  # how long an idle connection is kept; slightly less than common keep-alive timeouts of servers
MAX_HEAD_BYTES = 64 * 2**10


MOST_KNOWN_HEADS, LONGEST_KNOWN_HEAD = 100, 4 * 2**10  # limits on remembered response heads, per worker
OK = b"HTTP/1.1 200 OK\r\n"


class KnownHead(msgspec.Struct, frozen=True, gc=False):
    """A response head that was seen before, with status 200 and a body in chunks."""

    headers: Headers
    journalled: bool  # the body is events with a journal


class Reader(Protocol):
    """Receives a response. Called from the event loop, never after `ended` or `lost`."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def whole(self, head: KnownHead, events: bytes) -> None:
        """Receive a complete response in one call: its events, with a head that was seen before."""
        self.head(200, head.headers)
        self.data(events)

    def ended(self) -> None: ...

    def lost(self, why: str) -> None: ...


class WorkerLost(Exception):
    """The worker cannot be reached, or its connection broke."""


class NoConnection(WorkerLost):
    """Nothing accepts connections at the worker's address."""


class NoAnswer(WorkerLost):
    """The worker accepted the connection but did not answer in time."""


class Upstream(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._headers: Headers = []
        self._head: Headers = []  # the headers of the current response, once complete
        self._head_bytes = 0
        self._in_head = True
        self._at_rest = True  # the parser has received no byte of this response
        self._between = False  # the parser is between two chunks
        self._parts: list[bytes] = []
        self._complete = False
        self._once = False
        self._keeps = False  # the worker keeps this connection open
        self._open_ended = False  # the response has no length and no chunks; it ends with the connection
        self._held = False  # reading is suspended because the client reads too slowly
        self.pipe: EventPipe | None = None  # sends events straight to the client, instead of through the reader
        self.reused = False
        self.idle_since_s = -inf

    # -- for the sender --------------------------------------------------------

    def send(self, request: bytes, reader: Reader, *, once: bool = False) -> None:
        """Send a request, whose response goes to `reader`. With `once`, the connection is closed afterwards."""
        assert self._transport is not None and self._reader is None
        self._reader = reader
        self._complete = self._keeps = self._open_ended = False
        self._in_head = self._at_rest = True
        self._between = False
        self._once = once
        self._pool.outbox.write(self._transport, request)

    def answers(self, reader: Reader) -> bool:
        """Whether the current response is for `reader`."""
        return self._reader is reader

    def drop(self) -> None:
        """Close the connection at once, without a further call to its reader."""
        self._reader = self.pipe = None
        if self._transport is not None:
            self._transport.abort()

    def hold(self) -> None:
        """Suspend reading, unless the response has ended and the connection is idle or serves another request."""
        if self._transport is not None and self._reader is not None:
            self._held = True
            self._transport.pause_reading()

    def release(self) -> None:
        if self._held and self.usable and self._transport is not None:
            self._held = False
            self._transport.resume_reading()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # -- asyncio.Protocol -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.drop()  # the worker sent data without a request
            return None
        if self._between and self.pipe is not None and self.pipe.take(data):  # most chunks of a stream end here
            return None
        rested, self._at_rest = self._at_rest, False
        if rested and self._recognised(data):
            return None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._fail(f"it does not speak HTTP: {error}")
        if not data.endswith(b"\r\n"):
            # The data may end inside the size line of the next chunk, which the parser does not report.
            self._between = False
        if self._in_head:  # `on_header` is not called for a header that never ends
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            return self._fail("the head of its answer is too long")
        if (parts := self._parts) and self._reader is not None:
            self._parts = []
            self._reader.data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._complete:
            if rested and self._keeps:
                self._pool.remember(data, self._head)
            self._end()
        return None

    def _recognised(self, data: bytes) -> bool:
        """Deliver `data` without the parser if it is a complete response with a known head; returns whether it is one."""
        known = self._pool.read_answer(data, self._pool.heads)
        if known is None:
            return False
        assert self._reader is not None
        self._reader.whole(*known)
        self._keeps = not self._once
        self._end()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if self._reader is None:
            return
        if self._open_ended and error is None:
            self._end()
        else:
            self._fail(self._why_broken(error))

    def _why_broken(self, error: Exception | None) -> str:
        reason = "the connection broke" if error is None else f"the connection broke: {why(error)}"
        if self._pool.tls is None or self.reused or not self._at_rest:
            return reason
        # With TLS 1.3, a server checks a client's certificate when the client already considers the connection open.
        return f"{reason}, without an answer; it may require another client certificate"

    def _fail(self, why: str) -> None:
        reader = self._reader
        self.drop()
        if reader is not None:
            reader.lost(why)

    def _end(self) -> None:
        reader, self._reader, self.pipe = self._reader, None, None
        self._headers, self._head_bytes = [], 0
        if self._keeps and self.usable and not self._open_ended:
            if self._held:
                self.release()  # delivering the last bytes may have suspended reading
            self._pool.give(self)
        elif self._transport is not None:
            self._transport.close()
        if reader is not None:
            reader.ended()

    # -- httptools ------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._headers.append((name.lower(), value))

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer to one request")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        self._head = headers
        self._in_head = status < 200
        if status < 200 or self._reader is None:
            return  # a 1xx status, which precedes the final response
        names = [name for name, _ in headers]
        framed = b"transfer-encoding" in names or b"content-length" in names or status in (204, 304)
        self._open_ended = not framed
        self._reader.head(status, headers)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            # Read here, because the parser drops this value afterwards.
            self._keeps = self._parser.should_keep_alive() and not self._once


def is_journalled(headers: Headers) -> bool:
    """Whether these headers announce events with a journal."""
    named = dict(headers)
    return RAW_HEADER in named and named.get(b"content-type", b"").startswith(b"text/event-stream")


class Pool:
    """The connections to one worker."""

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        outbox: Outbox | None = None,
        fast_path: FastPath = PYTHON,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.read_answer = fast_path.answer
        self.outbox = outbox or Outbox()
        secure = parts.scheme == "https"
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or (443 if secure else 80)
        self.netloc = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        self.prefix = parts.path.rstrip("/").encode()
        self.tls = (tls or client_context(SYSTEM_CAS)) if secure else None
        self._timeout_s = connect_timeout_s
        self._idle: deque[Upstream] = deque()
        self._closed = False
        self.heads: dict[bytes, KnownHead] = {}  # known response heads, without their request ids

    def take(self) -> Upstream | None:
        """Take an open, idle connection, the most recently used first; None if there is none."""
        while self._idle:
            upstream = self._idle.pop()
            if upstream.usable:
                upstream.reused = True
                return upstream
        return None

    async def connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, upstream = await loop.create_connection(lambda: Upstream(self), self.host, self.port, ssl=self.tls)
        except TimeoutError:
            raise NoConnection(f"no connection within {self._timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise WorkerLost(f"no connection: {why(error)}") from None
        except OSError as error:
            if self.tls is not None and isinstance(error, ConnectionResetError):
                raise WorkerLost("it ended the TLS handshake; is its address http://?") from None
            raise NoConnection(f"no connection: {why(error)}") from None
        return upstream

    def give(self, upstream: Upstream) -> None:
        if self._closed or len(self._idle) >= MOST_IDLE:
            return upstream.drop()
        upstream.idle_since_s = time.monotonic()  # the same clock as the event loop's
        return self._idle.append(upstream)

    def remember(self, answer: bytes, headers: Headers) -> None:
        """Remember the head of this response, if it has the usual form."""
        end = answer.find(b"\r\n\r\n")
        if not answer.startswith(OK) or end > LONGEST_KNOWN_HEAD or (b"transfer-encoding", b"chunked") not in headers:
            return
        if any(name == LOAD for name, _ in headers):
            return  # it differs in every answer
        if len(self.heads) >= MOST_KNOWN_HEADS:
            self.heads.clear()
        self.heads[answer_head(answer, end)] = KnownHead(headers, is_journalled(headers))

    def forget(self, upstream: Upstream) -> None:
        """Forget an idle connection that the worker has closed; `take` skips any that remain."""
        if self._idle and self._idle[0] is upstream:
            self._idle.popleft()

    def sweep(self, now_s: float) -> None:
        while self._idle and (not self._idle[0].usable or now_s - self._idle[0].idle_since_s > IDLE_S):
            self._idle.popleft().drop()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().drop()


class _Whole(Reader):
    """Reads a whole response into memory."""

    def __init__(self, limit: int) -> None:
        self.done: asyncio.Future[tuple[int, Headers, bytes]] = asyncio.get_running_loop().create_future()
        self._limit = limit
        self._status, self._headers = 0, []  # type: int, Headers
        self._body = bytearray()

    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit:
            self.lost(f"its answer has more than {self._limit} bytes")

    def ended(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, self._headers, bytes(self._body)))

    def lost(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(WorkerLost(why))


async def call(
    pool: Pool,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: Headers | None = None,
    timeout_s: float,
    limit: int = 64 * 2**20,
) -> tuple[int, dict[str, Any], bytes]:
    """Send a request and return its whole response; raises WorkerLost if there is none in time."""
    lines = b"".join(b"%b: %b\r\n" % header for header in headers or ())
    head = (
        b"%b %b%b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
    )
    request = head % (method.encode(), pool.prefix, path.encode(), pool.netloc, len(body), lines) + body
    reader, upstream = _Whole(limit), None
    try:
        async with asyncio.timeout(timeout_s):
            # Always a new connection, because the worker may be closing an idle one at this moment.
            upstream = await pool.connect()
            upstream.send(request, reader, once=True)
            status, answered, content = await reader.done
    except TimeoutError:
        raise NoAnswer(f"no answer within {timeout_s:g} s") from None
    finally:
        if upstream is not None:
            upstream.drop()
    return status, {name.decode("latin-1"): value.decode("latin-1") for name, value in answered}, content
