"""Aborts and pauses of requests that are on their way between router and worker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from headgate.client import Fleet
from headgate.contract.orders import Order
from tests.api.clients import COMPLETIONS, Received, asking
from tests.api.clients import stream as read
from tests.api.live import LiveServer
from tests.api.serving import wait_until
from tests.router.fleets import FakeWorker, LiveRouter, fake_worker, live_router

ABORT = "/v1/abort_requests"


def telling(fake: FakeWorker, *known: str) -> None:
    """Let the worker answer aborts as if it had only these requests."""
    plain = fake.answer

    def answer(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
        status, told = plain(method, path, body, order)
        if path == ABORT:
            names = body.get("req_ids", known)
            told["result"]["aborted"] = [{"request_id": n, "output_token_count": 3} for n in names if n in known]
            told["result"]["not_found"] = [name for name in names if name not in known]
        return status, told

    fake.answer = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("body", [{"abort_all": True}, {"tags": {"run": "7"}}], ids=["all", "tags"])
def test_21_an_abort_of_all_ends_a_request_that_has_not_reached_its_worker(body: dict[str, Any]):
    with fake_worker(slow=COMPLETIONS) as fake, live_router(fake.url) as router, ThreadPoolExecutor(1) as threads:
        telling(fake)
        request = {"prompt": "x", "request_id": "way", "tags": {"run": "7"}}
        asked = threads.submit(router.post, COMPLETIONS, request)
        wait_until(
            lambda: ("", "way", 0) in router.router.live and router.router.live["", "way", 0].worker is not None
        )
        told = router.post(ABORT, body | {"timeout": 60}).json()["result"]
        assert told["aborted"] == [{"request_id": "way", "output_token_count": 0}] and told["errors"] == []
        assert asked.result(60).json()["choices"][0]["finish_reason"] == "abort"
        assert [list(set(call) & {"abort_all", "tags", "req_ids"}) for call in fake.asked(ABORT)] == [
            list(body),
            ["req_ids"],
        ]
        assert router.router.fleet.find(fake.url).in_flight == 0


def test_a_worker_is_not_asked_again_about_requests_that_it_has_reported():
    with fake_worker(slow=COMPLETIONS) as fake, live_router(fake.url) as router, ThreadPoolExecutor(1) as threads:
        telling(fake, "there")
        asked = threads.submit(router.post, COMPLETIONS, {"prompt": "x", "request_id": "there"})
        wait_until(
            lambda: ("", "there", 0) in router.router.live and router.router.live["", "there", 0].worker is not None
        )
        told = router.post(ABORT, {"abort_all": True, "timeout": 0.2}).json()["result"]
        assert told["aborted"] == [] and [error["code"] for error in told["errors"]] == [
            "not_told"
        ]  # and it has not ended
        assert len(fake.asked(ABORT)) == 1
        telling(fake)  # the worker has lost the request, so the router ends it
        assert Fleet(router.url).abort("there").aborted == {"there": 0}
        asked.result(60)


@pytest.mark.parametrize("body", [{"abort_all": True}, {"tags": {"run": "7"}}, {"req_ids": ["way"]}])
def test_21_61_an_abort_reaches_a_removed_worker_although_another_worker_is_silent(body: dict[str, Any]):
    """Regression: it was asked only after the others had answered, and a stopped worker used up all the time."""
    with (
        fake_worker(slow=COMPLETIONS) as fake,
        fake_worker(slow=ABORT) as silent,
        live_router(fake.url) as router,
        ThreadPoolExecutor(1) as threads,
    ):
        telling(fake)
        request = {"prompt": "x", "request_id": "way", "tags": {"run": "7"}}
        asked = threads.submit(router.post, COMPLETIONS, request)
        wait_until(
            lambda: ("", "way", 0) in router.router.live and router.router.live["", "way", 0].worker is not None
        )
        router.post("/v1/workers", {"url": silent.url})
        wait_until(lambda: router.router.fleet.find(silent.url).state == "ready")
        router.delete(f"/v1/workers?url={fake.url}&timeout=0.01")
        told = router.post(ABORT, body | {"timeout": 0.5}).json()["result"]
        assert told["aborted"] == [{"request_id": "way", "output_token_count": 0}]
        assert fake.asked(ABORT)[0]["req_ids"] == ["way"]
        assert asked.result(60).json()["choices"][0]["cause"] == "api_abort"


def test_2_a_workers_report_counts_only_for_requests_that_it_was_asked_to_end():
    with fake_worker() as fake, live_router(fake.url) as router:
        plain = fake.answer

        def claiming(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
            status, told = plain(method, path, body, order)
            if path == ABORT:
                told["result"]["aborted"] = [{"request_id": "other", "output_token_count": 3}]
                told["result"]["not_found"] = body["req_ids"]
            return status, told

        fake.answer = claiming  # type: ignore[method-assign]
        told = router.post(ABORT, {"req_ids": ["one"]}).json()["result"]
        assert (told["aborted"], told["not_found"]) == ([], ["one"])


def test_2_a_workers_report_does_not_count_for_a_request_at_another_worker():
    """An abort of all asks both workers. Regression: the count of the worker without the request was reported."""
    with (
        fake_worker() as holder,
        fake_worker() as claimant,
        live_router(holder.url) as router,
        ThreadPoolExecutor(1) as threads,
    ):
        asked_to_end = threading.Event()
        holder.late[COMPLETIONS] = lambda: asked_to_end.wait(60)
        plain, quiet = holder.answer, claimant.answer

        def finishing(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
            status, told = plain(method, path, body, order)
            if path == ABORT:
                asked_to_end.set()
                told["result"]["already_finished"] = ["one"]
            return status, told

        def claiming(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
            status, told = quiet(method, path, body, order)
            if path == ABORT:
                told["result"]["aborted"] = [{"request_id": "one", "output_token_count": 999}]
                told["result"]["errors"] = [{"request_id": "one", "code": "timeout", "message": "it is busy"}]
            return status, told

        holder.answer, claimant.answer = finishing, claiming  # type: ignore[method-assign]
        asked = threads.submit(router.post, COMPLETIONS, {"prompt": "x", "request_id": "one"})
        wait_until(
            lambda: ("", "one", 0) in router.router.live and router.router.live["", "one", 0].worker is not None
        )
        router.post("/v1/workers", {"url": claimant.url})
        wait_until(lambda: router.router.fleet.find(claimant.url).state == "ready")
        told = router.post(ABORT, {"abort_all": True, "timeout": 60}).json()["result"]
        assert len(claimant.asked(ABORT)) == 1 and asked.result(60).status_code == 200
        assert (told["aborted"], told["already_finished"], told["errors"]) == ([], ["one"], [])


REFUSED = 503, {"error": {"message": "paused", "code": "paused"}}


@dataclass
class Transit:
    """A router whose first worker is asked to end a request before that request arrives there. The second one is ready."""

    router: LiveRouter
    first: FakeWorker
    second: FakeWorker
    abort: Future[httpx.Response]
    answer: Future[httpx.Response]
    report: threading.Event  # lets the first worker report that it has ended the request
    refuse: threading.Event  # lets it refuse the request as paused, so that the router tries the second one


@contextmanager
def arriving_during_an_abort(body: dict[str, Any]) -> Iterator[Transit]:
    with (
        fake_worker() as first,
        fake_worker() as second,
        live_router(first.url) as router,
        ThreadPoolExecutor(2) as threads,
    ):
        report, refuse, called, plain = threading.Event(), threading.Event(), threading.Event(), first.answer

        def answer(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
            if path == ABORT:
                called.set()
                report.wait(60)
            elif path == COMPLETIONS:
                refuse.wait(60)
                return REFUSED
            return plain(method, path, body, order)

        first.answer = answer  # type: ignore[method-assign]
        telling(first, "one")
        abort = threads.submit(router.post, ABORT, body | {"timeout": 60})
        assert called.wait(60)
        answered = threads.submit(router.post, COMPLETIONS, {"prompt": "x", "request_id": "one"})
        wait_until(
            lambda: ("", "one", 0) in router.router.live and router.router.live["", "one", 0].worker is not None
        )
        router.post("/v1/workers", {"url": second.url})
        wait_until(lambda: router.router.fleet.find(second.url).state == "ready")
        yield Transit(router, first, second, abort, answered, report, refuse)


ABORTS = [{"abort_all": True}, {"req_ids": ["one"]}]


@pytest.mark.parametrize("body", ABORTS, ids=["all", "named"])
def test_2_a_request_that_its_worker_ended_before_the_router_knew_of_it_is_not_resumed(body: dict[str, Any]):
    """Regression: it was reported as aborted, and the second worker answered it, because the first was also paused."""
    with arriving_during_an_abort(body) as transit:
        transit.report.set()
        wait_until(lambda: transit.router.router.live["", "one", 0].ending)
        transit.refuse.set()
        assert transit.answer.result(60).json()["choices"][0]["cause"] == "api_abort"
        assert not transit.second.asked(COMPLETIONS)
        told = transit.abort.result(60).json()["result"]
        # The end reaches the client while the call waits for it, or shortly after.
        assert [each["request_id"] for each in told["aborted"] + told["errors"]] == ["one"]


@pytest.mark.parametrize("body", ABORTS, ids=["all", "named"])
@pytest.mark.parametrize("ended", [True, False], ids=["and has ended", "and continues"])
def test_2_a_report_on_a_request_that_has_moved_to_another_worker_is_discarded(body: dict[str, Any], ended: bool):
    with arriving_during_an_abort(body) as transit:
        finish = threading.Event()
        transit.second.late[COMPLETIONS] = lambda: ended or finish.wait(60)
        transit.refuse.set()
        wait_until(lambda: transit.router.router.counters.retries == 1)
        if ended:
            assert transit.answer.result(60).status_code == 200
        transit.report.set()
        told = transit.abort.result(60).json()["result"]
        named = [] if "abort_all" in body else ["one"]
        assert (told["aborted"], told["errors"], told["not_found"]) == ([], [], named)
        finish.set()
        assert transit.answer.result(60).status_code == 200 and len(transit.second.asked(COMPLETIONS)) == 1


def test_18_a_pause_that_aborts_gets_the_partial_answer_from_a_removed_worker():
    """A pause of the fleet does not reach the removed worker, but only that worker has the text."""
    partial = {"choices": [{"index": 0, "text": "a part", "finish_reason": "abort", "cause": "pause"}]}
    with (
        fake_worker() as leaving,
        fake_worker() as staying,
        live_router(leaving.url) as router,
        ThreadPoolExecutor(1) as threads,
    ):
        asked_to_end = threading.Event()
        leaving.late[COMPLETIONS] = lambda: asked_to_end.wait(60)
        plain = leaving.answer

        def answering(method: str, path: str, body: dict[str, Any], order: Order) -> tuple[int, Any]:
            status, told = plain(method, path, body, order)
            if path == ABORT:
                asked_to_end.set()
                told["result"]["aborted"] = [{"request_id": "one", "output_token_count": 3}]
            return status, partial if path == COMPLETIONS else told

        leaving.answer = answering  # type: ignore[method-assign]
        asked = threads.submit(router.post, COMPLETIONS, {"prompt": "x", "request_id": "one"})
        wait_until(
            lambda: ("", "one", 0) in router.router.live and router.router.live["", "one", 0].worker is not None
        )
        router.post("/v1/workers", {"url": staying.url})
        wait_until(lambda: router.router.fleet.find(staying.url).state == "ready")
        router.delete(f"/v1/workers?url={leaving.url}&timeout=0.01")
        told = router.post("/v1/pause", {"mode": "abort", "timeout": 20}).json()["result"]
        assert asked.result(60).json() == partial and told["aborted"] == 1
        assert [(call["req_ids"], call["cause"]) for call in leaving.asked(ABORT)] == [(["one"], "pause")]


def test_49_an_answer_with_a_key_resumes_at_the_server_that_still_computes_it(servers: list[LiveServer]):
    """Its connection broke, and there is no other server: the first attempt must end before the second starts."""
    body = asking(1200, request_id="keyed")
    with live_router(servers[0].url, retries=3) as router:

        async def main() -> Received:
            received = Received()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keyed(router.url, body, received))
                await asyncio.wait_for(received.begun.wait(), 60)
                await asyncio.to_thread(router.do, lambda: router.router.live["", "keyed", 0].attempt.fail("a test"))
            return received

        received = asyncio.run(asyncio.wait_for(main(), 100))
        assert received.error is None and received.done
        assert received.end == ("length", "max_tokens") and len(received.tokens) == 1200
        assert received.tokens == asyncio.run(read(servers[0].url, asking(1200), Received())).tokens
        assert router.router.counters.resumes >= 1
    assert Fleet(servers[0].url).requests() == []


async def keyed(url: str, body: dict[str, Any], received: Received) -> None:
    headers = {"Idempotency-Key": "one"}
    async with (
        httpx.AsyncClient(timeout=100, trust_env=False) as http,
        http.stream("POST", url + COMPLETIONS, json=body | {"stream": True}, headers=headers) as answer,
    ):
        received.status = answer.status_code
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                received.done = True
            elif line.startswith("data: "):
                received.add(json.loads(line.removeprefix("data: ")))
