"""Lists, timelines and usage of requests, and one generation per key. Numbers cite docs/lifecycle.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.clients import Received, asking, begun, get, post, send, stream, streaming, until
from tests.api.live import LiveServer, live_server
from tests.api.test_abort import idle, model, running_and_idle, status  # noqa: F401

LONG = 15000


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[LiveServer]:  # noqa: F811
    with live_server(model, device="cpu", kv_blocks=2048, max_running=2) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    yield
    asyncio.run(running_and_idle(server))


async def abort_all(server: LiveServer) -> None:
    await post(server.url, "/v1/abort_requests", {"abort_all": True})


def test_requests_in_flight_are_listed_with_phase_age_tokens_and_worker(server: LiveServer):
    async def main() -> None:
        bodies = [asking(LONG, request_id=f"r{i}", tags={"run": "7"}) for i in range(3)]
        async with streaming(server.url, bodies) as received:
            await begun(received, 2)
            listed: dict[str, Any] = {}

            async def all_there() -> bool:
                listed.update((await get(server.url, "/v1/requests")).body)
                return sorted(each["phase"] for each in listed["data"]) == ["running", "running", "waiting"]

            await until(all_there)
            await abort_all(server)
        assert listed["object"] == "list"
        for each in listed["data"]:
            (choice,) = each["choices"]
            assert each["age_s"] > 0 and each["tags"] == {"run": "7"} and each["kind"] == "completion"
            assert (
                choice["worker"] == 0 and choice["prompt_tokens"] == 5 and choice["id"] == each["request_id"] + "-0"
            )
            assert (choice["output_tokens"] > 0) == (choice["blocks"] > 0) == (each["phase"] == "running")
        assert (await get(server.url, "/v1/requests")).body["data"] == []

    asyncio.run(main())


def test_53_one_request_has_a_timeline_and_a_usage_record_after_its_end(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="tale")]) as (received,):
            await begun([received])
            live = (await get(server.url, "/v1/requests/tale")).body
            assert live["status"] == "in_flight" and live["usage"] is None and live["request"]["phase"] == "running"
            assert [event["event"] for event in live["events"]] == ["accepted", "running", "first_token"]
            assert (await send(server.url, "DELETE", "/v1/requests/tale")).result["aborted"]
        past = (await get(server.url, "/v1/requests/tale")).body
        assert past["status"] == "finished" and past["request"] is None
        names = [event["event"] for event in past["events"]]
        assert names == ["accepted", "running", "first_token", "end_asked", "finished"]
        times = [event["at_s"] for event in past["events"]]
        assert times == sorted(times)
        (choice,) = past["usage"]["choices"]
        assert choice["output_tokens"] == len(received.tokens) and choice["prompt_tokens"] == 5
        assert (choice["finish_reason"], choice["cause"]) == ("abort", "api_abort")
        missing = await get(server.url, "/v1/requests/nobody")
        assert missing.status == 404 and missing.body["error"]["code"] == "request_not_found"
        assert (await send(server.url, "DELETE", "/v1/requests/nobody")).status == 404
        assert (await send(server.url, "DELETE", "/v1/requests/tale")).result["already_finished"] == ["tale"]

    asyncio.run(main())


def test_53_there_is_a_usage_record_even_if_the_client_has_disconnected(server: LiveServer):
    async def main() -> None:
        leaving = asyncio.create_task(stream(server.url, asking(LONG, request_id="left"), received := Received()))
        await begun([received])
        leaving.cancel()
        await until(lambda: server.api.ledger.past("left") is not None)
        usage = (await get(server.url, "/v1/requests/left")).body["usage"]
        assert usage["cause"] == "client_disconnect"
        assert usage["choices"][0]["output_tokens"] >= len(received.tokens) > 0
        assert usage["choices"][0]["prompt_tokens"] == 5

    asyncio.run(main())


def test_48_a_reused_id_never_reaches_the_earlier_request(server: LiveServer):
    async def main() -> None:
        async with streaming(server.url, [asking(LONG, request_id="same")]) as (first,):
            await begun([first])
            twin = await post(server.url, "/v1/completions", asking(request_id="same"))
            assert twin.status == 409 and twin.body["error"]["code"] == "duplicate_request_id"
            await send(server.url, "DELETE", "/v1/requests/same")
        async with streaming(server.url, [asking(LONG, request_id="same")]) as (second,):
            await begun([second])
            assert (await get(server.url, "/v1/requests/same")).body["status"] == "in_flight"
            assert not second.ends
            await send(server.url, "DELETE", "/v1/requests/same")
        assert first.end == second.end == ("abort", "api_abort")
        assert second.tokens[: len(first.tokens)] == first.tokens[: len(second.tokens)]

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------------- idempotency


def with_key(server: LiveServer, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers={"Idempotency-Key": key}, timeout=100)


PATH = "/v1/completions"


def generated(server: LiveServer) -> int:
    return sum(server.api.ledger.metrics.requests.values())


@pytest.mark.parametrize("whole", [True, False])
def test_49_a_retry_attaches_to_the_running_request_or_replays_its_result(server: LiveServer, whole: bool):
    async def main() -> None:
        before = generated(server)
        body = asking(500, temperature=1, stream=not whole)
        async with with_key(server, f"k-{whole}") as client:
            first, second = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(2)))
            third = await client.post(PATH, json=body)
        assert first.status_code == 200 and first.content == second.content == third.content
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == third.headers["x-request-id"]
        assert ["idempotent-replayed" in each.headers for each in (first, second, third)].count(False) == 1
        assert third.headers["idempotent-replayed"] == "true"
        assert generated(server) == before + 1

    asyncio.run(main())


def test_49_a_client_that_lost_its_connection_gets_the_complete_answer_by_a_retry(server: LiveServer):
    async def main() -> None:
        body = asking(900, temperature=1, stream=True)
        async with with_key(server, "lost") as client:
            async with client.stream("POST", PATH, json=body) as response:
                begun = await anext(response.aiter_bytes())
            again = await client.post(PATH, json=body)
        assert again.content.startswith(begun) and again.content.endswith(b"data: [DONE]\n\n")
        lines = [line for line in again.text.splitlines() if line.startswith("data: {")]
        tokens = [t for line in lines for c in json.loads(line[6:])["choices"] for t in c["completion_token_ids"]]
        assert len(tokens) == 900

    asyncio.run(main())


def test_49_an_answer_that_is_too_long_to_be_kept_is_generated_once_and_not_replayed(server: LiveServer, monkeypatch):
    monkeypatch.setattr("headgate.api.generate.idempotency.LONGEST_ANSWER", 2000)

    async def main() -> None:
        before, body = generated(server), asking(900, stream=True)
        async with with_key(server, "long") as client:
            first = await client.post(PATH, json=body)
            again = await client.post(PATH, json=body)
        assert first.text.endswith("data: [DONE]\n\n") and len(first.content) > 2000
        assert again.status_code == 409 and again.json()["error"]["code"] == "answer_too_long"
        assert generated(server) == before + 1

    asyncio.run(main())


def test_49_a_key_belongs_to_one_request_and_a_refusal_is_not_kept(server: LiveServer):
    async def main() -> None:
        async with with_key(server, "mine") as client:
            refused = await client.post(PATH, json=asking(10**6))
            assert refused.status_code == 400
            assert (await client.post(PATH, json=asking(4))).status_code == 200
            reused = await client.post(PATH, json=asking(5))
            assert reused.status_code == 422 and reused.json()["error"]["code"] == "idempotency_key_reused"

    asyncio.run(main())


def test_58_deadlines_and_disconnections_take_effect_on_an_otherwise_idle_server(server: LiveServer):
    async def main() -> None:
        await post(server.url, "/v1/pause", {"mode": "freeze", "new_requests": "queue"})
        cut = await post(server.url, PATH, asking(deadline_ms=100))
        assert cut.body["choices"][0]["cause"] == "deadline"
        leaving = asyncio.create_task(post(server.url, PATH, asking(request_id="idle")))
        await until(lambda: bool(server.api.ledger.named("idle")))
        leaving.cancel()

        async def gone() -> bool:
            return (await status(server)).waiting == 0 and not server.api.ledger.live

        await until(gone)
        await post(server.url, "/v1/resume")

    asyncio.run(main())
