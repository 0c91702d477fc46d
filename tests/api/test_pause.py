"""Pause and resume through HTTP, on real engines. Numbers are guarantees of docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.api.control import lifecycle as control
from headgate.testing.tiny import tiny_model
from tests.api.clients import (
    Missed,
    Received,
    Told,
    asking,
    begun,
    get,
    post,
    stream,
    streaming,
    unless_missed,
    until,
)
from tests.api.live import LiveServer, live_server
from tests.api.serving import metric_values
from tests.api.test_abort import idle, running_and_idle, status

LONG = 15000
ROOM = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("pause") / "tiny", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model, device="cpu", kv_blocks=4096, max_running=ROOM, limit=5000) as server:
        yield server


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[LiveServer]:
    """Two engines behind one API."""
    with live_server(model, device="cpu", kv_blocks=4096, max_running=ROOM, count=2) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    yield
    asyncio.run(running_and_idle(server))


async def pause(server: LiveServer, **body: Any) -> Told:
    return await post(server.url, "/v1/pause", body)


async def resume(server: LiveServer) -> Told:
    return await post(server.url, "/v1/resume")


async def is_paused(server: LiveServer) -> Any:
    return (await get(server.url, "/v1/is_paused")).result


async def arrived(server: LiveServer, count: int) -> None:
    """Wait until the engine has this many requests."""

    async def all_in() -> bool:
        now = await status(server)
        return now.running + now.waiting == count

    await until(all_in)


async def running(server: LiveServer) -> int:
    """Return the number of running sequences on all engines."""
    counts = [asyncio.to_thread(server.status, engine) for engine in range(len(server.host.replicas))]
    return sum(status.running for status in await asyncio.gather(*counts))


async def complete(server: LiveServer, **fields: Any) -> Told:
    return await post(server.url, "/v1/completions", asking(**fields))


def test_17_18_23_twenty_streams_with_room_for_eight_are_paused_at_once(server: LiveServer):
    """The scenario of FastDeploy #7753."""

    async def main() -> None:
        async with streaming(server.url, [asking(LONG, prompt=f"{i} go") for i in range(20)]) as received:
            await begun(received, ROOM)
            await arrived(server, 20)
            told = await pause(server)
            after = await status(server)
            assert told.status == 200 and told.result["is_paused"] and told.result["state"] == "paused"
            assert told.result["aborted"] == 20 and told.result["forced"] == [] and told.result["elapsed_s"] < 20
            assert (after.running, after.waiting, after.held_blocks) == (0, 0, 0)
            refused = await complete(server)
            assert refused.status == 503 and refused.body["error"]["code"] == "paused"
        assert {each.end for each in received} == {("abort", "pause")} and all(each.done for each in received)
        assert sum(bool(each.tokens) for each in received) == ROOM
        await resume(server)
        assert (await complete(server)).body["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


def test_17_24_aborts_and_pauses_fired_two_hundred_times_in_any_order_hang_nothing(server: LiveServer):
    async def main() -> None:
        choose = random.Random(4)
        answers: Counter[int] = Counter()

        async def fire(name: str, body: Any) -> None:
            await asyncio.sleep(choose.random() * 3)
            answers[(await post(server.url, name, body)).status] += 1

        verbs = [
            *[("/v1/abort_requests", {"abort_all": True, "timeout": 5})] * 60,
            *[
                ("/v1/pause", {"mode": mode, "timeout": 0.3})
                for mode in ("abort", "drain", "freeze")
                for _ in range(25)
            ],
            *[("/v1/resume", None)] * 65,
        ]
        assert len(verbs) == 200
        received: list[Received] = []

        async def load() -> None:
            while True:
                received.append(Received())
                await stream(server.url, asking(choose.randrange(1, 600)), received[-1])

        async with asyncio.timeout(100):
            loads = [asyncio.create_task(load()) for _ in range(12)]
            await asyncio.gather(*(fire(*verb) for verb in choose.sample(verbs, 200)))
            await resume(server)
            await until(lambda: len(received) > 12)
            for task in loads:
                task.cancel()
            await asyncio.wait(loads)
        assert set(answers) <= {200, 202} and sum(answers.values()) == 200
        assert {each.status for each in received} <= {0, 200, 503}, "0 is a client that was still connecting"
        assert all(each.error is None or each.error["code"] == "paused" for each in received)

    asyncio.run(main())


def test_18_a_drain_finishes_started_requests_and_keeps_the_rest_for_later(server: LiveServer):
    async def main(longer: int) -> None:
        async with streaming(server.url, [asking(700 * longer) for _ in range(ROOM + 3)]) as received:
            await begun(received, ROOM)
            told = await pause(server, mode="drain")
            waiting = (await status(server)).waiting
            await resume(server)
            if waiting != 3:
                raise Missed  # some had ended before, or had not arrived yet
            assert told.result["state"] == "paused"
            assert told.result["finished"] == ROOM and told.result["aborted"] == 0
        assert {each.end for each in received} == {("length", "max_tokens")}

    unless_missed(main)


@pytest.mark.parametrize("held_s", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_18_a_freeze_in_the_middle_of_thirty_two_seeded_streams_changes_nothing(server: LiveServer, held_s: float):
    async def main(longer: int) -> None:
        bodies = [asking(300 * longer, prompt=f"tale {i}", temperature=1, seed=i) for i in range(32)]
        async with streaming(server.url, bodies) as undisturbed:
            pass
        async with streaming(server.url, bodies) as received:
            await begun(received, ROOM)
            told = await pause(server, mode="freeze")
            assert told.result["state"] == "paused" and told.result["aborted"] == 0
            frozen, running = (await status(server)).output_tokens, (await status(server)).running
            await asyncio.sleep(held_s)  # the duration of the pause; not a wait for a condition
            still = (await status(server)).output_tokens
            await resume(server)
            if not running:
                raise Missed  # not in progress
            assert still == frozen
        assert [each.tokens for each in received] == [each.tokens for each in undisturbed]
        assert [each.text for each in received] == [each.text for each in undisturbed]

    unless_missed(main)


@pytest.mark.parametrize("mode", ["abort", "drain", "freeze"])
def test_19_a_paused_server_refuses_with_a_time_to_retry_or_queues_as_requested(server: LiveServer, mode: str):
    async def main() -> None:
        await pause(server, mode=mode)
        refused = await complete(server)
        assert refused.status == 503 and refused.body["error"]["code"] == "paused"
        assert int(refused.headers["retry-after"]) >= 1
        async with streaming(server.url, [asking()]) as (streamed,):
            pass
        assert streamed.status == 503 and streamed.tokens == []
        await pause(server, mode=mode, new_requests="queue")
        queued = asyncio.create_task(complete(server))
        await until(lambda: bool(server.api.ledger.live))
        assert not queued.done()
        await resume(server)
        assert (await queued).status == 200

    asyncio.run(main())


def test_20_a_drain_that_times_out_lists_the_requests_it_ended_and_is_paused(server: LiveServer):
    async def main() -> None:
        bodies = [asking(LONG, request_id="slow"), asking(LONG, request_id="twice", n=2)]
        async with streaming(server.url, bodies) as received:
            await begun(received)
            told = await pause(server, mode="drain", timeout=0.2)
            assert told.result["state"] == "paused"
            assert sorted(told.result["forced"]) == ["slow", "twice"]
            assert told.result["aborted"] == 2  # requests, not choices (guarantee 72)
        assert {end for each in received for end in each.ends} == {("abort", "pause")}

    asyncio.run(main())


def test_59_a_control_call_that_times_out_is_accepted_and_completed_later(server: LiveServer, monkeypatch):
    monkeypatch.setattr(control, "QUERY_TIMEOUT_S", 0.1)  # the answer includes the state of the engines

    async def main() -> None:
        await pause(server)
        with server.stopped():
            told = await post(server.url, "/v1/sleep", {"tags": ["kv_cache"], "timeout": 0.05})
        assert told.status == 202 and told.body["status"] == "accepted"
        assert "engine 0 has not answered in 0.05 s" in told.result["engines"][0]["error"]

        async def asleep() -> bool:
            return (await is_paused(server))["asleep"] == ["kv_cache"]

        await until(asleep)
        assert (await post(server.url, "/v1/wakeup")).status == 200

    asyncio.run(main())


def test_21_requests_that_arrive_while_a_pause_begins_are_paused_or_refused(server: LiveServer):
    async def main() -> None:
        received: list[Received] = []
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            while len(received) < 60 or not any(each.status == 503 for each in received):
                received.append(Received())
                tasks.create_task(stream(server.url, asking(LONG), received[-1]))
                if len(received) == 30:
                    await until(lambda: any(each.status == 200 for each in received))
                    pausing = tasks.create_task(pause(server))
                await asyncio.sleep(0.002)
            assert (await pausing).result["state"] == "paused"
            await idle(server)
        assert {each.status for each in received} == {200, 503}
        assert {each.end for each in received if each.status == 200} == {("abort", "pause")}

    asyncio.run(main())


def test_22_clients_receive_the_end_before_a_pause_is_answered(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id=f"w{i}") for i in range(12)]) as received:
            await begun(received, ROOM)
            await arrived(server, 12)
            await pause(server)
            assert server.api.ledger.live == {}
            assert all(server.api.ledger.past(f"w{i}") for i in range(12))

    asyncio.run(main())


def test_24_concurrent_repeated_pauses_and_resumes_have_the_effect_of_one(server: LiveServer):
    async def main() -> None:
        for mode in ("abort", "drain", "freeze"):
            told = await asyncio.gather(*(pause(server, mode=mode) for _ in range(4)))
            assert {each.result["state"] for each in told} == {"paused"}
            assert (await is_paused(server))["mode"] == mode
            told = await asyncio.gather(*(resume(server) for _ in range(4)))
            assert {each.result["state"] for each in told} == {"running"}
            assert (await is_paused(server))["mode"] is None

    asyncio.run(main())


def test_24_a_resume_cancels_a_pending_pause_whose_middle_state_is_visible(server: LiveServer):
    async def main(longer: int) -> None:
        async with streaming(server.url, [asking(2500 * min(longer, 5))]) as (received,):
            await begun([received])
            pausing = asyncio.create_task(pause(server, mode="drain"))

            async def in_between() -> bool:
                now = await is_paused(server)
                if now["state"] == "paused":
                    await resume(server)
                    raise Missed
                return now["state"] == "pausing" and not now["is_paused"] and now["mode"] == "drain"

            await until(in_between)
            await resume(server)
            told = await pausing
            if told.result["state"] == "paused":
                raise Missed  # the requests it waited for ended at the same moment
            assert told.result["state"] == "running"
        assert received.end == ("length", "max_tokens")

    unless_missed(main)


def test_28_a_pause_shows_in_metrics_health_stays_green_and_readiness_goes_red(server: LiveServer):
    async def look() -> dict[str, float]:
        return metric_values((await get(server.url, "/metrics")).body)

    async def main() -> None:
        before = await look()
        await pause(server, mode="freeze")
        paused = await look()
        assert paused['headgate:engine_state{engine="0",state="paused"}'] == 1
        assert paused['headgate:engine_state{engine="0",state="running"}'] == 0
        await until(lambda: says(server, "/health", 200, status="ok"))
        await until(lambda: says(server, "/ready", 503, ready=False, reason="paused"))
        await resume(server)
        after = await look()
        name = 'headgate:pauses_total{mode="freeze"}'
        assert after[name] == before.get(name, 0) + 1
        assert after["headgate:paused_seconds_total"] > before["headgate:paused_seconds_total"]
        assert (await look())["headgate:paused_seconds_total"] == after["headgate:paused_seconds_total"]
        await until(lambda: says(server, "/ready", 200))

    asyncio.run(main())


async def says(server: LiveServer, path: str, code: int, **fields: Any) -> bool:
    """Whether `path` gives this status and these fields. Callers poll, because an engine may answer late."""
    told = await get(server.url, path)
    return told.status == code and fields.items() <= told.body.items()


def test_50_51_a_long_pause_stays_healthy_and_a_held_stream_is_never_silent(model: Path):
    from headgate.api.state import ApiSettings

    async def main(server: LiveServer, longer: int) -> None:
        async with streaming(server.url, [asking(1000 * longer)]) as (received,):
            await begun([received])
            await pause(server, mode="freeze")
            if not await running(server):
                await resume(server)
                raise Missed
            before = received.comments
            await until(lambda: received.comments >= before + 5)
            await until(lambda: says(server, "/health", 200))
            await resume(server)
        assert received.end == ("length", "max_tokens")

    with live_server(model, settings=ApiSettings(keep_alive_s=0.05), device="cpu", kv_blocks=600) as server:
        unless_missed(lambda longer: main(server, longer))


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/resume", "/v1/update_weights", "/v1/sleep", "/v1/flush_cache"])
def test_59_unknown_fields_in_a_control_body_are_refused_by_name(server: LiveServer, path: str):
    async def main() -> None:
        told = await post(server.url, path, {"modus": "abort"})
        assert told.status == 400 and told.body["error"]["param"] == "modus"
        assert (await is_paused(server))["state"] == "running"

    asyncio.run(main())


def test_59_every_control_answer_has_an_id_a_status_and_a_result(server: LiveServer):
    async def main() -> None:
        calls = [
            await pause(server),
            await get(server.url, "/v1/is_paused"),
            await post(server.url, "/v1/flush_cache"),
        ]
        for told in (*calls, await resume(server)):
            assert set(told.body) == {"request_id", "status", "result"} and told.body["status"] == "success"
            assert told.body["request_id"] == told.headers["x-request-id"]

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- several engines


def test_24_all_engines_are_paused_and_each_outcome_is_reported(pair: LiveServer):
    async def main() -> None:
        async with streaming(pair.url, [asking(LONG) for _ in range(12)]) as received:
            await begun(received)
            told = await pause(pair)
            assert [engine["state"] for engine in told.result["engines"]] == ["paused", "paused"]
            assert told.result["aborted"] == 12
        assert {each.end for each in received} == {("abort", "pause")}
        assert [e["state"] for e in (await resume(pair)).result["engines"]] == ["running", "running"]

    asyncio.run(main())


def test_24_an_engine_that_restarts_during_a_pause_is_paused(pair: LiveServer):
    async def main() -> None:
        replica = pair.host.replicas[1]
        await pause(pair, mode="freeze")
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        await until(lambda: replica.client is None)
        told = await pause(pair, mode="freeze")
        if replica.client is not None:
            raise Missed  # it has restarted already
        assert told.status == 202 and [e["state"] for e in told.result["engines"]] == ["paused", "down"]
        await until(lambda: replica.client is not None)
        assert (await is_paused(pair))["state"] == "paused"
        assert (await complete(pair)).status == 503
        await resume(pair)
        assert (await complete(pair)).status == 200

    unless_missed(lambda _: main())
