"""A pause applies to accepted requests that no engine has yet (guarantee 71)."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from headgate.api import state
from headgate.api.control import abort
from headgate.engine import replicas
from headgate.testing.tiny import tiny_model
from tests.api.clients import Received, Told, asking, begun, post, send, streaming, until
from tests.api.live import LiveServer, live_server
from tests.api.test_bounds import resumed, signal_engine

KEPT = [("drain", "reject"), ("drain", "queue"), ("freeze", "reject"), ("freeze", "queue")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model(tmp_path_factory.mktemp("accepted") / "tiny", max_position_embeddings=4096)
    with live_server(model, device="cpu", kv_blocks=300, block_size=16, max_running=4) as server:
        yield server


@pytest.fixture(autouse=True)
def running(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replicas, "RESTART_PAUSES_S", (0.5,))
    yield
    asyncio.run(until(lambda: resumed(server)))


async def pause(server: LiveServer, mode: str, new_requests: str = "reject") -> Told:
    return await post(server.url, "/v1/pause", {"mode": mode, "new_requests": new_requests, "timeout": 20})


async def accepted(server: LiveServer, count: int) -> None:
    await until(lambda: len(server.api.ledger.live) == count)


@asynccontextmanager
async def without_engine(server: LiveServer) -> AsyncIterator[None]:
    """The only engine has ended; a new one starts within seconds."""
    replica = server.host.replicas[0]
    await until(lambda: replica.client is not None)
    signal_engine(server, signal.SIGKILL)
    await until(lambda: replica.client is None)
    yield


@asynccontextmanager
async def without_threads(server: LiveServer) -> AsyncIterator[None]:
    """Block tokenisation inside the context."""
    free, before = threading.Event(), state.LONG_TEXT
    state.LONG_TEXT = 0
    blockers = [server.api.pool.submit(free.wait, 60) for _ in range(state.TEXT_THREADS)]
    try:
        yield
    finally:
        free.set()
        state.LONG_TEXT = before
        for blocker in blockers:
            blocker.result(60)


UNPLACED = pytest.mark.parametrize("unplaced", [without_engine, without_threads])


@UNPLACED
@pytest.mark.parametrize("new_requests", ["reject", "queue"])
def test_71_an_abort_ends_a_request_that_no_engine_has(server: LiveServer, unplaced: Any, new_requests: str):
    async def main() -> None:
        hindrance = AsyncExitStack()
        await hindrance.enter_async_context(unplaced(server))
        async with hindrance, streaming(server.url, [asking(8)]) as received, asyncio.TaskGroup() as tasks:
            whole = tasks.create_task(send(server.url, "POST", "/v1/completions", asking(8, n=3)))
            await accepted(server, 2)
            pausing = tasks.create_task(pause(server, "abort", new_requests))
            await until(lambda: server.host.ledger.metrics.pauses["abort"] > before)
            await hindrance.aclose()
            told = await pausing
            await until(lambda: not server.api.ledger.live)  # and not only after a resume
        assert told.result["aborted"] == 2
        assert received[0].end == ("abort", "pause") and not received[0].tokens and received[0].status == 200
        answer = whole.result()
        assert answer.status == 200 and answer.body["usage"]["completion_tokens"] == 0
        assert [(c["finish_reason"], c["cause"]) for c in answer.body["choices"]] == [("abort", "pause")] * 3

    before = server.host.ledger.metrics.pauses["abort"]
    asyncio.run(main())


@UNPLACED
@pytest.mark.parametrize(("mode", "new_requests"), KEPT)
def test_71_a_drain_and_a_freeze_keep_a_request_that_no_engine_has(
    server: LiveServer, unplaced: Any, mode: str, new_requests: str
):
    async def main() -> list[Received]:
        hindrance = AsyncExitStack()
        await hindrance.enter_async_context(unplaced(server))
        async with hindrance, streaming(server.url, [asking(8)]) as received:
            await accepted(server, 1)
            told = await pause(server, mode, new_requests)
            assert told.result["aborted"] == 0
            await hindrance.aclose()
            replica = server.host.replicas[0]
            await until(lambda: replica.client is not None and replica.known == "paused")
            if new_requests == "reject":
                refused = await post(server.url, "/v1/completions", asking(1))
                assert refused.status == 503 and refused.body["error"]["code"] == "paused"
            assert not received[0].tokens
            await post(server.url, "/v1/resume")
            await begun(received)
        return received

    [received] = asyncio.run(main())
    assert received.end == ("length", "max_tokens") and len(received.tokens) == 8


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_69_a_deadline_holds_while_a_prompt_waits_for_a_thread(server: LiveServer, path: str):
    async def main() -> None:
        body = {"deadline_ms": 100, "input" if path == "/v1/responses" else "prompt": "hello"}
        async with without_threads(server):
            told = await asyncio.wait_for(post(server.url, path, body), 30)
            assert (told.status, told.body["error"]["code"]) == (409, "deadline")
            assert not server.api.ledger.live

    asyncio.run(main())


def test_61_an_abort_of_a_request_whose_prompt_is_being_tokenised_does_not_report_an_unread_end(server: LiveServer):
    async def main() -> None:
        hindrance = AsyncExitStack()
        await hindrance.enter_async_context(without_threads(server))
        async with hindrance, streaming(server.url, [asking(8, request_id="unread")]) as received:
            await accepted(server, 1)
            told = await post(server.url, "/v1/abort_requests", {"req_ids": ["unread"], "timeout": 0.1})
            await hindrance.aclose()
        assert [error["message"] for error in told.result["errors"]] == [abort.UNPLACED]
        assert received[0].end == ("abort", "api_abort") and not received[0].tokens

    asyncio.run(main())


def test_19_71_a_request_that_arrives_during_a_pause_is_new_even_if_the_pause_is_repeated(server: LiveServer):
    async def main() -> None:
        await pause(server, "freeze")
        async with streaming(server.url, [asking(8)]) as received, without_threads(server):
            await accepted(server, 1)
            await pause(server, "freeze")
            await pause(server, "abort")
        assert received[0].status == 503 and received[0].error is not None and received[0].error["code"] == "paused"

    asyncio.run(main())
