"""A short soak, by the rules of the long one (`make soak`): clients who leave, aborts and pauses, and nothing has grown."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from headgate.testing.chaos import home
from headgate.testing.chaos.client import clock
from headgate.testing.chaos.fleet import ChaosFleet
from tests.api.clients import COMPLETIONS, asking
from tests.api.live import LiveServer
from tests.router.fleets import LiveRouter, live_router

WARM_UP, ROUNDS = 7, 21  # rounds: each call at least once before the first look
CLIENTS = 12
SHORT, LONG = 150, 15_000  # tokens; who is to be ended has not had all of them before
CALLS: tuple[tuple[str, dict[str, Any]] | None, ...] = (
    None,
    ("/v1/abort_requests", {"abort_all": True}),
    ("/v1/pause", {"mode": "abort"}),
    ("/v1/abort_requests", {"tags": {"half": "1"}}),
    ("/v1/pause", {"mode": "freeze", "new_requests": "queue"}),
    ("/v1/flush_cache", {}),
    ("/v1/pause", {"mode": "drain"}),
)


def is_ended(call: tuple[str, dict[str, Any]] | None, number: int) -> bool:
    match call:
        case (_, {"tags": {"half": half}}):
            return str(number % 2) == half
        case (_, {"abort_all": True} | {"mode": "abort"}):
            return True
    return False


class Soaked:
    """A router and its servers, which are threads of this process, and their engines."""

    def __init__(self, router: LiveRouter, servers: list[LiveServer]) -> None:
        self.url = router.url
        self.proxies = (SimpleNamespace(reset=lambda: router.do(self._close_what_is_kept)),)
        self._fleet = router.router.fleet
        self.workers = [SimpleNamespace(index=i, url=server.url) for i, server in enumerate(servers)]
        self._engines = {f"engine {i}": server.host.replicas[0].pid for i, server in enumerate(servers)}

    def _close_what_is_kept(self) -> None:
        for worker in self._fleet:
            self._fleet.pool(worker).sweep(math.inf)

    def processes(self) -> dict[str, int]:
        here = dict.fromkeys(["router", *(f"server {worker.index}" for worker in self.workers)], os.getpid())
        return here | {name: cast(int, pid) for name, pid in self._engines.items()}

    def note_processes(self) -> None:
        pass


class Round:
    """A dozen clients, a third of whom leave, and one call to the fleet when all have begun to read."""

    def __init__(self, http: httpx.AsyncClient, ends: Counter[str]) -> None:
        self._http, self._ends = http, ends
        self._begun = asyncio.Barrier(CLIENTS + 1)

    async def run(self, call: tuple[str, dict[str, Any]] | None) -> None:
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._ask(number, LONG if is_ended(call, number) else SHORT))
            await self._begun.wait()
            if call is not None:
                await self._post(*call)
                await self._post("/v1/resume", {})

    async def _ask(self, number: int, tokens: int) -> None:
        body = asking(tokens, tags={"half": str(number % 2)}) | {"stream": True}
        told = b""
        async with self._http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for data in answer.aiter_bytes():
                if not told:
                    await self._begun.wait()
                told += data
                if number % 3 == 0:
                    self._ends["left"] += 1
                    return
        assert told.endswith(b"data: [DONE]\n\n"), told
        self._ends["aborted" if b'"finish_reason":"abort"' in told else "whole"] += 1

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.timeout(300)
def test_nothing_has_grown_after_rounds_of_clients_who_leave_aborts_and_pauses(servers: list[LiveServer]):
    ends: Counter[str] = Counter()

    async def rounds(fleet: ChaosFleet, count: int) -> home.Watch:
        watch, calls = home.Watch(fleet, clock()), cycle(CALLS)
        for _ in range(count):
            async with httpx.AsyncClient(base_url=fleet.url, timeout=100, trust_env=False) as http:
                await Round(http, ends).run(next(calls))
            watch.look()
        assert await home.come_home(fleet) == []
        return watch

    async def main(fleet: ChaosFleet) -> None:
        await rounds(fleet, WARM_UP)
        before = await home.at_rest(fleet)
        watch = await rounds(fleet, ROUNDS)
        assert home.leaked(before, await home.at_rest(fleet)) + home.too_large(watch.samples) == []
        assert set(before) == {"router", "server 0", "server 1", "engine 0", "engine 1"}

    with live_router(*(server.url for server in servers), policy="round_robin") as router:
        asyncio.run(main(cast(ChaosFleet, Soaked(router, servers))))
    assert ends.total() == CLIENTS * (WARM_UP + ROUNDS)
    assert min(ends[how] for how in ("left", "aborted", "whole")) > CLIENTS, ends
