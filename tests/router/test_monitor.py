"""Probes: a worker's report counts if it can be decoded, and never stops the probes of other workers."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headgate.router.data_path.fast_path import PYTHON
from headgate.router.data_path.upstream import Upstream
from headgate.router.exchange.attempt import Attempt
from headgate.router.fleet.fleet import LoadShare
from headgate.router.fleet.worker import Worker
from headgate.router.router import Router
from tests.router.client import ask, check, routing, until
from tests.router.mock import CHAT, Mock
from tests.router.run import run

BODY = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 5}
NONSENSE = {
    "too deep": b"[" * 200_000,
    "infinite": b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_free_blocks": 0,'
    b' "num_total_blocks": 0, "max_running_requests": 0, "weight_version": 1e400, "state": "running"}]}',
    "empty": b"",
    "null": b"null",
    "another shape": b'{"loads": {"a": 1}}',
    "no engine": b'{"loads": []}',
    "not text": b"\xff\xfe",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_44_a_worker_with_malformed_answers_goes_down_and_returns_while_others_are_probed(name: str):
    async def main() -> None:
        async with Mock() as odd, Mock() as fine, routing(odd, fine, probe_interval_s=0.05) as (router, url):
            valid_loads, odd.loads = odd.loads, lambda: NONSENSE[name]  # type: ignore[method-assign]
            await until(lambda: router.fleet.find(odd.url).state == "down")
            before = fine.probes["/v1/loads"]
            await until(lambda: fine.probes["/v1/loads"] > before + 2)
            assert check(BODY, await ask(url, CHAT, BODY)) is None
            odd.loads = valid_loads  # type: ignore[method-assign]
            await until(lambda: router.fleet.find(odd.url).state == "ready")

    run(main())


@pytest.mark.parametrize("state", ["paused", "outdated"])
def test_a_worker_that_is_not_running_gets_no_requests_until_it_reports_running(state):
    async def main() -> None:
        async with Mock() as one, Mock() as two, routing(one, two) as (router, url):
            one.state = state
            await until(lambda: router.fleet.find(one.url).state == state)
            for seed in range(5):
                body = BODY | {"seed": seed}
                assert check(body, await ask(url, CHAT, body)) is None
            assert one.asked == []
            one.state = "running"
            await until(lambda: router.fleet.find(one.url).state == "ready")

    run(main())


def test_43_a_worker_that_answers_no_probe_and_sends_no_byte_goes_down_and_its_streams_resume():
    async def main() -> None:
        async with (
            Mock() as one,
            Mock() as two,
            routing(one, two, probe_timeout_s=0.3, silence_s=0.5) as (router, url),
        ):
            one.pace_s = two.pace_s = 0.05
            body = BODY | {"stream": True, "max_tokens": 60}
            asking = asyncio.create_task(ask(url, CHAT, body))
            await until(lambda: one.live or two.live)
            stopped = one if one.live else two
            stopped.deaf = True
            stopped.pace_s = 1000
            assert check(body, await asking) is None
            assert router.fleet.find(stopped.url).state == "down"
            assert stopped.mistakes == []

    run(main())


def test_probes_leave_no_connections_behind():
    async def main() -> None:
        async with Mock() as mock, routing(mock, probe_interval_s=0.02):
            await until(lambda: mock.probes["/v1/loads"] > 30)
            assert len(mock.connections) <= 2

    run(main())


def test_the_last_byte_of_a_worker_is_recorded_also_while_its_client_does_not_read():
    worker = object()
    exchange: Any = SimpleNamespace(full=True, request=None)
    taken = cast(LoadShare, SimpleNamespace(worker=worker, pending=0))
    exchange.attempt = attempt = Attempt(exchange, taken, PYTHON.read_whole, cast(Upstream, None), 0.0, None)
    router: Any = SimpleNamespace(live={"a": exchange}, loop=SimpleNamespace(time=lambda: 60.0))
    attempt.status, attempt.heard = 200, True
    Router._check_silence(router, exchange, 1.0)
    assert Router.last_byte_s(router, cast(Worker, worker)) == 1.0
    attempt.heard = True
    assert Router.last_byte_s(router, cast(Worker, worker)) == 60.0


def test_80_a_worker_that_never_sent_a_byte_has_been_silent_for_ever():
    router: Any = SimpleNamespace(live={}, loop=SimpleNamespace(time=lambda: 3.0))
    assert Router.last_byte_s(router, cast(Worker, object())) == -math.inf
