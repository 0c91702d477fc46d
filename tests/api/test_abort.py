"""Aborts through HTTP, on a real engine. Numbers are guarantees of docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.contract.keys import Keys
from headgate.protocol.message import EngineStatus
from headgate.testing.tiny import tiny_model
from tests.api.clients import Missed, Received, asking, begun, get, post, send, streaming, unless_missed, until
from tests.api.live import LiveServer, live_server

LONG = 15000  # tokens: many seconds of work, so that a test can act meanwhile
ROOM = 4  # answers of one tenant that run at once; one more row is reserved for others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("abort") / "tiny", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    keys = Keys({"alice": "key-a", "bob": "key-b"}, "root")
    with live_server(model, device="cpu", keys=keys, kv_blocks=2048, max_running=ROOM + 1, limit=5000) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    """Check that every test leaves the server idle: without requests in flight, held blocks or pending aborts."""
    yield
    asyncio.run(running_and_idle(server, "root"))


async def running_and_idle(server: LiveServer, key: str | None = None) -> None:
    """Resume the server and wait until it is idle, even after a test that failed in the middle."""
    await post(server.url, "/v1/wakeup", None, key)
    await post(server.url, "/v1/resume", None, key)
    await idle(server)


async def status(server: LiveServer) -> EngineStatus:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_status(server), server.loop))


async def _status(server: LiveServer) -> EngineStatus:
    client = server.host.replicas[0].client
    assert client is not None
    return (await client.ping(60)).status


async def idle(server: LiveServer) -> None:
    async def quiet() -> bool:
        now = await status(server)
        return not (now.running or now.waiting or now.held_blocks or server.api.ledger.live)

    await until(quiet)


async def abort(server: LiveServer, **body: Any) -> Any:
    return await post(server.url, "/v1/abort_requests", body, key="root")


def ids(entries: list[dict[str, Any]]) -> set[str]:
    return {entry["request_id"] for entry in entries}


ROOT = {"key": "root"}


# --------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "req_ids"),
        ({"abort_all": False}, "req_ids"),
        ({"req_ids": []}, "req_ids"),
        ({"req_ids": [""]}, "req_ids[0]"),
        ({"req_ids": [None]}, "req_ids[0]"),
        ({"req_ids": "a"}, "req_ids"),
        ({"req_ids": None}, "req_ids"),
        ({"tags": {}}, "tags"),
        ({"abort_all": True, "req_ids": "a"}, "req_ids"),
        ({"abort_all": True, "tags": {"a": "b"}}, "req_ids"),
        ({"abort_all": "yes"}, "abort_all"),
        ({"abort_all": True, "timeout": 0}, "timeout"),
        ({"abort_all": True, "force": True}, "force"),
        ({"stop_all": True}, "stop_all"),
    ],
)
def test_1_an_abort_that_names_nothing_is_refused_and_aborts_nothing(server: LiveServer, body: Any, param: str):
    async def main() -> None:
        async with streaming(server.url, [asking(400)], **ROOT) as (received,):
            await begun([received])
            refused = await abort(server, **body)
            assert refused.status == 400 and refused.body["error"]["param"] == param
        assert received.end == ("length", "max_tokens")

    asyncio.run(main())


def test_2_an_abort_lists_aborted_finished_and_unknown_requests(server: LiveServer):
    async def main() -> None:
        await post(server.url, "/v1/completions", asking(request_id="done"), "root")
        async with streaming(server.url, [asking(LONG, request_id="live")], **ROOT) as (received,):
            await begun([received])
            told = await abort(server, req_ids=["live", "done", "nobody", "live-7", "live"])
            assert told.status == 200 and told.body["status"] == "success" and told.body["request_id"]
            (entry,) = told.result["aborted"]
            assert told.result["not_found"] == ["nobody", "live-7"]
            assert told.result["already_finished"] == ["done"] and told.result["errors"] == []
        assert entry == {"request_id": "live", "output_token_count": len(received.tokens)}
        assert received.end == ("abort", "api_abort") and 0 < len(received.tokens) < LONG

    asyncio.run(main())


def test_2_the_id_in_the_body_of_an_answer_also_identifies_its_request(server: LiveServer):
    async def main() -> None:
        whole = await post(server.url, "/v1/completions", asking(), "root")
        told = await abort(server, req_ids=[whole.body["id"], whole.body["id"] + "-0", whole.headers["x-request-id"]])
        assert len(told.result["already_finished"]) == 3

    asyncio.run(main())


def test_3_an_abort_is_answered_after_blocks_are_freed_and_the_client_has_the_end(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG) for _ in range(2 * ROOM)], **ROOT) as received:
            await begun(received, ROOM)
            await until(lambda: len(server.api.ledger.live) == 2 * ROOM)
            told = await abort(server, abort_all=True)
            after = await status(server)
            assert (after.running, after.waiting, after.held_blocks) == (0, 0, 0) and not server.api.ledger.live
            assert len(told.result["aborted"]) == 2 * ROOM
        counts = {entry["output_token_count"] for entry in told.result["aborted"]}
        assert counts == {len(each.tokens) for each in received}

    asyncio.run(main())


def test_3_59_an_abort_that_times_out_lists_what_is_still_held(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="held")], **ROOT) as (received,):
            await begun([received])
            with server.stopped():
                told = await abort(server, req_ids=["held"], timeout=0.1)
            assert told.status == 202 and told.body["status"] == "accepted"
            assert told.result["aborted"] == [] and ids(told.result["errors"]) == {"held"}
        assert received.end == ("abort", "api_abort")

    asyncio.run(main())


def test_59_an_abort_without_wait_is_answered_with_accepted(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="x")], **ROOT) as (received,):
            await begun([received])
            told = await abort(server, req_ids=["x", "y"], wait=False)
            assert told.status == 202 and told.body["status"] == "accepted"
            assert told.result["accepted"] == ["x"] and told.result["not_found"] == ["y"]
        assert received.end == ("abort", "api_abort")

    asyncio.run(main())


def test_4_the_request_id_aborts_every_choice_and_a_choice_id_only_that_one(server: LiveServer):
    async def main(longer: int) -> None:
        body = asking(1500 * longer, request_id="n", n=3, seed=5, temperature=1)
        async with streaming(server.url, [body], **ROOT) as (received,):
            await begun([received])
            told = await abort(server, req_ids=["n-1"])
            if told.result["already_finished"]:
                raise Missed
            assert ids(told.result["aborted"]) == {"n-1"}
            assert (await abort(server, req_ids=["n-1"])).result["already_finished"] == ["n-1"]
        assert sorted(received.ends) == [("abort", "api_abort"), ("length", "max_tokens"), ("length", "max_tokens")]
        async with streaming(server.url, [asking(LONG, request_id="n", n=3)], **ROOT) as (received,):
            await begun([received])
            told = await abort(server, req_ids=["n"])
        assert received.ends == [("abort", "api_abort")] * 3
        assert told.result["aborted"] == [{"request_id": "n", "output_token_count": len(received.tokens)}]

    unless_missed(main)


# ------------------------------------------------------------------------------------------------------- what clients get


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_5_the_client_of_an_aborted_stream_gets_every_token_once(server: LiveServer, path: str):
    async def main() -> None:
        body = asking(LONG, seed=3)
        if path.startswith("/v1/chat"):
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        async with streaming(server.url, [body | {"request_id": "cut"}], path=path, **ROOT) as (received,):
            await begun([received])
            told = await abort(server, req_ids=["cut"])
        count = len(received.tokens)
        whole = (await post(server.url, path, body | {"max_tokens": count}, "root")).body
        (choice,) = whole["choices"]
        assert received.status == 200 and received.end == ("abort", "api_abort")
        assert received.done and received.error is None
        assert received.tokens == choice["completion_token_ids"]
        assert received.text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert received.usage is not None and received.usage["completion_tokens"] == count
        assert received.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert told.result["aborted"] == [{"request_id": "cut", "output_token_count": count}]

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_5_the_client_of_an_aborted_complete_answer_gets_every_token_once(server: LiveServer, path: str):
    async def main() -> None:
        body = asking(LONG, seed=3, request_id="cut")
        if path.startswith("/v1/chat"):
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        waiting = asyncio.create_task(post(server.url, path, body, "root"))
        await until(lambda: bool((r := server.api.ledger.named("cut")) and r[0].outputs(0) > 10))
        await abort(server, req_ids=["cut"])
        cut = await waiting
        (choice,) = cut.body["choices"]
        assert cut.status == 200 and (choice["finish_reason"], choice["cause"]) == ("abort", "api_abort")
        count = len(choice["completion_token_ids"])
        assert 0 < count < LONG and cut.body["usage"]["completion_tokens"] == count
        whole = (await post(server.url, path, body | {"max_tokens": count}, "root")).body["choices"][0]
        assert whole["completion_token_ids"] == choice["completion_token_ids"]
        assert whole.get("text") == choice.get("text") and whole.get("message") == choice.get("message")

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------------- in every phase


def test_6_a_waiting_request_is_aborted_without_ever_running(server: LiveServer):
    async def main() -> None:
        bodies = [asking(LONG, request_id=f"r{i}") for i in range(ROOM)]
        async with streaming(server.url, bodies, **ROOT) as running:
            await begun(running)
            before = (await status(server)).prompt_tokens
            async with streaming(server.url, [asking(8, prompt="x" * 99, request_id="late")], **ROOT) as (late,):
                await phase(server, "late", "waiting")
                await abort(server, req_ids=["late"])
            assert late.end == ("abort", "api_abort") and late.tokens == [] and late.text == ""
            assert late.usage is not None and late.usage["prompt_tokens"] == 99
            assert (await status(server)).prompt_tokens == before
            assert not any(each.ends for each in running), "nobody else was ended"
            await abort(server, abort_all=True)
        assert {each.end for each in running} == {("abort", "api_abort")}

    asyncio.run(main())


async def phase(server: LiveServer, id: str, wanted: str, received: Received | None = None) -> None:
    async def there() -> bool:
        if received is not None and received.ends:
            raise Missed
        told = await get(server.url, f"/v1/requests/{id}", "root")
        return told.status == 200 and told.body["status"] == "in_flight" and told.body["request"]["phase"] == wanted

    await until(there)


def test_6_a_prefilling_request_is_aborted_at_the_next_step(server: LiveServer):
    async def main(longer: int) -> None:
        prompt = [i % 250 + longer for i in range(12000)]  # differs from the earlier prompt, which is cached
        async with streaming(server.url, [asking(8, prompt=prompt, request_id="long")], **ROOT) as (received,):
            await phase(server, "long", "running", received)
            told = await abort(server, req_ids=["long"])
            if received.tokens:
                raise Missed
            assert ids(told.result["aborted"]) == {"long"} and (await status(server)).held_blocks == 0
        assert received.end == ("abort", "api_abort") and received.tokens == []

    unless_missed(main)


def test_6_a_request_on_a_frozen_engine_is_aborted_at_once(server: LiveServer):
    async def main() -> None:
        async with streaming(
            server.url, [asking(LONG, request_id=f"f{i}") for i in range(ROOM + 1)], **ROOT
        ) as received:
            await begun(received, ROOM)
            await post(server.url, "/v1/pause", {"mode": "freeze"}, "root")
            told = await abort(server, abort_all=True)
            assert len(told.result["aborted"]) == ROOM + 1 and (await status(server)).held_blocks == 0
            await post(server.url, "/v1/resume", None, "root")
        assert {each.end for each in received} == {("abort", "api_abort")}

    asyncio.run(main())


@contextmanager
def busy_pool(server: LiveServer) -> Iterator[None]:
    """Keep the threads that tokenise and build grammars busy inside the context."""
    done = threading.Event()
    for _ in range(2):
        server.api.pool.submit(done.wait, 100)
    try:
        yield
    finally:
        done.set()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prompt": "x" * 5000}, id="tokenising"),
        pytest.param({"response_format": {"type": "json_object"}, "ignore_eos": False}, id="waiting-for-a-grammar"),
    ],
)
def test_6_a_request_that_no_engine_has_is_aborted_and_never_sent_to_one(server: LiveServer, fields: Any):
    async def main() -> None:
        before = (await status(server)).prompt_tokens
        with busy_pool(server):
            waiting = asyncio.create_task(
                post(server.url, "/v1/completions", asking(request_id="early") | fields, "root")
            )
            await phase(server, "early", "preparing")
            aborting = asyncio.create_task(abort(server, req_ids=["early"]))
            await until(
                lambda: any(e.event == "end_asked" for r in server.api.ledger.named("early") for e in r.events)
            )
            assert not aborting.done(), "its client has not been told"
        assert (await aborting).result["aborted"] == [{"request_id": "early", "output_token_count": 0}]
        cut = await waiting
        (choice,) = cut.body["choices"]
        assert cut.status == 200 and (choice["finish_reason"], choice["cause"]) == ("abort", "api_abort")
        assert choice["text"] == "" and cut.body["usage"]["completion_tokens"] == 0
        assert cut.body["usage"]["prompt_tokens"] > 0 and (await status(server)).prompt_tokens == before

    asyncio.run(main())


def test_6_a_request_that_waits_for_an_engine_is_aborted_without_one(model: Path):
    async def main(server: LiveServer) -> None:
        replica = server.host.replicas[0]
        await until(lambda: replica.client is not None)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        await until(lambda: replica.client is None)
        async with streaming(server.url, [asking(request_id="none")]) as (received,):
            await until(lambda: any(0 in r.streams for r in server.api.ledger.named("none")) or bool(received.ends))
            told = await post(server.url, "/v1/abort_requests", {"req_ids": ["none"]})
            if replica.client is not None:
                raise Missed  # an engine has restarted
            assert told.result["aborted"] == [{"request_id": "none", "output_token_count": 0}]
        assert received.end == ("abort", "api_abort")

    with live_server(model, device="cpu", kv_blocks=600) as server:
        unless_missed(lambda _: main(server))


def test_7_aborting_twice_while_finishing_or_after_a_disconnect_is_bounded_and_leaves_nothing(server: LiveServer):
    async def main() -> None:
        choose = random.Random(1)
        for round in range(40):
            id = f"race-{round}"
            body = asking(choose.randrange(1, 40), request_id=id)
            client = asyncio.create_task(post(server.url, "/v1/completions", body, "root"))
            await asyncio.sleep(choose.random() / 50)
            if choose.random() < 0.5:
                client.cancel()
            told = await asyncio.gather(*(abort(server, req_ids=[id], timeout=60) for _ in range(2)))
            assert [each.status for each in told] == [200, 200], told
            await asyncio.wait([client])
            if not client.cancelled():
                assert client.result().status == 200
        assert server.api.ledger.live == {}

    asyncio.run(main())


@pytest.mark.parametrize("body", [{}, {"rid": None}, {"rid": ""}])
def test_8_an_abort_without_an_id_is_logged_counted_and_ignored(server: LiveServer, body: Any, caplog: Any):
    async def main() -> None:
        before = server.api.ledger.metrics.aborts_ignored
        async with streaming(server.url, [asking(300)], **ROOT) as (received,):
            await begun([received])
            assert (await post(server.url, "/abort_request", body, "root")).status == 200
        assert received.end == ("length", "max_tokens")
        assert server.api.ledger.metrics.aborts_ignored == before + 1

    asyncio.run(main())
    assert any("without a rid" in record.message for record in caplog.records)


def test_9_new_requests_are_accepted_while_an_abort_waits(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="old")], **ROOT) as (old,):
            await begun([old])
            with server.stopped():
                aborting = asyncio.create_task(abort(server, abort_all=True, timeout=60))
                await until(
                    lambda: any(e.event == "end_asked" for r in server.api.ledger.named("old") for e in r.events)
                )
                fresh = asyncio.create_task(post(server.url, "/v1/completions", asking(request_id="new"), "root"))
                await until(lambda: bool(server.api.ledger.named("new")))
                assert not aborting.done()
            assert ids((await aborting).result["aborted"]) == {"old"}
            assert (await fresh).body["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ whose and which


def test_11_a_tenant_sees_and_aborts_only_its_own_requests(server: LiveServer):
    async def main() -> None:
        async with (
            streaming(
                server.url, [asking(LONG, request_id="a1"), asking(LONG, request_id="a2")], key="key-a"
            ) as alices,
            streaming(server.url, [asking(LONG, request_id="b1")], key="key-b") as (bobs,),
        ):
            await begun([*alices, bobs])
            listed = (await get(server.url, "/v1/requests", "key-a")).body["data"]
            assert {each["request_id"] for each in listed} == {"a1", "a2"}
            everyone = (await get(server.url, "/v1/requests", "root")).body["data"]
            assert {each["request_id"] for each in everyone} == {"a1", "a2", "b1"}
            assert (await get(server.url, "/v1/requests/b1", "key-a")).status == 404
            assert (await send(server.url, "DELETE", "/v1/requests/b1", None, "key-a")).status == 404
            stolen = await post(server.url, "/v1/abort_requests", {"req_ids": ["b1"]}, "key-a")
            assert stolen.result["not_found"] == ["b1"] and stolen.result["aborted"] == []
            mine = await post(server.url, "/v1/abort_requests", {"abort_all": True}, "key-a")
            assert ids(mine.result["aborted"]) == {"a1", "a2"}
            assert not bobs.ends
            assert ids((await abort(server, req_ids=["b1"])).result["aborted"]) == {"b1"}
        assert bobs.end == ("abort", "api_abort")
        assert (await get(server.url, "/v1/requests/b1", "key-a")).status == 404
        assert (await get(server.url, "/v1/requests/b1", "key-b")).status == 200

    asyncio.run(main())


def test_with_the_same_id_each_tenant_ends_its_own_request_and_the_admin_all(server: LiveServer):
    async def main() -> None:
        body, path = asking(LONG, request_id="same"), "/v1/abort_requests"
        async with (
            streaming(server.url, [body], key="key-a") as alices,
            streaming(server.url, [body], key="key-b") as bobs,
        ):
            await begun([*alices, *bobs])
            told = await post(server.url, path, {"req_ids": ["same"]}, "key-b")
            assert ids(told.result["aborted"]) == {"same"} and bobs[0].end == ("abort", "api_abort")
            assert not alices[0].ends
            async with streaming(server.url, [body], key="key-b") as again:
                await begun(again)
                told = await abort(server, req_ids=["same"])
                assert sorted(each["tenant"] for each in told.result["aborted"]) == ["alice", "bob"]
        counts = {each["tenant"]: each["output_token_count"] for each in told.result["aborted"]}
        assert counts == {"alice": len(alices[0].tokens), "bob": len(again[0].tokens)}
        assert alices[0].end == again[0].end == ("abort", "api_abort")
        for key, received in (("key-a", alices[0]), ("key-b", again[0])):
            usage = (await get(server.url, "/v1/requests/same", key)).body["usage"]
            assert usage["choices"][0]["output_tokens"] == len(received.tokens)

    asyncio.run(main())


def test_52_an_abort_by_tags_ends_exactly_the_requests_with_these_tags(server: LiveServer):
    async def main() -> None:
        def tagged(id: str, **tags: str) -> dict[str, Any]:
            return asking(LONG, request_id=id, tags=tags)

        bodies = [tagged("t1", run="7", step="1"), tagged("t2", run="7", step="2"), tagged("t3", run="8", step="1")]
        async with streaming(server.url, bodies, **ROOT) as received:
            await begun(received)
            told = await abort(server, tags={"run": "7", "step": "1"})
            assert ids(told.result["aborted"]) == {"t1"}
            told = await abort(server, tags={"run": "7"})
            assert ids(told.result["aborted"]) == {"t2"}
            assert (await abort(server, tags={"run": "9"})).result["aborted"] == []
            assert not received[2].ends
            assert ids((await abort(server, tags={"step": "1"})).result["aborted"]) == {"t3"}
        assert {each.end for each in received} == {("abort", "api_abort")}

    asyncio.run(main())


def test_16_metrics_and_answers_distinguish_causes(server: LiveServer):
    async def main() -> None:
        before = server.api.ledger.metrics.aborts.copy()
        bodies = [asking(LONG, request_id="api"), asking(LONG, deadline_ms=200), asking(LONG, request_id="gone")]
        async with streaming(server.url, bodies[:2], **ROOT) as (api, late):
            await begun([api, late])
            leaving = asyncio.create_task(post(server.url, "/v1/completions", bodies[2], "root"))
            await until(lambda: bool((r := server.api.ledger.named("gone")) and r[0].outputs(0)))
            await until(lambda: len(api.text) > 8)  # enough for what is asked last
            leaving.cancel()
            await abort(server, req_ids=["api"])
        async with streaming(server.url, [asking(LONG)], **ROOT) as (paused,):
            await begun([paused])
            await post(server.url, "/v1/pause", {}, "root")
            await post(server.url, "/v1/resume", None, "root")
        stopped = await post(server.url, "/v1/completions", asking(400, stop=[heard_text(api)]), "root")
        assert [each.end[1] for each in (api, late, paused)] == ["api_abort", "deadline", "pause"]
        assert stopped.body["choices"][0]["cause"] == "stop_string"
        await idle(server)
        grown = server.api.ledger.metrics.aborts - before
        assert grown == dict.fromkeys(["api_abort", "deadline", "client_disconnect", "pause"], 1)

    def heard_text(received: Any) -> str:
        return received.text[5:8]

    asyncio.run(main())
