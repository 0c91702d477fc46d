"""Injects faults and makes control calls. Every action undoes its fault, even if it is cancelled."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from headgate.errors import HeadgateError
from headgate.testing.chaos.client import clock
from headgate.testing.chaos.fleet import NO_ANSWER, ChaosFleet, control, engines_of, process_stats, send
from headgate.testing.chaos.hostile import HostileClients
from headgate.testing.chaos.judge import AnswerJudge, PauseInterval
from headgate.testing.chaos.plan import HARMS_A_WORKER, KINDS, PlannedFault
from headgate.testing.chaos.proxy import FaultProxy
from headgate.testing.chaos.reference import WeightsName

log = logging.getLogger(__name__)

CALL_S = 10.0  # timeout of a control call
MARGIN_S = 10.0  # how much later than its timeout an answer may come on a loaded machine; the contract allows 1 s
SHORT_S = 2.0
FLUSH_S = 30.0  # default timeout of control calls
UPDATE_S = 60.0
RESUME_S = 120.0  # how long attempts to resume are repeated
DRAIN_S = 2.0
TRIES, RETRY_S = 5, 1.0  # number of tries of an update that did not reach all servers, and the delay between them
SPARE_FILES = 1  # number of file descriptors that a server may still open
MOST_AT_ONCE = 8  # most clients that disconnect, or requests that are aborted, at the same time

Repeat = Callable[[], Awaitable[None]]


class FleetOperator:
    """Pauses, updates and resumes the fleet, one operation at a time. Each operation ends with a running fleet."""

    def __init__(self, fleet: ChaosFleet, judge: AnswerJudge, folders: Mapping[WeightsName, Path], bad: Path) -> None:
        self._url, self._judge = fleet.url, judge
        self._folders, self._bad = folders, bad
        self._turn = asyncio.Lock()
        self._version = 0
        self._weights: WeightsName = "a"
        self.answers: Counter[str] = Counter()
        self.slowest_s = 0.0

    async def pause(self, mode: str, refuses: bool, lasts_s: float) -> None:
        async with self._turn, self._paused(mode, refuses):
            await asyncio.sleep(lasts_s)

    async def update(self, mode: str) -> None:
        async with self._turn, self._paused(mode, refuses=False) as pause_again:
            await self._switch_weights({}, pause_again)

    async def roll(self) -> None:
        async with self._turn:
            await self._switch_weights({"strategy": "rolling", "drain_timeout": DRAIN_S})

    async def bad_update(self, absent: bool) -> None:
        """Try to update from a missing folder or a truncated file. The update must be refused and change nothing."""
        async with self._turn, self._paused("freeze", refuses=False):
            version = self._version + 1
            path = self._bad / "absent" if absent else self._bad
            status, answer = await self._call("/v1/update_weights", {"path": str(path), "version": version}, CALL_S)
            if status < 400:
                raise HeadgateError(f"an update from missing or truncated weights was accepted: {answer}")

    async def resume(self) -> None:
        """Resume the fleet. Repeats the call until it succeeds, because a stopped server cannot resume at once."""
        until_s = clock() + RESUME_S
        while True:
            with suppress(*NO_ANSWER):
                status, _ = await self._call("/v1/resume", {}, CALL_S)
                if status in (200, 202):
                    return
            if clock() > until_s:
                raise HeadgateError(f"the fleet could not be resumed within {RESUME_S:g} s")
            await asyncio.sleep(0.2)

    async def call_in_time(self) -> None:
        """Guarantee 61: make calls to every server that must be answered in time. They change only the cache."""
        await self._call("/v1/abort_requests", {"req_ids": ["none"], "timeout": SHORT_S}, SHORT_S)
        await self._call("/v1/flush_cache", {}, FLUSH_S)

    async def resume_at_end(self) -> None:
        """Resume the fleet after the last fault. Servers that missed an update catch up."""
        async with self._turn:
            await self.resume()

    @asynccontextmanager
    async def _paused(self, mode: str, refuses: bool) -> AsyncIterator[Repeat]:
        """Pause the fleet inside this context. Yields a function that repeats the pause, for restarted servers."""
        pause = PauseInterval(mode, refuses, clock())
        self._judge.pauses.append(pause)
        body = {"mode": mode, "new_requests": "reject" if refuses else "queue", "timeout": CALL_S}

        async def pause_all() -> None:
            await self._call("/v1/pause", body, CALL_S)

        try:
            await pause_all()
            yield pause_all
        finally:
            await self.resume()
            pause.ended_s = clock()

    async def _switch_weights(self, more: Mapping[str, Any], before_retry: Repeat | None = None) -> None:
        """Update the weights; retry with the same version if the update did not reach all servers.

        The router updates servers that return later.
        """
        self._version += 1
        weights: WeightsName = "b" if self._weights == "a" else "a"
        self._judge.weights[self._version] = weights
        body = {"path": str(self._folders[weights]), "version": self._version, "timeout": UPDATE_S} | dict(more)
        for _ in range(TRIES):
            status, _ = await self._call("/v1/update_weights", body, UPDATE_S)
            if status in (200, 202):
                self._weights = weights
                return
            await asyncio.sleep(RETRY_S)
            if before_retry is not None:
                await before_retry()

    async def _call(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
        begun_s = clock()
        try:
            status, answer = await control(self._url, path, body, timeout_s + MARGIN_S)
        except TimeoutError:
            raise HeadgateError(f"{path} was not answered within {timeout_s + MARGIN_S:g} s") from None
        self.slowest_s = max(self.slowest_s, clock() - begun_s)
        code = "" if status < 400 else f" {(answer.get('error') or {}).get('code')}"
        self.answers[f"{path} {status}{code}"] += 1
        log.info("%s %s answered %d: %s", path, dict(body), status, msgspec.json.encode(answer).decode()[:300])
        return status, answer


class FaultInjector:
    """Injects planned faults. A server gets a fault only while another one is healthy; otherwise a client does."""

    def __init__(
        self,
        fleet: ChaosFleet,
        operators: FleetOperator,
        vanish: Callable[[int], int],
        abort: Callable[[int], list[str]],
        hostile: HostileClients,
        seed: int,
    ) -> None:
        self._hostile = hostile
        self._fleet, self._operators = fleet, operators
        self._vanish, self._abort_some = vanish, abort
        self._rng = random.Random(seed)
        self._harmed: Counter[int] = Counter()
        self._limits: dict[int, tuple[int, int]] = {}  # process -> its original limits on open files
        self.done: Counter[str] = Counter()
        self.events: list[dict[str, Any]] = []

    async def do(self, fault: PlannedFault, begun_s: float) -> None:
        kind, victim = await self._feasible(fault)
        self.done[kind] += 1
        lasts_s = fault.lasts_s if kind == fault.kind else 0.0
        event = {"at_s": round(clock() - begun_s, 3), "kind": kind, "lasts_s": round(lasts_s, 2)}
        if victim is not None:
            event["server"] = victim
        self.events.append(event)
        log.info("fault: %s", event)
        if victim is not None:
            await self._harm(kind, victim, fault.lasts_s)
        else:
            await self._other_fault(kind, fault)

    async def _feasible(self, fault: PlannedFault) -> tuple[str, int | None]:
        """Return the fault to inject, and its server if it has one."""
        if fault.kind not in HARMS_A_WORKER:
            return fault.kind, None
        victim = int(fault.which * len(self._fleet.workers))
        states = ["unknown"]
        with suppress(*NO_ANSWER):
            states = await self._fleet.states()
        healthy = [i for i, state in enumerate(states) if state == "ready" and not self._harmed[i] and i != victim]
        if healthy and self._fleet.workers[victim].pid is not None:
            return fault.kind, victim
        return ("vanish" if fault.which * 1000 % 1 < 0.5 else "abort"), None

    async def _harm(self, kind: str, victim: int, lasts_s: float) -> None:
        self._harmed[victim] += 1
        try:
            await getattr(self, f"_{kind}")(victim, lasts_s)
        finally:
            self._harmed[victim] -= 1

    async def _other_fault(self, kind: str, fault: PlannedFault) -> None:
        first_half = fault.which < 0.5
        count = 1 + int(fault.which * MOST_AT_ONCE)
        match kind:
            case "vanish":
                self._vanish(count)
            case "abort":
                await self._abort(count)
            case "stop_router":
                await self._stopped([self._fleet.router.pid], fault.lasts_s)
            case "update":
                await self._operators.update("freeze" if fault.which < 0.8 else "abort")
            case "roll":
                await self._operators.roll()
            case "pause_tickets":
                await self._pause_while_waiting(fault)
            case _ if KINDS[kind].group == "hostile":
                await getattr(self._hostile, kind)(fault.lasts_s)
            case "bad_update":
                await self._operators.bad_update(absent=first_half)
            case _:
                await self._operators.pause(kind.removeprefix("pause_"), first_half, fault.lasts_s)

    async def _abort(self, count: int) -> None:
        if ids := self._abort_some(count):
            with suppress(*NO_ANSWER):
                await control(self._fleet.url, "/v1/abort_requests", {"req_ids": ids, "wait": False}, MARGIN_S)

    async def _pause_while_waiting(self, fault: PlannedFault) -> None:
        """Pause while a burst of new long prompts waits for the prefill server."""
        waiting = asyncio.ensure_future(self._hostile.long_prompts())
        try:
            await asyncio.sleep(0.05 * fault.which)
            mode = ("abort", "drain", "freeze")[int(fault.which * 2.999)]
            await self._operators.pause(mode, fault.which * 100 % 1 < 0.5, fault.lasts_s)
            await waiting
        finally:
            waiting.cancel()

    # -- processes ----------------------------------------------------------------------

    async def _kill_server(self, victim: int, lasts_s: float) -> None:
        send(self._fleet.workers[victim].pid, signal.SIGKILL)

    async def _kill_engine(self, victim: int, lasts_s: float) -> None:
        for pid in engines_of(self._fleet.workers[victim].pid):
            send(pid, signal.SIGKILL)

    async def _stop_server(self, victim: int, lasts_s: float) -> None:
        pid = self._fleet.workers[victim].pid
        assert pid is not None
        await self._stopped([pid], lasts_s)

    async def _stop_engine(self, victim: int, lasts_s: float) -> None:
        await self._stopped(engines_of(self._fleet.workers[victim].pid), lasts_s)

    async def _stop_across(self, victim: int, lasts_s: float) -> None:
        """Stop the engines of a server when a control call reaches them."""
        stopped = asyncio.ensure_future(self._stopped(engines_of(self._fleet.workers[victim].pid), lasts_s))
        try:
            await self._operators.call_in_time()
            await stopped
        finally:
            stopped.cancel()
            with suppress(asyncio.CancelledError):
                await stopped

    async def _stopped(self, pids: list[int], lasts_s: float) -> None:
        try:
            for pid in pids:
                send(pid, signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)

    async def _few_files(self, victim: int, lasts_s: float) -> None:
        """Limit the server's open files, so that it can neither accept a connection nor open a file."""
        pid = self._fleet.workers[victim].pid
        assert pid is not None
        now = process_stats(pid)
        if now is None:
            return
        try:
            before = self._limits.setdefault(pid, resource.prlimit(pid, resource.RLIMIT_NOFILE))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (now.fds + SPARE_FILES, before[1]))
        except OSError:  # the process has ended
            return
        try:
            await asyncio.sleep(lasts_s)
        finally:
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    # -- the network --------------------------------------------------------------------

    async def _delay(self, victim: int, lasts_s: float) -> None:
        self._proxy(victim).delay_s = self._rng.uniform(0.02, 0.3)
        await self._until_restored(victim, lasts_s)

    async def _stall(self, victim: int, lasts_s: float) -> None:
        self._proxy(victim).stall()
        await self._until_restored(victim, lasts_s)

    async def _partition(self, victim: int, lasts_s: float) -> None:
        self._proxy(victim).partition()
        await self._until_restored(victim, lasts_s)

    async def _reset(self, victim: int, lasts_s: float) -> None:
        self._proxy(victim).reset()

    async def _half(self, victim: int, lasts_s: float) -> None:
        self._proxy(victim).cut_next_answers()

    async def _until_restored(self, victim: int, lasts_s: float) -> None:
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._proxy(victim).restore()

    def _proxy(self, victim: int) -> FaultProxy:
        return self._fleet.proxies[victim]
