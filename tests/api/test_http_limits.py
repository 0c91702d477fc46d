"""Limits of size and time of a request, before any handler is called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from headgate.api import server as module
from headgate.api.server import MAX_HEAD_BYTES, HttpServer
from headgate.listening import take_port

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer, slowly if the path requests it."""
    more, body = True, b""
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/slow":
        await asyncio.sleep(2.5)  # longer than any deadline of these tests
    await send({"type": "http.response.body", "body": b"heard " + body})


@dataclass
class Peer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        async with asyncio.timeout(60):
            return await self.reader.read()


@asynccontextmanager
async def connected() -> AsyncIterator[Peer]:
    listener, ready = take_port("127.0.0.1", 0), asyncio.Event()
    server = HttpServer(echo, listener, ready.set)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await ready.wait()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            yield Peer(reader, writer)
        finally:
            writer.close()
            server.stop_accepting()


Ask = Callable[[Peer], Awaitable[bytes]]
Hurried = Callable[[Ask], Awaitable[bytes]]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Hurried:
    """Send to a server with short deadlines; retry with longer ones if the server closed before it read anything."""

    async def answered(ask: Ask) -> bytes:
        answer = b""
        for head_s in (0.3, 1.0, 2.0):
            monkeypatch.setattr(module, "HEAD_S", head_s)
            monkeypatch.setattr(module, "BODY_S", head_s + 0.3)
            async with connected() as peer:
                answer = await ask(peer)
            if answer:
                break
        return answer

    return answered


# A little beyond the limit: closing a connection with unread bytes resets it, and the response is lost.
@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-Long: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"X-Endless: " + b"x" * MAX_HEAD_BYTES,
        GET + b"X-Many: and short\r\n" * 3460 + b"\r\n",
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_head_beyond_the_limit_gets_431_and_the_connection_is_closed(head):
    async with connected() as peer:
        peer.send(head)
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in answer


async def test_trailers_are_bounded_like_headers():
    async with connected() as peer:
        peer.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"100 Continue" in await peer.reader.readuntil(b"\r\n\r\n")
        peer.send(b"0\r\nX-Trailer: " + b"x" * MAX_HEAD_BYTES)
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_head_below_the_limit_with_a_body_beyond_it_is_accepted():
    long = b"x" * 8 * MAX_HEAD_BYTES
    async with connected() as peer:
        peer.send(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\nX-Long: " % len(long))
        peer.send(b"x" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n" + long)
        assert (await peer.rest()).count(b"x") == len(long)


async def test_bytes_that_are_not_http_get_an_error_in_openais_format():
    async with connected() as peer:
        peer.send(b"hello?\r\n\r\n")
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in answer


@pytest.mark.parametrize(("sent", "part"), [(GET, b"head"), (POST + b"half", b"body")])
async def test_a_request_that_does_not_arrive_in_time_gets_408(hurried, sent, part):
    async def ask(peer: Peer) -> bytes:
        peer.send(sent)
        return await peer.rest()

    answer = await hurried(ask)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"the %b of the request" % part in answer


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_closed_without_a_response(monkeypatch, sent):
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    async with connected() as peer:
        peer.send(sent)
        assert await peer.rest() == b""


async def test_the_second_request_of_a_connection_has_a_deadline_too(hurried):
    async def ask(peer: Peer) -> bytes:
        peer.send(GET + b"\r\n")
        with suppress(asyncio.IncompleteReadError):
            assert b"heard" in await peer.reader.readuntil(b"0\r\n\r\n")
            peer.send(b"\r\nGET")
        return await peer.rest()

    assert (await hurried(ask)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("behind", [b"", GET])  # a pipelined request
async def test_an_answer_may_take_longer_than_its_request(hurried, behind):
    async def ask(peer: Peer) -> bytes:
        peer.send(b"GET /slow HTTP/1.1\r\n\r\n" + behind)
        async with asyncio.timeout(60):
            try:
                return await peer.reader.readuntil(b"0\r\n\r\n")
            except asyncio.IncompleteReadError as cut:
                return cut.partial

    assert b"heard" in await hurried(ask)
