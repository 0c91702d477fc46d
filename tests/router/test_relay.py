"""Requests through a router to faulty workers, over real sockets; guarantees 36 and 40 to 47."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from typing import Any

import pytest

from headgate.api.generate import wire
from headgate.api.generate.generation import Finish
from headgate.contract.abort import AbortRequest
from headgate.contract.errors import cut_short, error_body
from headgate.contract.journal import MOVABLE_CAUSES
from headgate.contract.keys import Caller
from headgate.errors import HeadgateError
from headgate.router.control.abort import abort
from headgate.router.control.fan_out import CallerHeaders
from headgate.router.exchange.ending import as_aborted
from headgate.router.fleet.fleet import FAILURES, FIRST_COOLDOWN_S
from headgate.router.router import Router
from tests.router.client import Wire, ask, check, routing, until
from tests.router.mock import CHAT, COMPLETIONS, FINE, Asked, Fault, Mock, text_of
from tests.router.run import run

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 20}
KINDS = [
    (path, body | {"stream": stream} | more)
    for path, body in ((CHAT, BODY), (COMPLETIONS, {"prompt": "héllo", "seed": 3, "max_tokens": 20}))
    for stream in (True, False)
    for more in ({}, {"n": 3})
]


def first(*faults: Fault) -> Any:
    """Return a script whose first requests have these faults, at any worker; all others succeed."""
    left = list(faults)
    return lambda _: left.pop(0) if left else FINE


@pytest.mark.parametrize(("path", "body"), KINDS)
@pytest.mark.parametrize("plain", [False, True])
def test_an_answer_passes_through_unchanged(path: str, body: dict[str, Any], plain: bool):
    async def main() -> None:
        async with Mock(plain=plain) as mock, routing(mock) as (_, url):
            assert check(body, await ask(url, path, body), path) is None
            assert mock.mistakes == []

    run(main())


BREAKS = [
    *(Fault("cut", at=at, part=part) for at in (0, 1, 3, 30) for part in (0.0, 0.5, 0.99)),
    Fault("cut_reset", at=2, part=0.3),
    Fault("after_head"),
    Fault("close"),
    Fault("reset"),
    Fault("bad_http"),
    Fault("bad_chunk", at=3),
    Fault("bad_sse", at=3),
    Fault("early_end", at=3),
    *(Fault("withheld", at=at, cause=cause) for at in (0, 4) for cause in ("pause", "shutdown", "pd_reschedule")),
    *(Fault("status", status=status) for status in (429, 500, 502, 503, 504)),
]


@pytest.mark.parametrize("fault", BREAKS, ids=lambda f: f"{f.kind}-{f.at}-{f.part}-{f.cause}-{f.status}")
def test_36_45_an_answer_that_fails_at_one_worker_resumes_at_another(fault: Fault):
    async def main() -> None:
        script = first()
        async with Mock(lambda a: script(a)) as one, Mock(lambda a: script(a)) as two, routing(one, two) as (_, url):
            for path, body in KINDS:
                script = first(fault)
                assert check(body, await ask(url, path, body), path) is None
            assert one.mistakes == two.mistakes == []
            assert len(one.asked) + len(two.asked) == 2 * len(KINDS)  # each failed once

    run(main())


# -------------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "fault", [Fault("mute"), Fault("stall", at=0), Fault("stall", at=4)], ids=lambda f: f"{f.kind}{f.at}"
)
def test_12_a_disconnect_of_the_client_reaches_its_worker_at_once(stream: bool, plain: bool, fault: Fault):
    async def main() -> None:
        # Only the client's disconnect ends this: no timeout comes before the test's own.
        never = {"idle_timeout_s": 600.0, "first_byte_timeout_s": 600.0, "silence_s": 600.0}
        async with Mock(lambda _: fault, plain=plain) as mock, routing(mock, **never) as (router, url):
            wire = await Wire.open(url)
            wire.post(CHAT, BODY | {"stream": stream})
            await until(lambda: mock.asked)
            await asyncio.sleep(0.02)  # everything from the worker has arrived
            wire.close()
            await until(lambda: mock.asked[0].left and not router.live)
            assert len(mock.asked) == 1  # no retry for a client that is gone

    run(main())


def test_a_client_that_leaves_while_its_request_waits_gives_its_place_to_the_next():
    async def main() -> None:
        async with Mock(first(Fault("stall"))) as mock, routing(mock, max_in_flight=1) as (router, url):
            one, two = await Wire.open(url), await Wire.open(url)
            one.post(CHAT, BODY)
            await until(lambda: mock.asked)
            two.post(CHAT, BODY)
            await until(lambda: router.admission.waiting == 1)
            two.close()
            await until(lambda: router.admission.waiting == 0)
            three = asyncio.create_task(ask(url, CHAT, BODY))
            await until(lambda: router.admission.waiting == 1)
            one.close()
            assert check(BODY, await three) is None
            assert len(mock.asked) == 2

    run(main())


def test_a_disconnect_between_two_pipelined_requests_leaks_nothing():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            for pause in range(40):
                wire = await Wire.open(url)
                for _ in range(4):
                    wire.post(CHAT, BODY)
                for _ in range(pause):
                    await asyncio.sleep(0)
                wire.close()
            await until(lambda: not router.live and not len(router.connections))
            assert mock.asked and all(worker.in_flight == 0 for worker in router.fleet)

    run(main())


def test_a_client_that_does_not_read_exerts_backpressure_on_its_worker():
    """The answer has about 20 MB; what is in flight is bounded by the buffers of two sockets."""
    body = BODY | {"stream": True, "max_tokens": 200_000}

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            wire = await Wire.open(url, limit=1024)
            wire.post(CHAT, body)
            await until(lambda: any(exchange.full for exchange in router.live.values()))
            before = -1
            while mock.written - before > 50_000:  # until only probes are written
                before = mock.written
                await asyncio.sleep(0.3)
            assert mock.written < 16 * 2**20
            exchange = next(iter(router.live.values()))
            assert exchange.client._transport.get_write_buffer_size() < 2**20
            assert check(BODY, await ask(url, CHAT, BODY)) is None  # other requests are not affected
            wire.close()
            await until(lambda: not router.live and mock.asked[0].left)

    run(main())


def test_a_slow_client_gets_everything_and_its_workers_connection_is_reusable():
    """The client's buffer is full when the answer ends; the worker's connection must be reading again in the pool."""
    body = BODY | {"stream": True, "max_tokens": 30_000}

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            for size in (9_000, 8_000, 7_000):
                body["max_tokens"] = size
                wire = await Wire.open(url, limit=1024)
                wire.post(CHAT, body)
                await until(lambda: router.live)
                await until(lambda: not router.live or any(exchange.full for exchange in router.live.values()))
                assert check(body, await wire.response()) is None
                assert check(BODY, await ask(url, CHAT, BODY)) is None
                wire.close()

    run(main())


def test_a_whole_answer_that_fills_the_client_buffer_leaves_the_connection_reading():
    """A foreign worker's stream arrives in one piece with its end, and fills the client's buffer at once."""

    async def main() -> None:
        whole = b"".join(b"data: %d%b\n\n" % (i, b"x" * 1000) for i in range(200))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(whole)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    asked = await reader.readuntil(b"\r\n\r\n")
                    if asked.startswith(b"GET"):
                        models = b'{"data":[{"id":"mock"}]}'
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models))
                    else:
                        size = re.search(rb"content-length: (\d+)", asked)
                        await reader.readexactly(int(size[1]))
                        writer.write(head + whole)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        mock = Mock(plain=True)
        mock.port = server.sockets[0].getsockname()[1]
        async with routing(mock) as (_, url):
            for _ in range(30):
                wire = await Wire.open(url)
                wire.post(CHAT, BODY | {"stream": True})
                assert (await wire.response()).body == whole
                wire.close()
        server.close()

    run(main())


# ----------------------------------------------------------------------------------------------------- faulty workers


def test_43_a_stuck_worker_delays_an_answer_by_at_most_the_timeout():
    async def main() -> None:
        async with (
            Mock(lambda _: Fault("mute")) as stuck,
            Mock() as fine,
            routing(stuck, fine, idle_timeout_s=1.0, retries=20) as (_, url),
        ):
            began_s = asyncio.get_running_loop().time()
            bodies = [BODY | {"seed": seed, "stream": seed % 2 == 0} for seed in range(20)]
            answers = await asyncio.gather(*(ask(url, CHAT, body) for body in bodies))
            assert [check(*pair) for pair in zip(bodies, answers, strict=True)] == [None] * 20
            assert asyncio.get_running_loop().time() - began_s < 25, "less than 30 s"
            assert stuck.asked and not stuck.live

    run(main())


def test_43_a_silent_stream_resumes_elsewhere():
    async def main() -> None:
        script = first(Fault("stall", at=5))
        async with Mock(script) as one, Mock(script) as two, routing(one, two, idle_timeout_s=1.0) as (_, url):
            body = BODY | {"stream": True}
            assert check(body, await ask(url, CHAT, body)) is None
            assert one.mistakes == two.mistakes == []

    run(main())


def test_44_a_worker_that_reports_health_but_fails_goes_down_with_growing_cooldowns():
    async def main() -> None:
        async with (
            Mock(lambda _: Fault("cut", at=2)) as liar,
            Mock() as fine,
            routing(liar, fine, probe_interval_s=0.02) as (router, url),
        ):
            lying, now_s = router.fleet.find(liar.url), router.fleet.clock()
            router.fleet.clock = lambda: now_s  # the test decides when a cooldown ends
            for trips in (1, 2):
                for seed in range(30):
                    body = BODY | {"seed": seed, "stream": True}
                    assert check(body, await ask(url, CHAT, body)) is None
                assert (lying.state, lying.trips) == ("down", trips)
                assert len(liar.asked) <= 2 * FAILURES * trips, "a kept connection that broke is retried once"
                short_s = FIRST_COOLDOWN_S * 2 ** (trips - 1) * 0.7  # cooldowns are slightly random
                now_s += short_s
                before = liar.probes["/v1/loads"]
                await until(lambda before=before: liar.probes["/v1/loads"] > before + 5)
                assert lying.state == "down", "it answers probes and stays down nevertheless"
                now_s += short_s
                await until(lambda: lying.state == "ready")
            assert len(fine.asked) >= 60

    run(main())


def test_44_one_failure_does_not_mark_a_worker_down_and_several_successes_bring_it_back():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            worker = router.fleet.find(mock.url)
            mock.script = first(Fault("close"), Fault("close"))
            assert check(BODY, await ask(url, CHAT, BODY)) is None
            assert worker.state == "ready"
            mock.kill()
            await until(lambda: worker.state == "down")
            await mock.restart()
            await until(lambda: worker.state == "ready")
            assert check(BODY, await ask(url, CHAT, BODY)) is None

    run(main())


def test_a_slow_worker_delays_only_its_own_requests():
    async def main() -> None:
        async with (
            Mock(lambda _: Fault("slow")) as slow,
            Mock() as fine,
            routing(slow, fine) as (_, url),
        ):
            bodies = [BODY | {"seed": seed, "stream": True, "max_tokens": 60} for seed in range(20)]
            answers = await asyncio.gather(*(ask(url, CHAT, body) for body in bodies))
            assert [check(*pair) for pair in zip(bodies, answers, strict=True)] == [None] * 20
            assert len(slow.asked) + len(fine.asked) == 20  # no worker was asked twice

    run(main())


def test_a_worker_that_is_killed_and_comes_back_fails_no_client():
    async def main() -> None:
        async with Mock() as one, Mock() as two, routing(one, two) as (_, url):
            one.pace_s = two.pace_s = 0.02
            bodies = [BODY | {"seed": seed, "stream": seed % 3 > 0, "max_tokens": 80} for seed in range(40)]
            asking = [asyncio.create_task(ask(url, CHAT, body)) for body in bodies]
            for mock in (one, two, one):
                await until(lambda mock=mock: len(mock.live) > 3)
                mock.kill()
                await asyncio.sleep(0.05)
                await mock.restart()
                await asyncio.sleep(0.2)
            answers = await asyncio.gather(*asking)
            assert [check(*pair) for pair in zip(bodies, answers, strict=True)] == [None] * 40
            assert one.mistakes == two.mistakes == []

    run(main())


def test_a_foreign_worker_that_fails_before_its_first_byte_is_replaced_and_later_it_is_one_clear_error():
    async def main() -> None:
        script = first(Fault("close"), FINE, Fault("cut", at=3, part=0.5))
        body = BODY | {"stream": True}
        async with Mock(script, plain=True) as one, Mock(script, plain=True) as two, routing(one, two) as (_, url):
            assert check(body, await ask(url, CHAT, body)) is None
            answer = await ask(url, CHAT, body)
            assert check(body, answer) == "worker_lost"  # only complete events
            assert answer.body.count(b'"error"') == 1

    run(main())


def test_43_the_refusal_of_a_worker_is_passed_on_unchanged():
    async def main() -> None:
        async with Mock(lambda _: Fault("status", status=422)) as mock, routing(mock) as (router, url):
            answer = await ask(url, CHAT, BODY)
            assert (answer.status, answer.error["message"]) == (422, "scripted")
            assert router.fleet.find(mock.url).failures == 0 and len(mock.asked) == 1
            mock.script = lambda _: Fault("status", status=503)
            answer = await ask(url, CHAT, BODY)
            assert (answer.status, answer.header("retry-after")) == (503, "7")

    run(main())


@pytest.mark.parametrize("statuses", [(429, 503), (503, 429)])
def test_46_a_client_gets_the_refusal_of_the_full_worker_rather_than_that_of_the_paused_one(statuses: Any):
    async def main() -> None:
        script = first(*(Fault("status", status=status) for status in statuses))
        async with Mock(lambda a: script(a)) as one, Mock(lambda a: script(a)) as two, routing(one, two) as (_, url):
            assert (await ask(url, CHAT, BODY)).status == 429
            assert len(one.asked) == len(two.asked) == 1

    run(main())


def test_2_an_abort_when_all_tokens_have_been_sent_reports_already_finished():
    async def main() -> None:
        body = BODY | {"stream": True, "max_tokens": 1, "request_id": "finished"}
        async with Mock(lambda _: Fault("stall", at=1)) as mock, routing(mock) as (router, url):
            asked = asyncio.ensure_future(ask(url, CHAT, body))
            await until(lambda: ("", "finished", 0) in router.live and router.live["", "finished", 0].journal.choices)
            aborting = asyncio.ensure_future(
                abort(router, AbortRequest(req_ids=["finished"]), Caller("", True), CallerHeaders())
            )
            await until(lambda: router.live["", "finished", 0].ending)
            mock.kill()
            assert (await aborting).already_finished == ["finished"] and not (await aborting).aborted
            answer = await asked
            assert b'"length"' in answer.body and b"abort" not in answer.body
            assert answer.body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_5_an_abort_does_not_repeat_withheld_text_that_another_worker_has_sent():
    async def main() -> None:
        body = {"prompt": "hi", "max_tokens": 60, "stream": True, "request_id": "tale"}
        script = first(Fault("withheld_late", at=4, cause="shutdown"))
        async with (
            Mock(lambda a: script(a)) as one,
            Mock(lambda a: script(a)) as two,
            routing(one, two) as (router, url),
        ):
            one.pace_s = two.pace_s = 0.02
            asked = asyncio.ensure_future(ask(url, COMPLETIONS, body))
            await until(lambda: ("", "tale", 0) in router.live and router.live["", "tale", 0].moves)
            exchange = router.live["", "tale", 0]
            tokens = exchange.journal.tokens
            await until(lambda: exchange.journal.tokens > tokens + 4)
            exchange.end()
            answer = await asked
            events = [event[6:] for event in answer.body.decode().split("\n") if event.startswith("data: {")]
            told = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
            assert told and text_of(body).startswith(told)
            assert answer.body.count(b'"cause":"api_abort"') == 1 and answer.body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_7_an_aborted_request_whose_body_is_not_utf_8_ends_with_its_cause():
    async def main() -> None:
        body = b'{"request_id": "odd", "messages": [{"role": "user", "content": "\xff"}], "stream": true}'
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            asked = asyncio.ensure_future(ask(url, CHAT, body))
            await until(lambda: ("", "odd", 0) in router.live)
            told = await abort(router, AbortRequest(tags={"a": "b"}), Caller("", True), CallerHeaders())
            assert not told.aborted and not told.errors  # and it does not affect other aborts
            router.live["", "odd", 0].end()
            assert b'"cause":"api_abort"' in (await asked).body
            router.release()

    run(main())


def test_an_exception_while_the_end_is_written_reaches_the_client_as_an_error(monkeypatch: pytest.MonkeyPatch):
    def mistake(*_: object, **__: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("headgate.router.exchange.reports.final_answer", mistake)

    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            asked = asyncio.ensure_future(ask(url, CHAT, BODY | {"request_id": "one"}))
            await until(lambda: ("", "one", 0) in router.live)
            router.live["", "one", 0].end()
            assert (await asked).error["code"] == "internal_error"
            router.release()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_55_tokens_of_older_weights_never_reach_the_client_even_after_keep_alives(stream: bool):
    async def main() -> None:
        body = BODY | {"stream": stream}
        async with Mock(lambda _: Fault("alive")) as mock, routing(mock, retries=0) as (router, url):
            assert check(body, await ask(url, CHAT, body)) is None
            router.fleet.floor_version = mock.version + 1  # no probe has shown yet that this worker lacks it
            answer = await ask(url, CHAT, body)
            assert b"worker_lost" in answer.body and b":j " not in answer.body

    run(main())


def test_55_requests_carry_the_weight_version_of_the_fleet():
    """Regression: a worker that came back with older weights kept an answer for its key. Found by seed 3424496411."""

    async def main() -> None:
        async with Mock() as mock, Mock(plain=True) as foreign, routing(mock, foreign) as (router, url):
            for version in (0, 1, 2):
                router.fleet.floor_version = version
                mock.version = max(version, 1)
                for seed in range(4):
                    await ask(url, CHAT, BODY | {"seed": seed})
            told = {asked.header("x-headgate-least-version") for asked in mock.asked}
            assert told == {None, "1", "2"}
            assert {asked.header("x-headgate-least-version") for asked in foreign.asked} == {None}

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_27_a_request_from_before_an_update_may_get_its_first_token_after_it(stream: bool):
    async def main() -> None:
        body = BODY | {"stream": stream}

        def updated_meanwhile(_: object) -> Fault:
            router.fleet.floor_version = mock.version + 1
            return Fault("alive")

        async with Mock(updated_meanwhile) as mock, routing(mock, retries=0) as (router, url):
            assert check(body, await ask(url, CHAT, body)) is None
            assert router.fleet.find(mock.url).errors == 0

    run(main())


def test_an_answer_that_a_pause_ended_is_reported_as_by_the_worker_if_no_other_worker_is_there():
    async def main() -> None:
        def paused_meanwhile(_: object) -> Fault:
            mock.state = "paused"
            return Fault("withheld", at=3)

        async with Mock(paused_meanwhile) as mock, routing(mock) as (router, url):
            streamed = await ask(url, CHAT, BODY | {"stream": True})
            assert streamed.body.count(b'"finish_reason":"abort"') == 1
            assert streamed.body.endswith(b"data: [DONE]\n\n")
            assert b":m " not in streamed.body.replace(b":m x", b"")
            mock.state = "running"
            await until(lambda: router.fleet.find(mock.url).state == "ready")
            whole = await ask(url, CHAT, BODY)
            assert whole.json["choices"][0]["finish_reason"] == "abort"

    run(main())


def of_two_halves(router: Router, prefill: Mock, decode: Mock) -> None:
    """Give the two workers the roles prefill and decode; a prefill worker answers only if there is no other."""
    router.fleet.add(prefill.url, "prefill")
    router.fleet.add(decode.url, "decode")


@pytest.mark.parametrize("stream", [True, False])
def test_36_an_answer_returns_to_a_full_worker_after_others_have_lost_it(stream: bool):
    """Regression: a full worker was excluded until its state changed, but a queue empties without that."""

    async def main() -> None:
        script = first(Fault("status", status=429))
        async with Mock(lambda _: Fault("after_head")) as p, Mock(script) as d, routing(p, d) as (router, url):
            of_two_halves(router, p, d)
            body = BODY | {"stream": stream}
            assert check(body, await ask(url, CHAT, body)) is None
            assert (len(p.asked), len(d.asked)) == (1, 2)

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_36_an_answer_that_decode_workers_refuse_returns_to_the_prefill_worker_that_lost_it(stream: bool):
    """Regression: only decode workers were asked again, and the client was refused with `no_worker`."""

    async def main() -> None:
        script = first(Fault("after_head"))
        busy = Fault("status", status=503)
        async with Mock(script) as p, Mock(lambda _: busy) as d, routing(p, d) as (router, url):
            of_two_halves(router, p, d)
            body = BODY | {"stream": stream}
            assert check(body, await ask(url, CHAT, body)) is None
            assert (len(p.asked), len(d.asked)) == (2, 1)

    run(main())


@pytest.mark.parametrize("stays", [True, False])
def test_35_reschedules_are_limited_and_the_worker_without_room_is_asked_last(stays: bool):
    async def main() -> None:
        fault = Fault("withheld", at=2, cause="pd_reschedule")
        async with Mock(lambda _: fault) as one, Mock() as two:
            workers = (one,) if stays else (one, two)
            async with routing(*workers, policy="round_robin", preempt_retry_count=2) as (_, url):
                for seed in range(6):
                    body = BODY | {"stream": True, "seed": seed, "max_tokens": 30}
                    assert check(body, await ask(url, CHAT, body)) is None
                    if stays:
                        assert len(one.asked) == 2 * (seed + 1)  # the second time it is recomputed
                assert one.mistakes == two.mistakes == []

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_74_a_rescheduled_answer_waits_for_room_and_is_recomputed_by_the_only_worker(
    stream: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headgate.router.exchange.retry_state.RetryState.backoff_s", 0.02)

    async def main() -> None:
        script = first(Fault("withheld", at=2, cause="pd_reschedule"), *[Fault("status", status=429)] * 8)
        async with Mock(script) as mock, routing(mock) as (_, url):
            body = BODY | {"stream": stream, "max_tokens": 30}
            assert check(body, await ask(url, CHAT, body)) is None
            headers = [asked.header("x-headgate-on-preempt") for asked in mock.asked]
            assert headers == [None] + ["recompute"] * 9 and mock.mistakes == []

    run(main())


def test_5_a_worker_that_goes_down_after_the_last_event_does_not_add_an_error():
    """Regression: a stream that was complete but for its last, empty chunk ended with an error after `[DONE]`."""

    async def main() -> None:
        async with Mock(lambda _: Fault("unended")) as mock, routing(mock, idle_timeout_s=0.3) as (_, url):
            body = BODY | {"stream": True}
            assert check(body, await ask(url, CHAT, body)) is None

    run(main())


@pytest.mark.parametrize("cut", [Fault("cut", at=2), Fault("withheld", at=2)], ids=["lost", "withheld"])
def test_an_answer_that_has_begun_waits_for_a_place_at_a_full_worker(cut: Fault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.exchange.retry_state.RetryState.backoff_s", 0.02)

    async def main() -> None:
        full = [Fault("status", status=429)] * 8
        one, two = Mock(first(cut, *full)), Mock(first(*full))
        async with one, two, routing(one, two, policy="round_robin") as (_, url):
            body = BODY | {"stream": True}
            assert check(body, await ask(url, CHAT, body)) is None
            assert len(two.asked) >= 8

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_74_an_answer_without_room_at_any_worker_is_kept_by_the_last_one(stream: bool):
    async def main() -> None:
        fault = Fault("withheld", at=2, cause="pd_reschedule")
        one, two = Mock(lambda _: fault), Mock(lambda _: fault)
        async with one, two, routing(one, two, policy="round_robin") as (_, url):
            body = BODY | {"stream": stream, "max_tokens": 30}
            assert check(body, await ask(url, CHAT, body)) is None
            assert len(one.asked) + len(two.asked) == 3

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_73_a_strict_client_is_rescheduled_as_often_as_any_other(stream: bool):
    async def main() -> None:
        fault = Fault("withheld", at=2, cause="pd_reschedule")
        one, two = Mock(lambda _: fault), Mock(lambda _: fault)
        async with one, two, routing(one, two, policy="round_robin", preempt_retry_count=3) as (router, url):
            of_two_halves(router, one, two)
            counts = []
            for headers in ({}, {"X-OpenAI-Strict": "true"}):
                before = len(one.asked), len(two.asked)
                answer = await ask(url, CHAT, BODY | {"stream": stream, "max_tokens": 30}, headers)
                counts.append((len(one.asked) - before[0], len(two.asked) - before[1]))
                assert answer.status == 200 and answer.complete
            assert counts == [(0, 2), (0, 2)]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_73_an_end_by_the_router_has_a_standard_finish_reason_for_a_strict_client(stream: bool):
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (router, url):
            router.hold(queue=True)
            body = BODY | {"stream": stream, "deadline_ms": 50, "n": 2}
            answer = await ask(url, CHAT, body, {"X-OpenAI-Strict": "true"})
            assert answer.status == 200 and b"abort" not in answer.body
            assert answer.body.count(b'"finish_reason":"length","cause":"deadline"') == 2
            explained = answer.body.count(b'"error":{"message":"the answer was cut short after 0 tokens (deadline)"')
            assert explained == 2 + (2 if stream else 1)  # each choice, and its event or the whole answer
            router.release()

    run(main())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("cause", sorted(MOVABLE_CAUSES))
def test_73_an_end_that_was_requested_meanwhile_keeps_the_clients_finish_reasons(strict: bool, cause: str):
    def told(reason: str, cause: str, problem: str) -> bytes:
        return (
            b'data: {"choices":[{"finish_reason":"%b","cause":"%b"}]}\n\n' % (reason.encode(), cause.encode())
        ) + (b"data: %b\n\n" % problem.encode() if strict else b"")

    before = told("length" if strict else "pd_reschedule", cause, error_body(elsewhere(3)).decode())
    after = told("length" if strict else "abort", "api_abort", error_body(cut_short(3, "api_abort")).decode())
    assert as_aborted(before, "api_abort", strict=strict) == after


def test_57_an_end_that_was_requested_meanwhile_leaves_the_errors_of_choices_that_had_ended():
    def choice(cause: str) -> bytes:
        error = error_body(cut_short(3, cause)).removeprefix(b"{")
        return b'{"finish_reason":"length","cause":"%b",%b' % (cause.encode(), error)

    whole = b'{"choices":[%b,%b]}'
    rewritten = as_aborted(whole % (choice("deadline"), choice("pause")), "api_abort", strict=True)
    assert rewritten == whole % (choice("deadline"), choice("api_abort"))


def elsewhere(tokens: int) -> HeadgateError:
    error = wire.cut_short(Finish("pd_reschedule", "preempted", 5, 0, tokens))
    assert error is not None
    return error


@pytest.mark.parametrize("stream", [True, False])
def test_36_an_answer_that_one_worker_ended_and_another_lost_returns_to_the_one_that_lost_it(stream: bool):
    async def main() -> None:
        script = first(Fault("status", status=500), Fault("withheld", at=0))
        async with Mock(lambda a: script(a)) as one, Mock(lambda a: script(a)) as two, routing(one, two) as (_, url):
            body = BODY | {"stream": stream}
            assert check(body, await ask(url, CHAT, body)) is None
            assert sorted((len(one.asked), len(two.asked))) == [1, 2]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_36_an_answer_that_one_worker_lost_and_another_refused_returns_to_the_one_that_lost_it(stream: bool):
    """Regression: the client got the refusal, which came last, although the other worker was healthy."""

    async def main() -> None:
        script = first(Fault("cut", at=3), Fault("status", status=503))
        async with Mock(lambda a: script(a)) as one, Mock(lambda a: script(a)) as two, routing(one, two) as (_, url):
            body = BODY | {"stream": stream}
            assert check(body, await ask(url, CHAT, body)) is None
            assert sorted((len(one.asked), len(two.asked))) == [1, 2]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_18_an_answer_that_a_pause_ended_and_another_worker_refused_is_reported_as_paused(stream: bool):
    """Regression: the client got an error and lost the partial answer that the first worker had handed over."""

    async def main() -> None:
        script = first(Fault("withheld", at=3), Fault("status", status=503))

        def paused_meanwhile(asked: Asked) -> Fault:
            one.state = two.state = "paused"
            return script(asked)

        async with Mock(paused_meanwhile) as one, Mock(paused_meanwhile) as two, routing(one, two) as (_, url):
            answer = await ask(url, CHAT, BODY | {"stream": stream})
            assert answer.status == 200 and b'"error"' not in answer.body
            assert answer.body.count(b'"finish_reason":"abort"') == 1
            assert len(one.asked) == len(two.asked) == 1

    run(main())


def test_45_the_next_attempt_excludes_the_worker_that_failed():
    async def main() -> None:
        async with Mock(lambda _: Fault("close")) as bad, Mock() as good, routing(bad, good) as (_, url):
            for seed in range(10):
                body = BODY | {"seed": seed}
                before = len(bad.asked)
                assert check(body, await ask(url, CHAT, body)) is None
                # A kept connection may have been closed at that moment, and then that attempt is made twice.
                assert len(bad.asked) - before <= 2

    run(main())


def test_without_any_worker_the_client_gets_an_error_in_time():
    async def main() -> None:
        mock = await Mock().start()
        mock.kill()
        async with routing(mock, patience_s=0.5) as (_, url):
            answer = await ask(url, CHAT, BODY)
            assert (answer.status, answer.error["code"]) == (503, "no_worker")
            assert answer.header("retry-after") == "1"

    run(main())


# ------------------------------------------------------------------------------------------------------------- limits


def test_46_beyond_the_limit_requests_wait_and_beyond_the_queue_they_are_refused_at_once():
    async def main() -> None:
        async with (
            Mock(lambda _: Fault("stall")) as mock,
            routing(mock, max_in_flight=2, max_queue=3) as (router, url),
        ):
            wires = [await Wire.open(url) for _ in range(5)]
            for wire in wires:
                wire.post(CHAT, BODY)
            await until(lambda: (router.admission.in_flight, router.admission.waiting) == (2, 3))
            answer = await ask(url, CHAT, BODY)
            assert (answer.status, answer.error["code"], answer.header("retry-after")) == (429, "queue_full", "1")
            assert len(mock.asked) == 2
            for wire in wires:
                wire.close()

    run(main())


def test_47_the_id_of_a_live_request_is_refused_and_free_again_after_its_end():
    async def main() -> None:
        named = {"X-Request-Id": "one"}
        async with Mock(first(Fault("stall"))) as mock, routing(mock) as (_, url):
            wire = await Wire.open(url)
            wire.post(CHAT, BODY, named)
            await until(lambda: mock.asked)
            for again in (ask(url, CHAT, BODY, named), ask(url, CHAT, BODY | {"request_id": "one"})):
                answer = await again
                assert (answer.status, answer.error["code"]) == (409, "duplicate_request_id")
            wire.close()
            await until(lambda: mock.asked[0].left)
            assert check(BODY, await ask(url, CHAT, BODY, named)) is None

    run(main())


def test_41_prefill_load_is_released_at_the_first_token_and_the_request_at_its_end():
    async def main() -> None:
        body = BODY | {"stream": True, "messages": [{"role": "user", "content": "x" * 4000}]}
        script = first(Fault("mute"), Fault("stall", at=6))
        async with Mock(script) as mock, routing(mock) as (router, url):
            worker = router.fleet.find(mock.url)
            silent, speaking = await Wire.open(url), await Wire.open(url)
            silent.post(CHAT, body)
            await until(lambda: mock.asked)
            assert worker.in_flight == 1 and worker.pending_tokens > 900
            pending = worker.pending_tokens
            speaking.post(CHAT, body)
            await speaking.some(200)
            assert (worker.in_flight, worker.pending_tokens) == (2, pending)
            silent.close()
            speaking.close()
            await until(lambda: worker.in_flight == 0)
            assert worker.pending_tokens == 0

    run(main())


def test_41_a_lost_worker_keeps_its_counters_until_its_requests_have_ended():
    async def main() -> None:
        async with Mock(lambda _: Fault("stall", at=4)) as mock, routing(mock, patience_s=0.2) as (router, url):
            worker = router.fleet.find(mock.url)
            asking = asyncio.create_task(ask(url, CHAT, BODY | {"stream": True}))
            await until(lambda: worker.in_flight == 1)
            router.fleet.remove(worker)
            assert worker in router.fleet.with_leaving and worker.in_flight == 1
            mock.kill()
            assert check(BODY | {"stream": True}, await asking) is not None
            await until(lambda: worker not in router.fleet.with_leaving)
            assert worker.in_flight == 0

    run(main())


def test_40_an_empty_or_token_id_prompt_is_placed_by_load():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            for prompt in ("", [1, 2, 3], [[1], [2]], [], None):
                body = {"prompt": prompt, "max_tokens": 5}
                assert check(body, await ask(url, COMPLETIONS, body), COMPLETIONS) is None

    run(main())


# ------------------------------------------------------------------------------------------------------------ headers


def test_hop_by_hop_headers_are_not_forwarded_and_clients_cannot_set_internal_ones():
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            sent = {
                "Connection": "keep-alive, X-Secret-Hop",
                "Keep-Alive": "timeout=5",
                "TE": "trailers",
                "X-Secret-Hop": "1",
                "X-Headgate-Journal": "7",
                "X-Headgate-Anything": "1",
                "X-Mine": "kept",
                "Authorization": "Bearer client",
            }
            refused = await ask(url, CHAT, BODY, {"X-Headgate-Tenant": "somebody"})
            assert refused.status == 403 and mock.asked == []
            answer = await ask(url, CHAT, BODY | {"stream": True}, sent)
            got = {name.lower().decode(): value.decode() for name, value in mock.asked[0].headers}
            assert got["x-mine"] == "kept" and got["authorization"] == "Bearer client"
            assert not {
                "connection",
                "keep-alive",
                "te",
                "x-secret-hop",
                "x-headgate-anything",
            } & {*got}
            assert int(got["x-headgate-journal"]) > 1_000_000_000
            names = [name for name, _ in answer.headers]
            assert "keep-alive" not in names and "x-headgate-journal" not in names
            assert answer.header("x-headgate-worker") == mock.url
            assert answer.header("x-request-id") == mock.asked[0].id

    run(main())


def test_router_keys_are_not_forwarded_and_only_headgate_workers_get_the_tenant():
    async def main() -> None:
        keys = {"api_keys": {"ann": "ann-key"}, "admin_key": "root", "worker_key": "work"}
        async with Mock() as ours, Mock(plain=True) as theirs:
            for mock in (ours, theirs):
                async with routing(mock, **keys) as (_, url):
                    assert (await ask(url, CHAT, BODY)).status == 401
                    assert (await ask(url, CHAT, BODY, {"Authorization": "Bearer wrong"})).status == 401
                    for sent in (
                        {"Authorization": "Bearer ann-key"},
                        {"X-API-Key": "ann-key"},
                        {"Authorization": "Bearer root"},
                    ):
                        assert check(BODY, await ask(url, CHAT, BODY, sent)) is None
            for mock, tenants in ((ours, ["ann", "ann", "admin"]), (theirs, [None, None, None])):
                assert [asked.header("x-headgate-tenant") for asked in mock.asked] == tenants
                wanted = "Bearer work" if mock is ours else None
                assert {asked.header("authorization") for asked in mock.asked} == {wanted}
                assert {asked.header("x-api-key") for asked in mock.asked} == {None}

    run(main())


@pytest.mark.parametrize("id", ["a\r\nX-Evil: 1", "", "x" * 300, "naïve", "a\nb", "\x00"])
def test_an_id_that_is_not_a_valid_header_is_refused_before_any_worker_sees_it(id: str):
    async def main() -> None:
        async with Mock() as mock, routing(mock) as (_, url):
            answer = await ask(url, CHAT, BODY | {"request_id": id})
            if id:  # an empty id counts as none
                assert (answer.status, answer.error["param"]) == (400, "request_id")
                assert mock.asked == []
            assert answer.header("x-evil") is None

    run(main())


def test_51_a_stream_that_waits_for_a_worker_gets_keep_alives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headgate.router.router.KEEP_ALIVE_S", 0.05)

    async def main() -> None:
        mock = await Mock().start()
        mock.kill()
        async with routing(mock, patience_s=10) as (router, url):
            await until(lambda: all(worker.state in ("down", "starting") for worker in router.fleet))
            body = BODY | {"stream": True}
            asking = await Wire.open(url)
            asking.post(CHAT, body)
            assert b": keep-alive" in (await asking.some(10)).body
            await mock.restart()
            assert check(body, await asking.response()) is None
            asking.close()
        mock.kill()

    run(main())


def test_the_router_logs_no_errors(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        script = first(Fault("cut", at=3), Fault("bad_http"), Fault("reset"))
        async with Mock(script) as one, Mock(script) as two, routing(one, two) as (_, url):
            for seed in range(5):
                body = BODY | {"seed": seed, "stream": True}
                assert check(body, await ask(url, CHAT, body)) is None

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
