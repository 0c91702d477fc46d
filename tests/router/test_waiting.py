"""Requests that wait in the router: for the end of a pause, a worker or admission; guarantees 19, 23, 29, 51, 58."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headgate.router.data_path.upstream import Pool
from headgate.router.exchange import relay
from headgate.router.router import Router
from tests.router.client import Wire, ask, check, routing, until
from tests.router.mock import CHAT, FINE, Fault, FaultKind, Mock, text_of
from tests.router.run import run

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 20}


@asynccontextmanager
async def full(**settings: Any) -> AsyncIterator[tuple[Router, str, Wire]]:
    """A router whose only place is taken."""
    async with Mock(lambda _: Fault("stall")) as mock, routing(mock, max_in_flight=1, **settings) as (router, url):
        wire = await Wire.open(url)
        wire.post(CHAT, BODY)
        await until(lambda: mock.asked)
        yield router, url, wire
        wire.close()


def assert_overdue(answer: Any, *, stream: bool) -> None:
    assert answer.status == 200 and answer.complete
    if stream:
        assert answer.body.count(b'"finish_reason":"abort","cause":"deadline"') == 1
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        (choice,) = answer.json["choices"]
        assert (choice["finish_reason"], choice["cause"], choice["message"]["content"]) == ("abort", "deadline", "")


@pytest.mark.parametrize("stream", [True, False])
def test_58_a_deadline_ends_a_request_that_waits_for_the_end_of_a_pause(stream: bool):
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            assert_overdue(await ask(url, CHAT, BODY | {"stream": stream, "deadline_ms": 50}), stream=stream)
            refused = await ask(url, "/v1/embeddings", {"input": "x", "deadline_ms": 50})
            assert (refused.status, refused.error["code"]) == (409, "deadline")
            router.release()
            assert mock.asked == []

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_58_a_deadline_ends_a_request_that_waits_for_a_worker_or_for_admission(stream: bool):
    async def main() -> None:
        body = BODY | {"stream": stream, "deadline_ms": 50}
        mock = await Mock().start()
        mock.kill()
        async with routing(mock) as (_, url):
            assert_overdue(await ask(url, CHAT, body), stream=stream)
        async with full() as (router, url, _):
            assert_overdue(await ask(url, CHAT, body), stream=stream)
            assert router.admission.waiting == 0

    run(main())


async def never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False])
def test_58_a_deadline_ends_a_request_that_waits_for_a_connection(stream: bool, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            with monkeypatch.context() as patched:
                patched.setattr(Pool, "connect", never)
                assert_overdue(await ask(url, CHAT, BODY | {"stream": stream, "deadline_ms": 50}), stream=stream)
            assert mock.asked == []

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_58_a_deadline_ends_a_request_that_waits_for_a_ticket(stream: bool, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        monkeypatch.setattr(relay, "request_ticket", never)
        async with Mock() as one, Mock() as other, routing(one, other, disaggregate_tokens=1) as (router, url):
            router.fleet.add(one.url, "prefill")
            router.fleet.add(other.url, "decode")
            assert_overdue(await ask(url, CHAT, BODY | {"stream": stream, "deadline_ms": 50}), stream=stream)
            assert one.asked == other.asked == []

    run(main())


def test_58_a_deadline_ends_a_request_that_lost_its_worker_with_its_partial_answer():
    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=6)) as mock, routing(mock) as (router, url):
            wire = await Wire.open(url)
            wire.post(CHAT, BODY | {"stream": True, "deadline_ms": 5000, "request_id": "one"})
            await until(lambda: ("", "one", 0) in router.live and router.live["", "one", 0].journal.tokens)
            mock.kill()
            answer = await wire.response()
            assert b'"content"' in answer.body
            assert_overdue(answer, stream=True)
            wire.close()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", ["mute", "stall"])
@pytest.mark.parametrize("plain", [True, False])
def test_69_a_deadline_holds_while_the_worker_is_silent(fault: FaultKind, stream: bool, plain: bool):
    async def main() -> None:
        async with Mock(lambda _: Fault(fault, at=6), plain=plain) as mock, routing(mock) as (_, url):
            async with asyncio.timeout(20):
                answer = await ask(url, CHAT, BODY | {"stream": stream, "deadline_ms": 300})
            assert_overdue(answer, stream=stream)
            await until(lambda: mock.asked[0].left)  # the worker sees its connection close

    run(main())


def test_69_tokens_sent_by_the_deadline_are_sent_once_and_counted():
    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=6)) as mock, routing(mock) as (_, url):
            options = {"stream": True, "deadline_ms": 300, "stream_options": {"include_usage": True}}
            answer = await ask(url, CHAT, BODY | options)
            assert_overdue(answer, stream=True)
            events = [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
            said = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
            assert said and text_of(BODY).startswith(said)
            tokens = sum(line.count(b",") + 1 for line in answer.body.split(b"\n") if line.startswith(b":j "))
            assert events[-1]["usage"]["completion_tokens"] == tokens > 0

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_69_another_worker_ends_an_answer_that_a_silent_one_began(stream: bool):
    """The other worker gets the journal and no time left; it adds the usage and the text that was not sent yet."""

    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=6)) as one, Mock() as other, routing(one, other) as (router, url):
            router.fleet.set_state(router.fleet.find(other.url), "paused")
            asking = asyncio.ensure_future(ask(url, CHAT, BODY | {"stream": stream, "deadline_ms": 300}))
            await until(lambda: one.asked)
            other.state = "running"
            router.fleet.set_state(router.fleet.find(other.url), "ready")
            answer = await asking
            assert answer.status == 200 and answer.complete and one.asked[0].left
            (asked,) = other.asked
            assert asked.body["deadline_ms"] <= 0.001 and asked.body["resume"]["choices"][0]["token_ids"]
            assert other.mistakes == []

    run(main())


def test_69_deadlines_that_a_busy_worker_enforces_late_do_not_mark_it_down():
    """Regression: three of them in a row marked the worker down, and its streams moved."""

    async def main() -> None:
        busy = Fault("stall", at=6)
        async with Mock(lambda _: busy) as one, Mock(lambda _: busy) as other, routing(one, other) as (router, url):
            wires = [await Wire.open(url) for _ in (one, other)]
            for wire in wires:
                wire.post(CHAT, BODY | {"stream": True})
            await until(lambda: one.asked and other.asked)
            hasty = [ask(url, CHAT, BODY | {"stream": True, "deadline_ms": 100}) for _ in range(8)]
            assert all(answer.complete for answer in await asyncio.gather(*hasty))
            assert all(worker.available and not worker.errors for worker in router.fleet)
            assert not one.asked[0].left and not other.asked[0].left
            for wire in wires:
                wire.close()

    run(main())


@pytest.mark.parametrize("due_ms", [-5, 0, 2e12])
def test_69_an_invalid_deadline_reaches_the_workers_unchanged(due_ms: float):
    """Regression: a deadline in the past was replaced by a valid one and reported as passed."""

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            await ask(url, CHAT, BODY | {"deadline_ms": due_ms})
            assert [asked.body["deadline_ms"] for asked in mock.asked] == [due_ms]

    run(main())


def test_69_a_request_that_ends_before_its_deadline_leaves_no_timer():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            assert check(BODY, await ask(url, CHAT, BODY | {"deadline_ms": 60_000})) is None
            assert router.live == {} and mock.asked[0].body["deadline_ms"] <= 60_000

    run(main())


def test_19_71_a_pause_that_refuses_new_requests_keeps_those_that_wait_for_admission():
    async def main() -> None:
        async with full() as (router, url, wire):
            before = asyncio.ensure_future(ask(url, CHAT, BODY | {"deadline_ms": 100_000}))
            await until(lambda: router.admission.waiting == 1)
            router.hold(queue=False)
            answer = await ask(url, CHAT, BODY)
            assert (answer.status, answer.error["code"]) == (503, "paused")
            assert router.admission.waiting == 1
            wire.close()
            await until(lambda: router.admission.waiting == 0 and router.admission.in_flight == 1)
            assert not before.done()
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
            router.release()

    run(main())


def test_19_new_requests_wait_in_a_pause_that_queues():
    async def main() -> None:
        async with full() as (router, url, wire):
            router.hold(queue=True)
            asked = asyncio.ensure_future(ask(url, CHAT, BODY))
            await until(lambda: router.admission.waiting == 1)
            wire.close()
            await until(lambda: router.admission.waiting == 0 and router.admission.in_flight == 1)
            assert not asked.done()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            router.release()

    run(main())


def test_51_a_stream_that_waits_for_admission_gets_keep_alives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.router.KEEP_ALIVE_S", 0.05)

    async def main() -> None:
        left = [Fault("stall")]
        async with Mock(lambda _: left.pop() if left else FINE) as mock, routing(mock, max_in_flight=1) as (_, url):
            one, two = await Wire.open(url), await Wire.open(url)
            one.post(CHAT, BODY)
            await until(lambda: mock.asked)
            two.post(CHAT, BODY | {"stream": True})
            assert (await two.some(30)).body.startswith(b": keep-alive\n\n: keep-alive\n\n")
            one.close()
            assert check(BODY | {"stream": True}, await two.response()) is None
            two.close()

    run(main())


@pytest.mark.parametrize("queue", [True, False])
def test_19_23_29_a_request_that_waits_for_a_worker_is_not_placed_while_the_fleet_is_paused(queue: bool):
    async def main() -> None:
        mock = await Mock().start()
        mock.kill()
        async with routing(mock) as (router, url):
            asked = asyncio.ensure_future(ask(url, CHAT, BODY))
            await until(lambda: router.live)
            router.hold(queue=queue)
            await mock.restart()
            await until(lambda: router.fleet.find(mock.url).state == "ready")
            await asyncio.sleep(0.05)
            assert mock.asked == [] and not asked.done()
            router.release()
            assert check(BODY, await asked) is None
        mock.kill()

    run(main())


def test_19_29_a_lost_request_waits_through_a_pause_that_began_before_its_retry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.exchange.retry_state.RetryState.backoff_s", 0.2)

    async def main() -> None:
        left = [Fault("close")]
        async with Mock(lambda _: left.pop() if left else FINE) as mock, routing(mock) as (router, url):
            asked = asyncio.ensure_future(ask(url, CHAT, BODY))
            await until(lambda: any(exchange.moves for exchange in router.live.values()))
            router.hold(queue=False)
            await asyncio.sleep(0.4)
            assert len(mock.asked) == 1 and not asked.done()
            router.release()
            assert check(BODY, await asked) is None

    run(main())
