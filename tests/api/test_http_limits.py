"""What a connection may send, and how long it may take, before any handler hears of it."""

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
    """Reads the body and takes its time over the answer, if the path says so."""
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
        """All that comes until the server hangs up."""
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
    """Ask a server that is in a hurry. One that hung up before it had heard a word is given more time."""

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


# A little beyond the limit: a server that hangs up on more than it has read resets the connection, and its answer is lost.
@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-Long: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        GET + b"X-Endless: " + b"x" * MAX_HEAD_BYTES,
        GET + b"X-Many: and short\r\n" * 3460 + b"\r\n",
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_head_beyond_the_limit_is_431_and_the_end_of_the_connection(head):
    async with connected() as peer:
        peer.send(head)
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in answer


async def test_trailers_are_bounded_as_headers_are():
    async with connected() as peer:
        peer.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"100 Continue" in await peer.reader.readuntil(b"\r\n\r\n")
        peer.send(b"0\r\nX-Trailer: " + b"x" * MAX_HEAD_BYTES)
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_head_below_the_limit_and_a_body_beyond_it_are_heard():
    long = b"x" * 8 * MAX_HEAD_BYTES
    async with connected() as peer:
        peer.send(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\nX-Long: " % len(long))
        peer.send(b"x" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n" + long)
        assert (await peer.rest()).count(b"x") == len(long)


async def test_what_is_not_http_is_told_in_openais_shape():
    async with connected() as peer:
        peer.send(b"hello?\r\n\r\n")
        answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in answer


@pytest.mark.parametrize(("sent", "part"), [(GET, b"head"), (POST + b"half", b"body")])
async def test_a_request_that_does_not_come_whole_is_408_when_its_time_is_up(hurried, sent, part):
    async def ask(peer: Peer) -> bytes:
        peer.send(sent)
        return await peer.rest()

    answer = await hurried(ask)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"the %b of the request" % part in answer


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_on_which_nothing_begins_is_closed_without_a_word(monkeypatch, sent):
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


@pytest.mark.parametrize("behind", [b"", GET])  # half a request that need not be heard yet
async def test_an_answer_may_take_longer_than_its_request(hurried, behind):
    async def ask(peer: Peer) -> bytes:
        peer.send(b"GET /slow HTTP/1.1\r\n\r\n" + behind)
        async with asyncio.timeout(60):
            try:
                return await peer.reader.readuntil(b"0\r\n\r\n")
            except asyncio.IncompleteReadError as cut:
                return cut.partial

    assert b"heard" in await hurried(ask)
