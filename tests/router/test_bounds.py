"""Bounds on the memory and the time of a router that one client can take."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from headgate.config import RouteConfig
from headgate.errors import HeadgateError
from headgate.router.control.metrics import render
from headgate.router.data_path.downstream import Connections
from headgate.router.exchange.relay import Exchange
from headgate.router.router import Router
from tests.api.live import LiveServer
from tests.api.serving import wait_until
from tests.router.client import Wire, ask, check, routing, until
from tests.router.fleets import live_router
from tests.router.mock import CHAT, COMPLETIONS, Mock
from tests.router.run import run
from tests.router.test_downstream import Echo, with_server
from tests.stalled import LAST_CHUNK, SEND_BYTES, mute

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


LONG = BODY | {"stream": True, "max_tokens": 200_000}  # far more bytes than all buffers hold


def muted(url: str, **more: Any) -> Any:
    return mute(url, CHAT, LONG | more)


async def held_up(router: Router, id: str) -> Exchange:
    """Return the request, once its client's buffers are full."""
    await until(lambda: any(each.id == id and each.full for each in router.live.values()))
    return next(each for each in router.live.values() if each.id == id)


def test_62_a_client_that_reads_nothing_is_disconnected_and_frees_its_place(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "headgate.router")

    async def main() -> None:
        async with (
            Mock() as mock,
            routing(mock, max_in_flight=1, client_stall_timeout_s=2.0, send_bytes=SEND_BYTES) as (router, url),
        ):
            with muted(url, request_id="mute") as client:
                assert check(BODY, await ask(url, CHAT, BODY)) is None  # there is one place, and it was released
                assert router.counters.clients_left == {"client_stalled": 1}
                assert not client.rest().endswith(LAST_CHUNK)
            await until(lambda: mock.asked[0].left)
            assert b'clients_left_total{cause="client_stalled"} 1.0' in render(router, "test")
            assert router.fleet.find(mock.url).errors == 0  # it does not count as a failure of the worker

    run(main())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("mute: ")]
    assert len(lines) == 1 and "client_stalled" in lines[0] and "127.0.0.1:" in lines[0]


def test_62_an_abort_and_a_pause_wait_two_seconds_for_a_client_that_reads_nothing(servers: list[LiveServer]):
    body = {"prompt": "hello", "max_tokens": 30000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 5}
    with (
        live_router(servers[0].url, client_stall_timeout_s=600.0) as router,
        mute(router.url, COMPLETIONS, body | {"request_id": "mute"}) as client,
    ):
        wait_until(lambda: any(exchange.full for exchange in list(router.router.live.values())))
        began_s = time.monotonic()
        answer = router.post("/v1/abort_requests", {"abort_all": True, "timeout": 60})
        assert time.monotonic() - began_s < 20  # two seconds and a margin, but less than its timeout
        assert answer.status_code == 202
        errors = answer.json()["result"]["errors"]
        assert [(each["request_id"], each["code"]) for each in errors] == [("mute", "not_told")]
        assert servers[0].status().held_blocks == 0
        listed = router.get("/v1/requests").json()["data"]
        assert {choice["phase"] for each in listed for choice in each["choices"]} <= {"sending", "finished"}
        began_s = time.monotonic()
        assert router.post("/v1/pause", {"mode": "abort", "timeout": 60}).status_code == 200
        assert time.monotonic() - began_s < 20
        assert router.post("/v1/resume").status_code == 200
        assert b'"cause":"api_abort"' in client.rest_of_answer()


def test_62_a_drain_does_not_wait_for_a_client_that_reads_nothing():
    async def main() -> None:
        async with (
            Mock() as mock,
            routing(mock, send_bytes=SEND_BYTES, drain_timeout_s=300.0) as (router, url),
        ):
            with muted(url, request_id="mute"):
                await held_up(router, "mute")
                async with asyncio.timeout(60):
                    await router.drain()

    run(main())


def test_62_every_read_of_a_client_restarts_its_stall_timeout():
    async def test(echo: Echo, connections: Connections, url: str) -> None:
        wire = await Wire.open(url)
        wire.send(post(1))
        await until(lambda: echo.later)
        later, now_s = echo.later[0], asyncio.get_running_loop().time()
        for full in (1, 2):
            later.client.write(b"x" * 2**24)
            assert later.full.count(True) == full
            connections.sweep(now_s)
            connections.sweep(now_s := now_s + 9.0)
            assert not later.client.gone
            await wire._reader.readexactly(2**24)
            await until(lambda: later.full[-1] is False)
        later.client.write(b"x" * 2**24)
        connections.sweep(now_s)
        connections.sweep(now_s := now_s + 9.0)
        assert not later.client.gone
        connections.sweep(now_s + 20.0)  # the kernels' buffers took a part first
        connections.sweep(now_s + 40.0)
        await until(lambda: later.left)
        wire.close()

    with_server(test, later=True, stall_s=10.0)


def test_a_stall_timeout_of_zero_is_refused():
    with pytest.raises(HeadgateError, match="client_stall_timeout_s must be above 0"):
        RouteConfig(client_stall_timeout_s=0.0)


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
