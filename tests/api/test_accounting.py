"""The usage records and the engines report exactly the same number of tokens (guarantee 53)."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.api.accounting.ledger import Record
from headgate.collector import collector_off
from headgate.testing.tiny import tiny_model
from tests.api.clients import COMPLETIONS, Received, asking, begun, get, post, stream, streaming, until
from tests.api.live import LiveServer, live_server
from tests.api.serving import wait_until

LONG = 2000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two engines with so few blocks that three long answers do not fit into one of them."""
    model = tiny_model(tmp_path_factory.mktemp("accounting") / "tiny", max_position_embeddings=4096)
    with live_server(model, device="cpu", kv_blocks=150, block_size=16, max_running=4, count=2) as server:
        yield server


@pytest.fixture(autouse=True)
def adds_up(server: LiveServer) -> Iterator[None]:
    """Check after every test that the server's records add up to the numbers that its engines have reported."""
    yield
    ledger = server.api.ledger
    asyncio.run(until(lambda: not ledger.live and not ledger.unsettled))
    # A client has its last token shortly before the engine reports that nothing runs.
    wait_until(lambda: all(not (status.running or status.waiting) for status in map(server.status, range(2))))
    statuses = [server.status(index) for index in range(2)]
    told = sum(status.output_tokens for status in statuses)
    assert told and sum(past.usage.engine_tokens for past in ledger._history.values()) == told
    assert ledger.metrics.tokens["engine"] == told


async def record(server: LiveServer, id: str) -> Any:
    return (await get(server.url, f"/v1/requests/{id}")).body["usage"]


def test_53_tokens_after_a_stop_string_are_in_the_record_and_not_in_the_answer(server: LiveServer):
    async def overshoot(stop: str, id: str, busy_s: float) -> int:
        body = asking(1000, prompt="a tale", stop=stop, request_id=id)
        async with streaming(server.url, [body]) as (received,):
            await begun([received])
            # The API is busy, so the engine runs ahead of it.
            server.loop.call_soon_threadsafe(time.sleep, busy_s)
        assert received.end == ("stop", "stop_string")
        (choice,) = (await record(server, id))["choices"]
        assert choice["output_tokens"] == len(received.tokens) <= choice["engine_tokens"] <= 1000
        return choice["engine_tokens"] - choice["output_tokens"]

    async def main() -> None:
        async with streaming(server.url, [asking(1000, prompt="a tale")]) as (whole,):
            pass
        stop = next(whole.text[i : i + 2] for i in range(400, 900) if whole.text.index(whole.text[i : i + 2]) == i)
        for i in range(8):  # longer each time, in case this machine is slow
            if await overshoot(stop, f"stop-{i}", 0.5 * 1.5**i):
                return
        raise AssertionError("no engine was ahead of us even once")

    asyncio.run(main())


def test_53_each_choice_has_its_own_engine_tokens(server: LiveServer):
    async def main() -> None:
        body = asking(30, n=3, seed=3, temperature=1, request_id="three")
        async with streaming(server.url, [body]):
            pass
        assert [c["engine_tokens"] for c in (await record(server, "three"))["choices"]] == [30, 30, 30]

    asyncio.run(main())


def test_69_a_deadline_holds_while_engines_are_stopped_and_their_late_output_counts_once(server: LiveServer):
    async def main() -> None:
        bodies = [asking(LONG, n=2, deadline_ms=2000, request_id=f"held-{i}") for i in range(4)]
        async with streaming(server.url, bodies) as received:
            await begun(received)
            whole = asyncio.create_task(post(server.url, COMPLETIONS, asking(LONG, deadline_ms=1000)))
            with server.stopped(0), server.stopped(1):
                async with asyncio.timeout(15):
                    told = await whole
                    await until(lambda: all(each.done for each in received))
        assert told.status == 200 and told.body["choices"][0]["finish_reason"] == "abort"
        assert told.body["choices"][0]["cause"] == "deadline"
        assert told.body["usage"]["completion_tokens"] == len(told.body["choices"][0]["completion_token_ids"])
        for i, each in enumerate(received):
            assert each.ends == [("abort", "deadline")] * 2 and each.usage is not None
            assert each.usage["completion_tokens"] == len(each.tokens)
            await until(lambda: not server.api.ledger.unsettled)
            choices = (await record(server, f"held-{i}"))["choices"]
            assert sum(choice["output_tokens"] for choice in choices) == len(each.tokens)

    asyncio.run(main())


def test_53_tokens_that_a_request_was_resumed_with_are_not_engine_tokens(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(20, prompt="go on")]) as (whole,):
            pass
        body = asking(20, prompt="go on", generated_token_ids=whole.tokens[:12], request_id="resumed")
        async with streaming(server.url, [body]) as (rest,):
            pass
        (choice,) = (await record(server, "resumed"))["choices"]
        assert rest.tokens == whole.tokens[12:]
        assert (choice["output_tokens"], choice["engine_tokens"]) == (20, 8)

    asyncio.run(main())


def test_53_tokens_after_a_disconnection_are_recorded_once_the_engine_reports_them(server: LiveServer):
    async def main() -> None:
        causes = set()
        for i in range(10):
            received = Received()
            client = asyncio.create_task(stream(server.url, asking(LONG, n=2, request_id=f"gone-{i}"), received))
            await begun([received])
            client.cancel()
            await asyncio.wait([client])
            await until(lambda: not server.api.ledger.live and not server.api.ledger.unsettled)
            usage = await record(server, f"gone-{i}")
            causes.add((usage["finish_reason"], usage["cause"]))
            for choice in usage["choices"]:
                assert choice["output_tokens"] <= choice["engine_tokens"] <= LONG
        assert causes - {("length", "max_tokens")} == {("abort", "client_disconnect")}  # or it had finished before

    asyncio.run(main())


def test_53_preempted_aborted_paused_and_overdue_requests_add_up_too(server: LiveServer):
    async def preempted(bodies: list[dict[str, Any]]) -> set[str]:
        """Return the ends of requests: one is preempted, one is aborted in a freeze, a pause ends the others."""
        before = sum(server.status(index).preemptions for index in range(2))
        async with streaming(server.url, bodies) as received:
            await until(lambda: sum(server.status(index).preemptions for index in range(2)) > before)
            await post(server.url, "/v1/pause", {"mode": "freeze"})
            held = (await get(server.url, "/v1/requests")).body["data"]
            await post(server.url, "/v1/abort_requests", {"req_ids": [held[0]["request_id"] if held else "nobody"]})
            await post(server.url, "/v1/pause", {"mode": "abort"})
            await post(server.url, "/v1/resume")
        for body, each in zip(bodies, received, strict=True):
            (choice,) = (await record(server, body["request_id"]))["choices"]
            assert choice["engine_tokens"] == choice["output_tokens"] == len(each.tokens)
        return {each.end[1] for each in received}

    async def main() -> None:
        seen: set[str] = set()
        for i in range(10):  # on a busy machine the engines may be done before the check
            bodies = [asking(1500, prompt=f"{i} {j}", request_id=f"long-{i}-{j}") for j in range(6)]
            seen |= await preempted([*bodies, asking(1500, prompt="late", deadline_ms=1, request_id=f"late-{i}")])
            if seen >= {"api_abort", "pause", "deadline"}:
                return
        raise AssertionError(f"only {seen} in ten attempts")

    asyncio.run(main())


def test_53_a_probe_is_accounted_like_any_request(server: LiveServer):
    async def main() -> None:
        before = server.api.ledger.metrics.tokens["engine"]
        assert (await get(server.url, "/health_generate")).status == 200
        await until(lambda: not server.api.ledger.live and not server.api.ledger.unsettled)
        assert server.api.ledger.metrics.tokens["engine"] == before + 1

    asyncio.run(main())


def test_records_of_ended_requests_are_freed_without_the_garbage_collector(server: LiveServer):
    def kept() -> int:
        return sum(type(found) is Record for found in gc.get_objects())

    async def main() -> None:
        assert (await post(server.url, COMPLETIONS, asking(3))).status == 200
        async with streaming(server.url, [asking(3)]):
            pass

    gc.collect()
    with collector_off():
        before = kept()
        asyncio.run(main())
        wait_until(lambda: kept() <= before, 20)
