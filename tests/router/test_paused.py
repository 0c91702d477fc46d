"""A pause of the fleet and requests that no worker has yet, in every state in which the router may hold one.

Guarantee 71.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from headgate.contract.control import PauseRequest
from headgate.router.control.lifecycle import FleetControls
from headgate.router.control.weights import WeightUpdates
from headgate.router.data_path.upstream import Pool
from headgate.router.fleet.catch_up import CatchUp
from headgate.router.router import Router
from tests.router.client import Response, Wire, ask, check, routing, until
from tests.router.mock import CHAT, COMPLETIONS, FINE, Fault, Mock
from tests.router.run import run

CHATTING = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 20}
COMPLETING = {"model": "mock", "prompt": "hello to all of you", "seed": 1, "max_tokens": 20}
KINDS = [
    (path, body | {"stream": stream})
    for path, body in ((CHAT, CHATTING), (COMPLETIONS, COMPLETING))
    for stream in (True, False)
]
STATES = ["queued", "prefilling", "connecting", "late", "backing off"]
SOON = 0.05  # time in which something must not happen


async def control(url: str, path: str, body: Any = None) -> Response:
    return await ask(url, path, body or {}, {"Host": url.removeprefix("http://")})


class Scene:
    """A router, and one request in it that no worker has."""

    def __init__(self, router: Router, url: str, mock: Mock) -> None:
        self.router, self.url, self.mock = router, url, mock
        self.others = 0  # number of requests that a worker has
        self.first: Wire | None = None  # the client of that one

    async def control(self, path: str, body: Any = None) -> Any:
        answer = await control(self.url, path, body)
        assert answer.status == 200, answer.body
        return answer.json["result"]

    async def pause(self, mode: str, new_requests: str) -> Any:
        return await self.control("/v1/pause", {"mode": mode, "new_requests": new_requests, "timeout": 20})

    async def resume(self) -> None:
        await self.control("/v1/resume")


def times(fault: Fault, count: int) -> Any:
    """Return a script whose first `count` requests have this fault."""
    left = [fault] * count
    return lambda _: left.pop() if left else FINE


def no_ticket_at_first() -> Any:
    left = [Fault("mute")]
    return lambda asked: left.pop() if "export_kv" in asked.body and left else FINE


@asynccontextmanager
async def scene(state: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    match state:
        case "queued":
            stalled = times(Fault("stall"), 1)
            async with Mock(stalled) as mock, routing(mock, max_in_flight=1) as (router, url):
                wire = await Wire.open(url)
                wire.post(CHAT, CHATTING)
                await until(lambda: mock.asked)
                setting = Scene(router, url, mock)
                setting.others, setting.first = 1, wire
                yield setting
                wire.close()
        case "prefilling":
            settings: Any = {"disaggregate_tokens": 1, "ticket_timeout_s": 60.0}
            async with Mock(no_ticket_at_first()) as p, Mock() as d, routing(p, d, **settings) as (router, url):
                router.fleet.add(p.url, "prefill")
                router.fleet.add(d.url, "decode")
                yield Scene(router, url, d)
        case "connecting":
            connect, wait = Pool.connect, asyncio.Event()

            async def slowly(pool: Pool) -> Any:
                await wait.wait()
                return await connect(pool)

            async with Mock() as mock, routing(mock) as (router, url):
                monkeypatch.setattr(Pool, "connect", slowly)
                setting = Scene(router, url, mock)
                control = setting.control

                async def after_connecting(path: str, body: Any = None) -> Any:
                    asyncio.get_running_loop().call_later(SOON, wait.set)  # control calls take a connection too
                    return await control(path, body)

                setting.control = after_connecting  # type: ignore[method-assign]
                yield setting
        case "late":
            async with Mock(times(Fault("late"), 1)) as mock, routing(mock, retries=0) as (router, url):
                yield Scene(router, url, mock)
        case _:
            monkeypatch.setattr("headgate.router.exchange.retry_state.RetryState.backoff_s", 0.3)
            async with Mock(times(Fault("close"), 1)) as mock, routing(mock) as (router, url):
                yield Scene(router, url, mock)


def found(router: Router) -> Any:
    return next((exchange for exchange in router.live.values() if exchange.id == "one"), None)


async def reached(setting: Scene, state: str) -> None:
    """Wait until the request is in this state."""

    def there() -> bool:
        exchange = found(setting.router)
        match state:
            case _ if exchange is None:
                return False
            case "queued":
                return setting.router.admission.waiting == 1
            case "prefilling":
                return exchange.prefill_request is not None and exchange.prefill_request.upstream is not None
            case "connecting":
                return exchange.worker is None
            case "late":
                return bool(setting.mock.asked)
        return exchange.moves == 1

    await until(there)


def assert_paused(answer: Response, path: str, *, stream: bool) -> None:
    """Check that the answer has status 200, no tokens, the cause of its end, and consistent usage."""
    assert answer.status == 200 and answer.complete
    if stream:
        assert answer.body.count(b'"finish_reason":"abort","cause":"pause"') == 1, answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n") and b'"content"' not in answer.body
        return
    (choice,) = answer.json["choices"]
    assert (choice["finish_reason"], choice["cause"]) == ("abort", "pause")
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == ""
    assert answer.json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("path", "body"), KINDS)
@pytest.mark.parametrize("new_requests", ["reject", "queue"])
def test_71_a_pause_that_aborts_ends_requests_that_no_worker_has(
    state: str, path: str, body: dict[str, Any], new_requests: str, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        async with scene(state, monkeypatch) as setting:
            asked = asyncio.ensure_future(ask(setting.url, path, body | {"request_id": "one"}))
            await reached(setting, state)
            before = len(setting.mock.asked)
            result = await setting.pause("abort", new_requests)
            assert result["aborted"] == 1 + setting.others
            assert_paused(await asked, path, stream=body["stream"])
            await setting.resume()
            await asyncio.sleep(SOON)
            assert len(setting.mock.asked) == before

    run(main())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode", ["drain", "freeze"])
@pytest.mark.parametrize("new_requests", ["reject", "queue"])
@pytest.mark.parametrize("stream", [True, False])
def test_71_a_pause_that_drains_or_freezes_keeps_requests_that_no_worker_has(
    state: str, mode: str, new_requests: str, stream: bool, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        body = CHATTING | {"stream": stream}
        async with scene(state, monkeypatch) as setting:
            asked = asyncio.ensure_future(ask(setting.url, CHAT, body | {"request_id": "one"}))
            await reached(setting, state)
            result = await setting.pause(mode, new_requests)
            assert result["aborted"] == 0
            before = len(setting.mock.asked)
            newer = asyncio.ensure_future(ask(setting.url, CHAT, body))
            if new_requests == "reject":
                refused = await newer
                assert (refused.status, refused.error["code"]) == (503, "paused")
            await asyncio.sleep(SOON)
            assert not asked.done() and len(setting.mock.asked) == before
            if setting.first is not None:
                setting.first.close()
            await setting.resume()
            assert check(body, await asked) is None
            if new_requests == "queue":
                assert check(body, await newer) is None

    run(main())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", ["end", "deadline", "gone"])
def test_71_requests_kept_by_a_pause_can_be_aborted_and_left_and_keep_their_deadline(
    state: str, event: str, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        async with scene(state, monkeypatch) as setting:
            wire, router = await Wire.open(setting.url), setting.router
            due = {"deadline_ms": 600} if event == "deadline" else {}
            wire.post(CHAT, CHATTING | {"request_id": "one", "stream": True} | due)
            await reached(setting, state)
            await setting.pause("freeze", "reject")
            if event == "gone":
                wire.close()
            else:
                if event == "end":
                    found(router).end()
                answer = await wire.response()
                cause = "deadline" if event == "deadline" else "api_abort"
                assert answer.body.count(b'"finish_reason":"abort","cause":"%b"' % cause.encode()) == 1
                wire.close()
            await until(lambda: found(router) is None)
            await setting.resume()

    run(main())


def test_71_a_pause_that_every_worker_refuses_ends_nothing():
    async def main() -> None:
        async with Mock(times(Fault("stall"), 1)) as mock, routing(mock, max_in_flight=1) as (router, url):
            first = await Wire.open(url)
            first.post(CHAT, CHATTING)
            await until(lambda: mock.asked)
            second = asyncio.ensure_future(ask(url, CHAT, CHATTING))
            await until(lambda: router.admission.waiting == 1)
            mock.refuses = 409
            assert (await control(url, "/v1/pause")).status == 409
            assert not router.holding and not second.done()
            first.close()
            assert check(CHATTING, await second) is None

    run(main())


@pytest.mark.parametrize("withdrawn", ["the later", "the earlier"])
def test_24_71_a_withdrawn_pause_leaves_the_mode_of_the_other_one_in_effect(withdrawn: str):
    async def main() -> None:
        async with Mock(times(Fault("stall"), 1)) as mock, routing(mock) as (router, url):
            first = await Wire.open(url)
            first.post(CHAT, CHATTING)
            await until(lambda: mock.asked)
            (running,) = router.live.values()
            controls = FleetControls(router)
            other, refused = PauseRequest(mode="abort", new_requests="queue"), PauseRequest(mode="freeze")
            controls.hold(refused if withdrawn == "the earlier" else other)
            controls.hold(other if withdrawn == "the earlier" else refused)
            controls.withdraw(refused)
            assert (controls.current_pause, router.holding, router.queueing) == (other, True, True)
            assert running.held == "abort"
            controls.release()
            first.close()

    run(main())


def test_71_a_request_queued_by_a_pause_stays_queued_when_a_later_pause_is_withdrawn():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            controls, later = FleetControls(router), PauseRequest(mode="freeze")
            controls.hold(PauseRequest(mode="abort", new_requests="queue"))
            second = asyncio.ensure_future(ask(url, CHAT, CHATTING))
            await until(lambda: router.live)
            controls.hold(later)
            controls.withdraw(later)
            (queued,) = router.live.values()
            assert queued.held is None and not mock.asked
            controls.release()
            assert check(CHATTING, await second) is None

    run(main())


def test_71_a_resume_before_the_answer_of_a_pause_releases_waiting_requests(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with scene("queued", monkeypatch) as setting:
            asked = asyncio.ensure_future(ask(setting.url, CHAT, CHATTING | {"request_id": "one"}))
            await reached(setting, "queued")
            setting.router.hold(queue=False, mode="abort")
            setting.router.release()
            assert setting.first is not None
            setting.first.close()
            assert check(CHATTING, await asked) is None

    run(main())


def test_71_a_paused_answer_that_lost_its_worker_ends_with_its_partial_token_ids(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.exchange.retry_state.RetryState.backoff_s", 30.0)

    async def main() -> None:
        async with Mock(times(Fault("cut", at=4), 1)) as mock, routing(mock) as (router, url):
            asked = asyncio.ensure_future(ask(url, CHAT, CHATTING | {"request_id": "one"}))
            await until(lambda: found(router) is not None and found(router).moves == 1)
            result = (await control(url, "/v1/pause", {"mode": "abort"})).json["result"]
            assert result["aborted"] == 1
            answer = json.loads((await asked).body)
            (choice,), usage = answer["choices"], answer["usage"]
            assert (choice["finish_reason"], choice["cause"], choice["message"]["content"]) == ("abort", "pause", "")
            assert len(choice["completion_token_ids"]) == usage["completion_tokens"] > 0
            await control(url, "/v1/resume")

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_71_an_answer_in_the_queue_of_a_paused_worker_is_ended(stream: bool, monkeypatch: pytest.MonkeyPatch):
    """The first worker generated the tokens; the second worker, which is to continue, has the request queued."""
    monkeypatch.setattr("headgate.router.control.lifecycle.CLIENT_WAIT_S", SOON)

    async def main() -> None:
        faults = [Fault("late"), Fault("cut", at=4)]
        async with Mock(lambda _: faults.pop() if faults else FINE) as mock, routing(mock) as (_, url):
            asked = asyncio.ensure_future(ask(url, CHAT, CHATTING | {"request_id": "one", "stream": stream}))
            await until(lambda: len(mock.asked) == 2)
            result = (await control(url, "/v1/pause", {"mode": "abort", "new_requests": "queue"})).json["result"]
            assert result["aborted"] == 1
            answer = await asked
            assert answer.complete and answer.body.count(b'"finish_reason":"abort","cause":"pause"') == 1
            await control(url, "/v1/resume")

    run(main())


def test_38_71_a_prefill_request_overtaken_by_a_pause_is_dropped_and_counts_as_no_failure(
    monkeypatch: pytest.MonkeyPatch,
):
    async def main() -> None:
        async with scene("prefilling", monkeypatch) as setting:
            asked = asyncio.ensure_future(ask(setting.url, CHAT, CHATTING | {"request_id": "one"}))
            await reached(setting, "prefilling")
            await setting.pause("freeze", "reject")
            router = setting.router
            assert found(router).prefill_request is None and router.counters.prefills_lost == 0
            assert all(worker.failures == 0 for worker in router.fleet)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await setting.resume()

    run(main())


async def held_while_connecting(router: Router, url: str) -> asyncio.Task[Response]:
    """Return a request that was on its way to its worker when the fleet was paused, and is kept."""
    waiting, go_on, connect = asyncio.Event(), asyncio.Event(), Pool.connect

    async def slowly(pool: Pool) -> Any:
        waiting.set()
        await go_on.wait()
        return await connect(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "connect", slowly)
        asking = asyncio.create_task(ask(url, CHAT, CHATTING))
        await waiting.wait()
        router.hold(queue=False, mode="drain")
        go_on.set()
        await asyncio.sleep(SOON)
    return asking


async def queued_while_held(router: Router, url: str) -> asyncio.Task[Response]:
    """Return a request that arrived during a pause that queues new requests."""
    router.hold(queue=True, mode="drain")
    asking = asyncio.create_task(ask(url, CHAT, CHATTING))
    await until(lambda: bool(router.live))
    return asking


def test_71_a_request_kept_by_a_pause_waits_for_the_probe_that_shows_its_worker_resumed():
    """Regression: a probe from before the resume arrived after it, and the request was refused as paused."""

    async def main() -> None:
        async with Mock() as mock, routing(mock, probe_interval_s=60.0) as (router, url):
            worker = router.fleet.find(mock.url)
            asking = await held_while_connecting(router, url)
            mock.pause({})
            router.fleet.set_state(worker, "paused")
            router.release()
            await asyncio.sleep(SOON)
            assert not asking.done(), asking.result()
            mock.resume()
            router.fleet.set_state(worker, "ready")
            assert (await asking).status == 200

    run(main())


@pytest.mark.parametrize("kept", [held_while_connecting, queued_while_held])
def test_71_a_request_kept_by_a_pause_waits_for_a_worker_that_refuses_it_as_paused(kept: Any):
    """Regression: the fleet was resumed but its worker was not, or was paused again, and the request was refused."""

    async def main() -> None:
        async with Mock() as mock, routing(mock, probe_interval_s=60.0) as (router, url):
            asking = await kept(router, url)
            mock.pause({})
            router.release()
            await until(lambda: bool(mock.asked))
            await asyncio.sleep(SOON)
            assert not asking.done(), asking.result()
            mock.resume()
            router.fleet.set_state(router.fleet.find(mock.url), "ready")
            assert (await asking).status == 200

    run(main())


def test_29_a_request_is_refused_as_paused_only_if_fresh_probes_show_all_workers_paused():
    """Another caller does a rolling update: a probe of the first worker is older than its resume."""

    async def main() -> None:
        async with Mock() as first, Mock() as second, routing(first, second, probe_interval_s=60.0) as (router, url):
            router.fleet.set_state(router.fleet.find(first.url), "paused")
            second.pause({})
            assert (await ask(url, CHAT, CHATTING)).status == 200
            assert first.asked and router.fleet.find(second.url).state == "paused"
            first.pause({})
            refused = await ask(url, CHAT, CHATTING)
            assert (refused.status, refused.json["error"]["code"]) == (503, "paused")

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_29_36_an_answer_ended_by_another_callers_pause_resumes_at_a_worker_that_was_resumed(stream: bool):
    """Regression: the last probe of that worker was older than its resume, and the client got a partial answer."""

    async def main() -> None:
        def paused_meanwhile(_: object) -> Fault:
            first.state = "paused"
            return Fault("withheld", at=3)

        body = CHATTING | {"stream": stream}
        async with (
            Mock(paused_meanwhile) as first,
            Mock() as second,
            routing(first, second, probe_interval_s=60.0) as (router, url),
        ):
            router.fleet.set_state(router.fleet.find(second.url), "paused")
            assert check(body, await ask(url, CHAT, body)) is None
            assert len(first.asked) == len(second.asked) == 1 and second.mistakes == []

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_29_36_an_answer_cut_by_a_pause_too_brief_for_a_probe_returns_to_its_worker(stream: bool):
    """Regression: after both steps of a rolling update, the client got a partial answer, although both workers ran."""

    async def main() -> None:
        turns, body = [Fault("withheld", at=3)], CHATTING | {"stream": stream}
        async with (
            Mock(lambda _: turns.pop() if turns else FINE) as mock,
            routing(mock, probe_interval_s=60.0) as (_, url),
        ):
            assert check(body, await ask(url, CHAT, body)) is None
            assert len(mock.asked) == 2 and mock.mistakes == []

    run(main())


def test_29_a_rolling_update_may_cut_an_answer_more_often_than_a_fault():
    """Regression: every step took one of few retries, and the client of an answer without tokens was refused."""

    async def main() -> None:
        turns = [Fault("withheld") for _ in range(6)]
        async with Mock(lambda _: turns.pop() if turns else FINE) as mock, routing(mock) as (router, url):
            router.fleet.rolling = True
            assert check(CHATTING, await ask(url, CHAT, CHATTING)) is None
            assert len(mock.asked) == 7

    run(main())


def test_29_a_worker_that_refused_a_request_as_paused_is_asked_again_if_it_runs_by_now():
    """In another caller's rolling update, the turn of this worker ended before the other worker's began."""

    async def main() -> None:
        turns = [Fault("status", status=503, code="paused")]
        async with Mock(lambda _: turns.pop() if turns else FINE) as mock, routing(mock) as (_, url):
            assert (await ask(url, CHAT, CHATTING)).status == 200
            assert len(mock.asked) == 2

    run(main())


def test_71_no_worker_is_paused_while_the_fleet_is_being_resumed(monkeypatch: pytest.MonkeyPatch):
    """The resume began while another worker was asked for its state, and reached this one before the pause."""

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, _):
            controls = FleetControls(router)
            follower, resuming = CatchUp(router, controls, WeightUpdates(router, controls)), asyncio.Event()

            async def asks_another() -> None:
                verbs.enter_context(controls.in_progress())
                resuming.set()

            monkeypatch.setattr(follower, "_detect_other_resumes", asks_another)
            controls.hold(PauseRequest(mode="drain"))
            with ExitStack() as verbs:
                following = asyncio.create_task(follower.run())
                await resuming.wait()
                await asyncio.sleep(SOON)
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            controls.release()
            assert mock.state == "running"

    run(main())
