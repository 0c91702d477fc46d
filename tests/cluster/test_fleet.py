"""Supervision of servers: their number, which are removed first, restarts, and errors at start-up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headgate.cluster import fleet as fleets
from headgate.cluster.autoscale import ScaleBounds
from headgate.cluster.fleet import CannotStartServer, Hooks, ServerFleet, ServerProcess
from headgate.errors import RequestError


class ScriptedLauncher:
    """A launcher whose servers run until the test ends them."""

    def __init__(self, *, keeps_address: bool = True) -> None:
        self.keeps_address = keeps_address
        self.may_start = asyncio.Event()
        self.may_end = asyncio.Event()  # after cancellation
        self.deaths: dict[int, asyncio.Event] = {}
        self.refuses = self.breaks = ""
        self.ended: list[int] = []

    async def __aenter__(self) -> ScriptedLauncher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def run(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        death = self.deaths[server.index] = asyncio.Event()
        try:
            await self.may_start.wait()
            if self.refuses:
                server.error = self.refuses
                return
            if self.breaks:
                raise OSError(self.breaks)
            server.url = f"http://{server.index}.{server.starts}:80"
            on_ready()
            await death.wait()
        except asyncio.CancelledError:
            await self.may_end.wait()
            self.ended.append(server.index)
            raise


class HookCalls:
    """Records the calls of the fleet's hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.hooks = Hooks(*(self._record(name) for name in ("ready", "leave", "gone")))

    def _record(self, name: str) -> Callable[[ServerProcess], None]:
        return lambda server: self.calls.append((name, server.url))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(within())


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "FIRST_BACKOFF_S", 0.01)


def started(keeps_address: bool = True) -> ScriptedLauncher:
    launcher = ScriptedLauncher(keeps_address=keeps_address)
    launcher.may_start.set()
    launcher.may_end.set()
    return launcher


def test_all_servers_become_ready_and_all_are_stopped():
    async def test() -> None:
        launcher, recorded = started(), HookCalls()
        async with ServerFleet(launcher, {"prefill": 1, "decode": 2}, recorded.hooks) as fleet:
            await fleet.ready()
            assert fleet.running == {"mixed": 0, "prefill": 1, "decode": 2} == fleet.wanted
            assert [server.role for server in fleet.servers] == ["prefill", "decode", "decode"]
        assert sorted(launcher.ended) == [0, 1, 2]

    run(test)


def test_a_server_that_dies_is_restarted_and_its_lost_address_is_reported():
    async def test() -> None:
        launcher, recorded = started(keeps_address=False), HookCalls()
        async with ServerFleet(launcher, {"mixed": 1}, recorded.hooks) as fleet:
            await fleet.ready()
            launcher.deaths[0].set()
            while fleet.servers[0].starts < 2 or not fleet.servers[0].ready:
                await asyncio.sleep(0.001)
            assert recorded.calls == [
                ("ready", "http://0.1:80"),
                ("gone", "http://0.1:80"),
                ("ready", "http://0.2:80"),
            ]

    run(test)


def test_scaling_up_waits_for_new_servers_and_scaling_down_waits_until_the_newest_have_ended():
    async def test() -> None:
        launcher, recorded = started(), HookCalls()
        async with ServerFleet(launcher, {"mixed": 1}, recorded.hooks) as fleet:
            await fleet.ready()
            assert await fleet.scale({"mixed": 3}, 60) and fleet.running["mixed"] == 3
            launcher.may_end.clear()
            recorded.calls.clear()
            shrinking = asyncio.create_task(fleet.scale({"mixed": 1}, 60))
            await asyncio.sleep(0.01)
            # The router stops sending requests to both servers at once, and the call waits for their end.
            assert [name for name, _ in recorded.calls] == ["leave", "leave"] and not shrinking.done()
            assert fleet.running["mixed"] == 1
            launcher.may_end.set()
            assert await shrinking and launcher.ended == [2, 1]
            assert [server.index for server in fleet.servers] == [0]

    run(test)


def test_servers_that_are_not_ready_are_removed_first():
    async def test() -> None:
        launcher, recorded = started(), HookCalls()
        async with ServerFleet(launcher, {"mixed": 2}, recorded.hooks) as fleet:
            await fleet.ready()
            launcher.may_start.clear()
            assert not await fleet.scale({"mixed": 4}, 0.01)
            launcher.deaths[0].set()
            while fleet.servers[0].starts < 2:
                await asyncio.sleep(0.001)
            assert await fleet.scale({"mixed": 1}, 60)
            assert [server.index for server in fleet.servers] == [1]

    run(test)


def test_20_scaling_that_times_out_reports_it_and_continues():
    async def test() -> None:
        launcher = ScriptedLauncher()
        async with ServerFleet(launcher, {"mixed": 1}, HookCalls().hooks) as fleet:
            assert not await fleet.scale({"mixed": 2}, 0.01)
            launcher.may_start.set()
            launcher.may_end.set()
            assert await fleet.scale({"mixed": 2}, 60) and len(fleet.servers) == 2
            await fleet.ready()

    run(test)


def test_the_error_of_the_first_server_that_cannot_start_ends_the_start():
    async def test() -> None:
        launcher = started()
        launcher.refuses = "there is no such model"
        async with ServerFleet(launcher, {"mixed": 2}, HookCalls().hooks) as fleet:
            with pytest.raises(CannotStartServer, match="no such model"):
                await fleet.ready()

    run(test)


def test_a_new_server_that_cannot_start_is_reported_and_dropped_and_the_others_keep_serving():
    async def test() -> None:
        launcher = started()
        async with ServerFleet(launcher, {"mixed": 1}, HookCalls().hooks) as fleet:
            await fleet.ready()
            launcher.refuses = "no memory"
            with pytest.raises(CannotStartServer, match="no memory"):
                await fleet.scale({"mixed": 2}, 60)
            assert fleet.running["mixed"] == 1 == fleet.wanted["mixed"]

    run(test)


@pytest.mark.parametrize("trouble", ["refuses", "breaks"])
def test_a_server_that_was_ready_once_is_restarted_forever(trouble: str):
    async def test() -> None:
        launcher = started()
        async with ServerFleet(launcher, {"mixed": 1}, HookCalls().hooks) as fleet:
            await fleet.ready()
            setattr(launcher, trouble, "the disk is not there")
            launcher.deaths[0].set()
            while fleet.servers[0].starts < 4:
                await asyncio.sleep(0.001)
            setattr(launcher, trouble, "")
            while not fleet.servers[0].ready:
                await asyncio.sleep(0.001)

    run(test)


@pytest.mark.parametrize(
    ("counts", "about"),
    [
        ({"boss": 1}, "not 'boss'"),
        ({"mixed": -1}, "at least 0"),
        ({"mixed": 0}, "at least one mixed or decode"),
        ({"decode": 9}, r"between 1 and 4 \(the limits of --autoscale\), not 9"),
    ],
)
def test_invalid_counts_are_refused_and_change_nothing(counts: dict[str, int], about: str):
    async def test() -> None:
        async with ServerFleet(started(), {"mixed": 1}, HookCalls().hooks, {"decode": ScaleBounds(1, 4)}) as fleet:
            with pytest.raises(RequestError, match=about):
                await fleet.scale(counts, 5)
            assert fleet.wanted == {"mixed": 1, "prefill": 0, "decode": 0}

    run(test)
