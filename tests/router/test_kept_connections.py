"""Connections to workers through a whole router: kept after each answer, never shared (guarantee 41)."""

from __future__ import annotations

import pytest

from headgate.router.data_path.upstream import Pool, Upstream, call
from tests.router.client import ask, check, routing
from tests.router.mock import CHAT, FINE, Fault, Mock
from tests.router.run import run

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 4}


def test_a_connection_is_used_again_after_each_whole_answer():
    async def main() -> None:
        # Enough time between two requests on a busy machine.
        async with Mock(keep_alive_s=60.0) as mock, routing(mock) as (_, url):
            for stream in (True, False, True, False):
                await ask(url, CHAT, BODY | {"stream": stream})
            probes = sum(mock.probes.values())  # each on its own connection
            assert mock.opened - probes <= 2, "one for the requests, and at most one for a probe in flight"

    run(main())


def test_41_the_connection_of_a_call_is_not_pooled():
    """The caller closes its connection. A request that had taken it from the pool would never get an answer."""
    given: list[Upstream] = []

    class Watched(Pool):
        def give(self, upstream: Upstream) -> None:
            given.append(upstream)
            super().give(upstream)

    async def main() -> None:
        async with Mock() as mock:
            pool = Watched(mock.url, 60.0)
            status, _, _ = await call(pool, "GET", "/v1/models", timeout_s=60.0)
            assert status == 200
            assert given == []
            pool.close()

    run(main())


def test_36_a_worker_marked_down_while_a_kept_connection_breaks_is_not_asked_without_a_journal(monkeypatch):
    """Regression: its answer could not be resumed elsewhere, because the worker's kind was no longer known."""
    connect = Pool.connect

    async def main() -> None:
        async with (
            Mock(keep_alive_s=60.0) as one,
            Mock(keep_alive_s=60.0) as two,
            routing(one, two, probe_interval_s=60.0) as (router, url),
        ):

            async def given_up_meanwhile(pool: Pool) -> Upstream:
                upstream = await connect(pool)
                monkeypatch.undo()
                router.fleet.give_up(next(worker for worker in router.fleet if router.fleet.pool(worker) is pool))
                return upstream

            body = BODY | {"stream": True}
            for _ in range(4):  # one after another, so that connections are kept
                await ask(url, CHAT, body)
            faults = [Fault("reset")]
            one.script = two.script = lambda _: faults.pop() if faults else FINE
            monkeypatch.setattr(Pool, "connect", given_up_meanwhile)
            assert check(body, await ask(url, CHAT, body), CHAT) is None
            assert not faults
            assert all(asked.header("x-headgate-journal") for asked in (*one.asked, *two.asked))

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_47_a_worker_that_still_has_the_request_of_a_connection_that_broke_is_no_reason_for_a_409(stream):
    """The connection breaks before the answer, but the worker has the request, and so refuses the retry with 409."""

    async def main() -> None:
        async with Mock(keep_alive_s=60.0) as mock, routing(mock) as (_, url):
            body = BODY | {"stream": stream}
            for _ in range(2):  # one after another, so that a connection is kept
                await ask(url, CHAT, body)
            faults = [Fault("status", status=409), Fault("reset")]
            mock.script = lambda _: faults.pop() if faults else FINE
            assert check(body, await ask(url, CHAT, body), CHAT) is None
            assert not faults

    run(main())
