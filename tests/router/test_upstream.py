"""Connections to workers: kept, stale, broken, sending too much; every request ends once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import accumulate, pairwise
from typing import cast

import pytest

from headgate.router.data_path import upstream
from headgate.router.data_path.fast_path import EventPipe
from headgate.router.data_path.outbox import Outbox
from headgate.router.data_path.upstream import Headers, NoAnswer, Pool, Reader, Upstream, WorkerLost, call
from headgate.router.exchange.journal import Journal
from headgate.router.exchange.prefill import PrefillRequest
from headgate.router.fleet.fleet import LoadShare
from tests.router.client import until
from tests.router.compiled import compiled_fast_path
from tests.router.run import run

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Noting(Reader):
    def __init__(self) -> None:
        self.status = 0
        self.heads = 0
        self.body = b""
        self.ends: list[str] = []
        self.pipe: EventPipe | None = None

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.heads += 1

    def data(self, data: bytes) -> None:
        assert not self.ends
        self.body += data

    def ended(self) -> None:
        self.ends.append("ended")

    def lost(self, why: str) -> None:
        self.ends.append(why)


def pool_for(url: str, connect_timeout_s: float) -> Pool:
    return Pool(url, connect_timeout_s, fast_path=compiled_fast_path())


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def worker(serve: Serve):
    """Yield a pool of connections to a server that runs `serve` for each connection."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the peer has closed
            await serve(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    pool = pool_for(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 60.0)
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        for _ in range(10):  # let connections that were just accepted start
            await asyncio.sleep(0)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


def answering(*answers: bytes, close: bool = False, over: asyncio.Event | None = None) -> Serve:
    """Return a server that sends one answer per request, possibly in pieces; `over` is set after the last answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for answer in answers:
                    writer.write(answer)
                    await asyncio.sleep(0.01)
                if close:
                    writer.close()
                    return
                if over is not None:
                    over.set()
        finally:
            if over is not None:
                over.set()

    return serve


async def ask(pool: Pool) -> tuple[Noting, Upstream]:
    noting, connection = Noting(), pool.take() or await pool.connect()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", noting)
    await until(lambda: noting.ends)
    return noting, connection


def said(*answers: bytes, close: bool = False) -> tuple[Noting, bool]:
    """Return what the reader received, and whether the connection was kept."""
    result: list[tuple[Noting, bool]] = []

    async def main() -> None:
        over = asyncio.Event()
        async with worker(answering(*answers, close=close, over=over)) as pool:
            noting, _ = await ask(pool)
            await over.wait()
            for _ in range(10):  # until the reader has received it
                await asyncio.sleep(0.001)
            assert len(noting.ends) == 1
            result.append((noting, pool.take() is not None))

    run(main())
    return result[0]


def test_a_whole_answer_ends_and_its_connection_is_kept():
    noting, kept = said(OK)
    assert (noting.status, noting.body, noting.ends, kept) == (200, b"ok", ["ended"], True)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """A transport that discards its data."""

    closing = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.closing = True

    close = abort

    def is_closing(self) -> bool:
        return self.closing

    def resume_reading(self) -> None:
        pass


def heard(answer: bytes, *before: bytes) -> tuple[int, bytes, list[str], bool]:
    """Return what a reader receives of an answer that arrives in one piece, and whether the connection is kept."""
    return asyncio.run(hear(answer, before))


async def hear(answer: bytes, before: tuple[bytes, ...]) -> tuple[int, bytes, list[str], bool]:
    pool = pool_for("http://127.0.0.1:1", 1.0)
    connection, noting = Upstream(pool), Noting()
    connection.connection_made(cast(asyncio.Transport, Wire()))
    for each in before:
        connection.send(b"", Noting())
        connection.data_received(each)
        assert pool.take() is connection
    connection.send(b"", noting)
    connection.data_received(answer)
    return noting.status, noting.body, noting.ends, pool.take() is connection


@pytest.mark.parametrize(
    "body",
    [
        b"2\r\nok\r\n0\r\n\r\n",
        b"2\r\nok\r\n1\r\n!\r\n0\r\n\r\n",
        b"0A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"2\r\nok\r\n",
        b"2\r\nok\r\n1\r\n",
        b"2\r\nok\r\n0\r\n\r\n0\r\n\r\n",
        b"0\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"2;x=1\r\nok\r\n0\r\n\r\n",
        b"2\r\nok\r\n0\r\nx: 1\r\n\r\n",
        b"3\r\nok\r\n0\r\n\r\n",
        b"1\r\nok\r\n0\r\n\r\n",
        b"+2\r\nok\r\n0\r\n\r\n",
        b"-2\r\nok\r\n0\r\n\r\n",
        b"fffffffff\r\nok\r\n0\r\n\r\n",
        b"2\nok\n0\r\n\r\n",
        b"",
    ],
)
def test_an_answer_with_a_known_head_is_read_as_by_the_parser(body: bytes):
    assert heard(CHUNKED + body, CHUNKED + b"1\r\n.\r\n0\r\n\r\n") == heard(CHUNKED + body)


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_answer_with_a_known_head_is_read_as_by_the_parser(seed: int):
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.randrange(1, 40)) for _ in range(rng.randrange(1, 5))]
    body = bytearray(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(body))
        body[at : at + rng.randrange(3)] = rng.choice([b"", b"\r\n", b"0", b"1", b"a", b"\n", b";"])
    assert heard(CHUNKED + body, CHUNKED + b"1\r\n.\r\n0\r\n\r\n") == heard(CHUNKED + bytes(body))


def test_an_interim_response_is_skipped():
    noting, kept = said(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
    assert (noting.heads, noting.body, kept) == (1, b"ok", True)


def test_an_answer_without_a_length_ends_with_its_connection():
    noting, kept = said(b"HTTP/1.1 200 OK\r\n\r\nsome", b" more", close=True)
    assert (noting.body, noting.ends, kept) == (b"some more", ["ended"], False)


def test_a_connection_that_the_worker_closes_is_not_kept():
    noting, kept = said(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", close=True)
    assert (noting.ends, kept) == (["ended"], False)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_a_truncated_answer_is_lost(answer: bytes):
    noting, kept = said(answer, close=True)
    assert "broke" in noting.ends[0] and not kept


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nok",  # more than announced
        OK + OK,  # two answers to one request
    ],
)
def test_an_answer_that_is_not_http_is_lost_and_its_connection_not_kept(answer: bytes):
    noting, kept = said(answer)
    assert noting.ends[0].startswith("it does not speak HTTP") and not kept


def test_unsolicited_data_closes_an_idle_connection():
    noting, kept = said(OK, b"HTTP/1.1 408 Timeout\r\n\r\n")
    assert (noting.ends, kept) == (["ended"], False)


@pytest.mark.parametrize("head", [b"a: " + b"x" * 300_000, b"a: bcdefghijkl\r\n" * 20_000])
def test_the_size_of_a_head_is_bounded(head: bytes):
    noting, kept = said(b"HTTP/1.1 200 OK\r\n" + head, *[head] * 3)
    assert noting.ends == ["the head of its answer is too long"] and not kept


def test_connections_are_reused_last_used_first():
    async def main() -> None:
        async with worker(answering(OK)) as pool:
            used = [(await ask(pool))[1] for _ in range(3)]
            assert len(set(used)) == 1 and used[0].reused
            first, second = pool.take(), await pool.connect()
            assert first is used[0]
            for connection in (first, second):
                connection.send(b"GET / HTTP/1.1\r\n\r\n", noting := Noting())
                await until(lambda noting=noting: noting.ends)
            assert pool.take() is second

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_connection_that_was_paused_by_its_last_reader_reads_again_for_the_next(late: bool):
    class Full(Noting):
        def data(self, data: bytes) -> None:
            super().data(data)
            if not late:
                connection.hold()

        def ended(self) -> None:
            super().ended()
            if late:
                connection.hold()  # the pool has it by now

    async def main() -> None:
        nonlocal connection
        async with worker(answering(OK)) as pool:
            connection = await pool.connect()
            for _ in range(2):
                full = Full()
                connection.send(b"GET / HTTP/1.1\r\n\r\n", full)
                await until(lambda full=full: full.ends)
                assert full.ends == ["ended"] and pool.take() is connection

    connection: Upstream
    run(main())


def test_a_connection_that_the_worker_has_closed_is_not_taken():
    async def main() -> None:
        async with worker(answering(OK, close=True)) as pool:
            _, connection = await ask(pool)
            await until(lambda: not connection.usable)
            assert pool.take() is None

    run(main())


def test_connections_that_idle_for_long_are_closed():
    async def main() -> None:
        async with worker(answering(OK)) as pool:
            _, connection = await ask(pool)
            pool.sweep(asyncio.get_running_loop().time() + upstream.IDLE_S - 40)
            assert connection.usable
            pool.sweep(asyncio.get_running_loop().time() + upstream.IDLE_S + 1)
            assert not connection.usable and pool.take() is None

    run(main())


def test_a_dropped_connection_is_closed_and_calls_its_reader_no_more():
    async def main() -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            try:
                await reader.read()
            finally:
                left.set()

        async with worker(serve) as pool:
            noting, connection = Noting(), await pool.connect()
            connection.send(b"GET / HTTP/1.1\r\n\r\n", noting)
            await asyncio.sleep(0.02)
            assert connection.answers(noting)
            connection.drop()
            assert not connection.answers(noting)
            async with asyncio.timeout(60):
                await left.wait()
            assert noting.ends == []

    run(main())


def test_43_a_call_has_an_answer_or_a_reason_in_time():
    async def main() -> None:
        async with worker(answering(OK)) as pool:
            status, _, body = await call(pool, "GET", "/x", timeout_s=60)
            assert (status, body) == (200, b"ok")
            assert pool.take() is None  # a probe keeps no connection
            with pytest.raises(WorkerLost, match="more than 1 bytes"):
                await call(pool, "GET", "/x", timeout_s=60, limit=1)
        async with worker(answering()) as pool:
            with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
                await call(pool, "GET", "/x", timeout_s=0.1)
        with pytest.raises(WorkerLost, match="no connection"):
            await call(pool, "GET", "/x", timeout_s=60)

    run(main())


class Tube:
    """A pipe that bypasses its reader and records what passes."""

    def __init__(self, noting: Noting) -> None:
        journal = Journal()
        self._pipe = compiled_fast_path().pipe(journal, Outbox(), cast(asyncio.Transport, Wire()))
        self._noting, self._raw = noting, journal.raw
        self.taken = 0

    def take(self, data: bytes) -> bool:
        if not self._pipe.take(data):
            return False
        self._noting.body += self._raw.pop()
        self.taken += 1
        return True


async def pieces(*parts: bytes) -> Noting:
    """Return what a reader receives of an answer in these pieces, with or without a pipe."""
    connection, noting = Upstream(pool_for("http://127.0.0.1:1", 1.0)), Noting()
    connection.connection_made(cast(asyncio.Transport, Wire()))
    connection.send(b"", noting)
    connection.pipe = noting.pipe = cast(EventPipe, Tube(noting))
    for part in parts:
        if not noting.ends:
            connection.data_received(part)
    return noting


@pytest.mark.parametrize(
    "parts",
    [
        [b"2\r\nok\r\n", b"1\r\n!\r\n", b"0\r\n\r\n"],
        [b"2\r\nok\r\n", b"1\r\n!\r\n0\r\n\r\n"],
        [b"2\r\nok\r\n1", b"\r\n!\r\n", b"0\r\n\r\n"],
        [b"1\r\no\r\n1", b"1\r\nX\r\n", b"12345678901234\r\n", b"0\r\n\r\n"],  # the second piece looks like a chunk
        [b"1\r\no\r\n8;a=", b"1\r\n!\r\n", b"12345\r\n", b"0\r\n\r\n"],
        [b"1\r\no\r\n1", b"4\r\nX!\n\n\r\n", b"12345678901234\r\n", b"0\r\n\r\n"],
        [b"3\r\nX\n\n\r\n", b"4\r\nX!\n\n\r\n", b"0\r\n\r\n"],
        [b"2\r\nok\r\n", b"1\r", b"\n!\r\n", b"0\r\n\r\n"],
        [b"2\r\nok\r\n", b"1\r\n!", b"\r\n", b"0\r\n\r\n"],
    ],
)
def test_chunks_are_read_alike_however_they_are_split(parts: list[bytes]):
    cut, whole = asyncio.run(pieces(CHUNKED, *parts)), asyncio.run(pieces(CHUNKED + b"".join(parts)))
    assert (cut.body, cut.ends) == (whole.body, whole.ends) and whole.ends == ["ended"]


def test_chunks_are_read_alike_in_random_pieces():
    rng, taken = random.Random(7), 0
    for _ in range(2000):
        chunks = [rng.choice([b"\r\n", b"1\r\n", b"a", b"\n\n", b"15\r\n0"]) * rng.randint(1, 12) for _ in range(4)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        edges = [0, *accumulate(len(b"%x" % len(chunk)) + len(chunk) + 4 for chunk in chunks)]
        cuts = sorted({0, *rng.sample(edges, 3), *(rng.randint(0, len(data)) for _ in range(3)), len(data)})
        parts = [data[a:b] for a, b in pairwise(cuts)]
        noting = asyncio.run(pieces(CHUNKED, *parts))
        assert (noting.body, noting.ends) == (b"".join(chunks), ["ended"]), parts
        taken += cast(Tube, noting.pipe).taken
    assert taken > 20


@pytest.mark.parametrize("damaged", [b"0\r\nx\r\n", b"2\r\nok!\r\n", b"-1\r\n!\r\n", b"2\r\nok\n\n", b"1\r\n\r\n"])
def test_malformed_chunks_are_left_to_the_parser(damaged: bytes):
    noting = asyncio.run(pieces(CHUNKED, b"2\r\nok\r\n", damaged, b"0\r\n\r\n"))
    assert noting.ends != ["ended"] or noting.body == b"ok"


def test_a_ticket_may_arrive_in_its_own_chunk_after_keep_alives():
    class Share:
        worker = None

        def give_back(self) -> None:
            pass

    async def test() -> None:
        leg = PrefillRequest(cast(LoadShare, Share()))
        connection = Upstream(pool_for("http://127.0.0.1:1", 1.0))
        connection.connection_made(cast(asyncio.Transport, Wire()))
        connection.send(b"", leg)
        for event in (b": keep-alive\n\n", b": keep-alive\n\n", b'data: {"kv_ticket":{"lease":1}}\n\n'):
            connection.data_received((CHUNKED if leg._status == 0 else b"") + b"%x\r\n%b\r\n" % (len(event), event))
        assert leg.ticket.result() == b'{"lease":1}'

    asyncio.run(test())
