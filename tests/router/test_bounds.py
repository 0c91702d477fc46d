"""What one client can hold of a router: bounded in bytes, and in time."""

from __future__ import annotations

import asyncio

import pytest

from headgate.config import RouteConfig
from headgate.errors import HeadgateError
from headgate.router.downstream import Connections
from tests.router.client import Wire, ask, check, routing, until
from tests.router.mock import CHAT, FINE, Fault, Mock
from tests.router.run import run
from tests.router.test_downstream import Echo, with_server

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def test_a_client_that_never_reads_gives_its_place_back_in_time():
    async def main() -> None:
        async with (
            Mock(lambda _: Fault("stall", at=2)) as mock,
            routing(mock, max_in_flight=1, write_timeout_s=0.2) as (router, url),
        ):
            wire = await Wire.open(url)
            wire.post(CHAT, BODY | {"stream": True})
            await wire.some(1)
            exchange = next(iter(router.live.values()))
            exchange.client.pause_writing()  # as the transport does when its buffer is full
            assert exchange.full
            mock.script = lambda _: FINE
            assert check(BODY, await ask(url, CHAT, BODY)) is None  # there is one place, and it was given back
            assert mock.asked[0].left
            assert not (await wire.response()).complete
            wire.close()

    run(main())


def test_a_client_has_the_whole_time_again_whenever_it_has_read_on():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.send(post(1))
        await until(lambda: echo.later)
        later = echo.later[0]
        for full in (1, 2):
            later.client.write(b"x" * 2**24)
            assert later.full.count(True) == full
            connections.sweep(asyncio.get_running_loop().time() + 9.0)
            assert not later.client.gone
            await wire._reader.readexactly(2**24)
            await until(lambda: later.full[-1] is False)
        later.client.write(b"x" * 2**24)
        connections.sweep(asyncio.get_running_loop().time() + 11.0)
        await until(lambda: later.left)
        wire.close()

    with_server(test, later=True, write_timeout_s=10.0)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(HeadgateError, match="write_timeout_s must be above 0"):
        RouteConfig(write_timeout_s=0.0)


def post(size: int) -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)


@pytest.mark.parametrize("known", [False, True], ids=["new head", "known head"])
def test_bodies_that_wait_on_one_connection_are_bounded_together(known: bool):
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        if known:
            wire.send(post(1))
            await until(lambda: len(echo.later) == 1)
            echo.later.pop().answer()
            assert (await wire.response()).status == 200 and connections.heads
        for size in (900, 600, 300, 200):  # the first is being answered, the next two fit, the last does not
            wire.send(post(size))
            await until(lambda: echo.later)
        await until(lambda: echo.later[0].client._refusal is not None)
        for size in (900, 600, 300):
            await until(lambda: echo.later)
            later = echo.later.pop()
            assert len(later.request.body) == size
            later.answer()
            assert (await wire.response()).status == 200
        refused = await wire.response()
        assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
        assert "more than 1000 bytes" in refused.error["message"] and echo.later == []
        assert await wire.closed()

    with_server(test, later=True, max_body_bytes=1000)
