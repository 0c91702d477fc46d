"""Requests that are accepted and refused, over real sockets with a handler that echoes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headgate.router.data_path import downstream
from headgate.router.data_path.downstream import Answering, Connections, Downstream, HttpRequest, answer_head
from tests.router.client import Wire, until
from tests.router.compiled import compiled_fast_path
from tests.router.run import run


class Later:
    """An answering object that answers when the test calls it."""

    def __init__(self, client: Downstream, request: HttpRequest) -> None:
        self.client, self.request = client, request
        self.left = False
        self.full: list[bool] = []

    def client_left(self) -> None:
        self.left = True

    def client_full(self, full: bool) -> None:
        self.full.append(full)

    def answer(self, body: bytes = b"later") -> None:
        self.client.write(answer_head(200, [(b"content-length", b"%d" % len(body))]) + body)
        self.client.finished()


class Echo:
    def __init__(self, *, later: bool = False) -> None:
        self.asked: list[HttpRequest] = []
        self.later: list[Later] = []
        self._waits = later

    def handle(self, client: Downstream, request: HttpRequest) -> Answering | None:
        self.asked.append(request)
        later = Later(client, request)
        if self._waits:
            self.later.append(later)
            return later
        later.answer(request.body)
        return None


Test = Callable[[Echo, Connections, str], Coroutine[Any, Any, None]]


def with_server(test: Test, *, later: bool = False, max_body_bytes: int = 1000, stall_s: float = 300.0) -> None:
    async def main() -> None:
        echo = Echo(later=later)
        connections = Connections(echo.handle, max_body_bytes, stall_s, fast_path=compiled_fast_path())
        server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
        try:
            await test(echo, connections, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            connections.abort()
            server.close()
        await until(lambda: not len(connections))

    run(main())


def said(data: bytes, *, later: bool = False) -> tuple[list[HttpRequest], int, str]:
    """Send bytes; returns what the handler received, the status of the first answer, and its error code."""
    result: list[Any] = []

    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.send(data)
        answer = await wire.response()
        code = answer.error["code"] if answer.status >= 400 else ""
        if code:
            assert await wire.closed()  # what follows cannot be parsed
        wire.close()
        result.append((echo.asked, answer.status, code))

    with_server(test, later=later)
    return result[0]  # type: ignore[no-any-return]


POST = b"POST /v1/x HTTP/1.1\r\nhost: x\r\n"


def test_a_chunked_body_is_reassembled():
    asked, status, _ = said(POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert (asked[0].body, status) == (b"abcde", 200)


def test_a_request_may_arrive_byte_by_byte():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for byte in POST + b"content-length: 3\r\n\r\nabc":
            wire.send(bytes([byte]))
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert (await wire.response()).body == b"abc"
        wire.close()

    with_server(test)


REFUSED = {
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_http"),
    "a bad length": (POST + b"content-length: abc\r\n\r\n", 400, "bad_http"),
    "two lengths": (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "bad_http"),
    "a length and chunks": (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc", 400, "bad_http"),
    "a bad chunk": (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "bad_http"),
    "a large body announced": (POST + b"content-length: 1001\r\n\r\n", 413, "body_too_large"),
    "a large body in chunks": (
        POST + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n",
        413,
        "body_too_large",
    ),
    "many headers": (POST + b"a: " + b"x" * 100 + b"\r\n" + b"b: 123456789\r\n" * 10_000, 431, "headers_too_large"),
    "one long header": (POST + b"a: " + b"x" * 2_000_000, 431, "headers_too_large"),
    "a long path": (b"GET /" + b"x" * 200_000, 431, "headers_too_large"),
    "an upgrade": (b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 400, "upgrade_refused"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unacceptable_request_is_refused_with_a_reason_and_the_connection_closes(name: str):
    data, status, code = REFUSED[name]
    asked, answered, told = said(data)
    assert (answered, told) == (status, code)
    assert asked == []


def test_a_head_below_the_limit_is_accepted_in_any_number_of_pieces():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.send(POST)
        for _ in range(55):
            wire.send(b"a: " + b"x" * 997 + b"\r\n")
            await asyncio.sleep(0.001)
        wire.send(b"content-length: 0\r\n\r\n")
        assert (await wire.response()).status == 200
        wire.close()

    with_server(test)


def test_pipelined_requests_are_answered_one_after_the_other_in_order():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for i in range(5):
            wire.post("/", b"%d" % i)
        await until(lambda: echo.later)
        for i in range(5):
            await until(lambda i=i: len(echo.later) == i + 1)
            assert len(echo.asked) == i + 1
            echo.later[i].answer(echo.asked[i].body)
        assert [(await wire.response()).body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        wire.close()

    with_server(test, later=True)


def test_pipelined_requests_beyond_the_limit_are_refused_after_the_others_are_answered():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for _ in range(40):
            wire.post("/", b"x")
        for i in range(33):
            await until(lambda i=i: len(echo.later) == i + 1)
            echo.later[i].answer()
        answers = [await wire.response() for _ in range(34)]
        assert [answer.status for answer in answers] == [200] * 33 + [429]
        assert await wire.closed()

    with_server(test, later=True)


def test_garbage_after_a_request_does_not_prevent_its_answer():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.post("/", b"good")
        wire.send(b"\x00\x00nonsense\r\n\r\n")
        await until(lambda: echo.later)
        await asyncio.sleep(0.02)
        assert not echo.later[0].left
        echo.later[0].answer()
        assert [(await wire.response()).status for _ in range(2)] == [200, 400]
        assert await wire.closed()

    with_server(test, later=True)


def test_a_client_gets_no_second_answer_before_it_has_read_the_first():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url, limit=1024)
        wire.post("/", b"1")
        wire.post("/", b"2")
        await until(lambda: echo.later)
        echo.later[0].answer(b"x" * 20_000_000)
        await asyncio.sleep(0.05)
        assert len(echo.asked) == 1
        assert len((await wire.response()).body) == 20_000_000
        await until(lambda: len(echo.later) == 2)
        echo.later[1].answer()
        assert (await wire.response()).body == b"later"
        wire.close()

    with_server(test, later=True)


def test_http_1_0_and_connection_close_close_the_connection_after_the_answer():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        for data in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"):
            wire = await Wire.open(url)
            wire.send(data)
            assert (await wire.response()).status == 200
            assert await wire.closed()

    with_server(test)


def test_connections_are_kept_alive_by_default():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for i in range(3):
            wire.post("/", b"%d" % i)
            assert (await wire.response()).body == b"%d" % i
        wire.close()

    with_server(test)


def test_expect_100_continue_is_answered_unless_the_body_is_too_large():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.send(POST + b"Expect: 100-Continue\r\ncontent-length: 3\r\n\r\n")
        assert (await wire.response()).status == 100
        wire.send(b"abc")
        assert (await wire.response()).body == b"abc"
        wire.send(POST + b"Expect: 100-continue\r\ncontent-length: 3000\r\n\r\n")
        assert (await wire.response()).status == 413
        wire.close()

    with_server(test)


def test_a_disconnect_of_the_client_is_reported_to_its_answering_object():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.post("/", b"x")
        wire.post("/", b"never seen")
        await until(lambda: echo.later)
        wire.close()
        await until(lambda: echo.later[0].left)
        assert echo.later[0].client.gone
        echo.later[0].answer()  # the client is gone
        assert len(echo.asked) == 1

    with_server(test, later=True)


def test_an_incomplete_request_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downstream, "REQUEST_S", 0.0)

    async def test(echo: Echo, connections: Connections, url: str) -> None:
        for data in (POST + b"a: b\r\n", POST + b"content-length: 5\r\n\r\nab"):
            wire = await Wire.open(url)
            wire.send(data)
            await until(lambda: len(connections) == 1)
            reading = asyncio.ensure_future(wire.response())
            while not reading.done():
                connections.sweep(asyncio.get_running_loop().time() + 1)
                await asyncio.sleep(0.02)
            answer = reading.result()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
            assert await wire.closed()
            await until(lambda: not len(connections))

    with_server(test)


def test_an_idle_connection_is_closed_and_a_busy_one_is_not():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        idle, busy = await Wire.open(url), await Wire.open(url)
        busy.post("/", b"x")
        await until(lambda: echo.later and len(connections) == 2)
        connections.sweep(asyncio.get_running_loop().time() + downstream.KEEP_ALIVE_S + 1)
        assert await idle.closed()
        connections.close()
        echo.later[0].answer()
        assert (await busy.response()).body == b"later"
        assert await busy.closed()

    with_server(test, later=True)


def _posts(sizes: list[int], *, key: bytes = b"k") -> list[tuple[bytes, bytes]]:
    """Consecutive requests of one client: the heads differ only in the content length."""
    bodies = [bytes([97 + i % 26]) * size for i, size in enumerate(sizes)]
    head = POST + b"authorization: Bearer %b\r\nContent-Length: %d\r\naccept: */*\r\n\r\n"
    return [(head % (key, len(body)) + body, body) for body in bodies]


def test_a_repeated_head_is_recognised_and_its_body_is_the_new_one():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for data, body in _posts([3, 700, 0, 12]):
            wire.send(data)
            assert (await wire.response()).body == body
        assert len(connections.heads) == 1
        first, *others = echo.asked
        assert all(asked.head is first.head for asked in others), "only the first head was parsed"
        data, body = _posts([5], key=b"another")[0]
        wire.send(data)
        assert (await wire.response()).body == body
        assert echo.asked[-1].header(b"authorization") == b"Bearer another"
        wire.close()

    with_server(test)


def test_data_after_a_known_head_is_still_parsed():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        (first, _), (second, body), (third, other) = _posts([4, 6, 8])
        wire.send(first)
        await wire.response()
        wire.send(second + third)  # two at once
        assert [(await wire.response()).body for _ in range(2)] == [body, other]
        wire.send(second[:-2])  # incomplete
        await asyncio.sleep(0.05)
        wire.send(second[-2:] + third[:10])
        assert (await wire.response()).body == body
        wire.send(third[10:])
        assert (await wire.response()).body == other
        too_long, _ = _posts([2000])[0]
        wire.send(too_long)
        assert (await wire.response()).status == 413
        wire.close()

    with_server(test)


def test_the_number_of_remembered_heads_is_bounded(monkeypatch):
    monkeypatch.setattr(downstream, "MOST_KNOWN_HEADS", 10)

    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        for i in range(35):
            data, body = _posts([3], key=b"%d" % i)[0]
            wire.send(data)
            assert (await wire.response()).body == body
            assert len(connections.heads) <= 10
        wire.close()

    with_server(test)
