"""Connections to workers through a whole router: kept after each answer, and never in two hands; sentence 41."""

from __future__ import annotations

from headgate.router.upstream import Pool, Upstream, call
from tests.router.client import ask, routing
from tests.router.mock import CHAT, Mock
from tests.router.run import run

BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 4}


def test_a_connection_is_used_again_after_each_whole_answer():
    async def main() -> None:
        # Time enough between two requests, on a machine that is busy.
        async with Mock(keep_alive_s=60.0) as mock, routing(mock) as (_, url):
            for stream in (True, False, True, False):
                await ask(url, CHAT, BODY | {"stream": stream})
            probes = sum(mock.probes.values())  # each on a connection of its own
            assert mock.opened - probes <= 2, "one for the requests, and at most one for a probe on its way"

    run(main())


def test_41_a_connection_that_made_a_call_is_offered_to_nobody():
    """Its caller closes it: whoever had taken it meanwhile would wait for an answer that never comes."""
    given: list[Upstream] = []

    class Watched(Pool):
        def give(self, upstream: Upstream) -> None:
            given.append(upstream)
            super().give(upstream)

    async def main() -> None:
        async with Mock() as mock:
            pool = Watched(mock.url, 2.0)
            status, _, _ = await call(pool, "GET", "/v1/models", timeout_s=5.0)
            assert status == 200
            assert given == []
            pool.close()

    run(main())
