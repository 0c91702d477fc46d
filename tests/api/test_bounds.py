"""Control calls while engines are stopped or killed are answered in time and correctly, and stay in force.

Guarantees 61 and 75.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.api.control import lifecycle as control
from headgate.contract.orders import UNORDERED
from headgate.testing.tiny import tiny_model
from tests.api.clients import Told, asking, begun, get, post, send, streaming, until
from tests.api.live import LiveServer, live_server

LONG = 2000
AT_MOST_S = 8.0  # for a call with a timeout of half a second, on a machine that may not schedule us for some seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model(tmp_path_factory.mktemp("bounds") / "tiny", max_position_embeddings=4096)
    with live_server(model, device="cpu", kv_blocks=300, block_size=16, max_running=4) as server:
        yield server


@pytest.fixture(autouse=True)
def soon(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(control, "QUERY_TIMEOUT_S", 1.0)
    yield
    asyncio.run(until(lambda: resumed(server)))


async def resumed(server: LiveServer) -> bool:
    return bool((await post(server.url, "/v1/resume")).result["state"] == "running")


async def state(server: LiveServer) -> str:
    return str((await get(server.url, "/v1/is_paused")).result["state"])


async def in_time(call: Awaitable[Told]) -> Told:
    began_s = time.monotonic()
    told = await call
    assert time.monotonic() - began_s < AT_MOST_S
    return told


async def kill(server: LiveServer) -> None:
    replica = server.host.replicas[0]
    await until(lambda: replica.client is not None)
    restarts = replica.restarts
    signal_engine(server, signal.SIGKILL)
    await until(lambda: replica.restarts > restarts)


def signal_engine(server: LiveServer, what: signal.Signals) -> None:
    pid = server.host.replicas[0].pid
    assert pid is not None
    os.kill(pid, what)


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/pause", {"mode": "abort"}, "pausing"),
    ("/v1/pause", {"mode": "drain"}, "pausing"),
    ("/v1/pause", {"mode": "freeze"}, "pausing"),
    ("/v1/resume", {}, "running"),
    ("/v1/flush_cache", {}, "running"),
]


@pytest.mark.parametrize(("path", "body", "then"), CALLS)
def test_61_a_control_call_is_answered_in_time_while_the_engine_is_stopped(
    server: LiveServer, path: str, body: dict[str, Any], then: str
):
    async def main() -> None:
        async with streaming(server.url, [asking(400)]) as received:
            await begun(received)
            with server.stopped():
                told = await in_time(post(server.url, path, body | {"timeout": 0.5}))
                assert told.status == 202 and told.body["status"] == "accepted"
                assert "has not answered" in told.result["engines"][0]["error"]
                assert told.result["state"] == then and not told.result["is_paused"]
                assert await state(server) == then  # the same when asked again
            if path == "/v1/pause":
                assert told.result["mode"] == body["mode"]
                await until(lambda: reaches(server, "paused"))
                await post(server.url, "/v1/resume")

    asyncio.run(main())


async def reaches(server: LiveServer, wanted: str) -> bool:
    return await state(server) == wanted


def test_61_an_abort_is_answered_in_time_while_the_engine_is_stopped(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="held")]) as received:
            await begun(received)
            with server.stopped():
                told = await in_time(post(server.url, "/v1/abort_requests", {"req_ids": ["held"], "timeout": 0.5}))
                assert told.status == 202 and told.result["errors"][0]["request_id"] == "held"
                listed = await in_time(get(server.url, "/v1/requests"))
                assert [each["request_id"] for each in listed.body["data"]] == ["held"]
        assert received[0].end == ("abort", "api_abort")

    asyncio.run(main())


@pytest.mark.parametrize(("path", "pauses"), [("/pause", True), ("/pause_generation", True), ("/flush_cache", False)])
def test_61_compatible_apis_do_not_report_success_before_all_is_done(
    server: LiveServer, path: str, pauses: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control, "DEFAULT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(control.Controls.flush, "__defaults__", (0.5,))

    async def main() -> None:
        with server.stopped():
            told = await in_time(post(server.url, path, {}))
            assert told.status == 503 and told.body["error"]["code"] == "not_followed"
            assert await state(server) == ("pausing" if pauses else "running")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/start_weight_update"])
def test_61_an_update_that_cannot_pause_all_engines_resumes_them(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
):
    body = {"model_path": str(tmp_path)} if path == "/update_weights_from_disk" else {}
    monkeypatch.setattr(control, "DEFAULT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(control.Controls.resume, "__defaults__", (0.5, UNORDERED))

    async def main() -> None:
        with server.stopped():
            told = await in_time(post(server.url, path, body))
            assert told.status in (400, 503) and "has not answered" in str(told.body)
        await until(lambda: reaches(server, "running"))
        assert (await send(server.url, "POST", "/v1/completions", asking(1))).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["drain", "freeze", "abort"])
def test_75_a_pause_outlives_the_only_engine(server: LiveServer, mode: str):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG)]) as received:
            await begun(received)
            signal_engine(server, signal.SIGSTOP)  # stopped while it is working
            pausing = asyncio.create_task(post(server.url, "/v1/pause", {"mode": mode, "timeout": 60}))
            await until(lambda: server.host.ledger.metrics.pauses[mode] > before)
            await kill(server)
            told = await pausing
            assert told.status == 202 and told.result["state"] == "pausing"
            assert told.result["engines"][0]["state"] == "down"
            await until(lambda: reaches(server, "paused"))
            assert (await get(server.url, "/v1/is_paused")).result["mode"] == mode
            refused = await send(server.url, "POST", "/v1/completions", asking(1))
            assert refused.status == 503 and refused.body["error"]["code"] == "paused"
            if mode == "freeze":  # and once more
                await kill(server)
                await until(lambda: reaches(server, "paused"))
            await post(server.url, "/v1/resume")
        end = ("abort", "pause") if mode == "abort" else ("length", "max_tokens")
        assert received[0].end == end

    before = server.host.ledger.metrics.pauses[mode]
    asyncio.run(main())
