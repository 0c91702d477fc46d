"""One run of the simulation: carries out a plan, repairs the fleet, and checks the results.

Checks at the end: each answer is allowed (`judge`), no caller waits forever, everything acquired is released when no
request is left (blocks, rows, streams, admissions, load, connections, tasks; `leaks`), and no process has logged a bug.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headgate import shares
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.testing.sim import contract_rules, hostile, leaks, strict_pairs
from headgate.testing.sim.actions import Actions
from headgate.testing.sim.caller import call
from headgate.testing.sim.engine import EngineProcesses
from headgate.testing.sim.fleet import CALL_S, GONE_S, SimFleet
from headgate.testing.sim.hosts import SimHost, simulated
from headgate.testing.sim.judge import Circumstances, code_of, has_tokens, judge, judge_abort, tally
from headgate.testing.sim.loop import HOST, SimLoop, SimProcess, SimulationHung
from headgate.testing.sim.network import SimNetwork
from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.script import (
    CALLS_WITH_KILL,
    FAULTS,
    KV_FAULTS,
    WINDOW_S,
    PlannedRequest,
    SimulationPlan,
    draw,
    name_choices,
)
from headgate.testing.sim.strict_pairs import PlanResult

UP_S = 30.0  # longest time for the fleet to start
END_S = 200.0  # longest time for all requests to end after the last action
SETTLE_S = 3.0
KV_RELEASE_S = 15.0  # longest time for unclaimed leases to expire and unused connections to close
FOLLOW_S = 60.0  # longest time for workers that were unavailable to catch up with the fleet
TRIES = 40  # number of attempts to resume the fleet at the end
MANY = 64  # places; no plan without several tenants has as many choices at once


class _TraceHandler(logging.Handler):
    """Adds log records to the timeline. A logged traceback is a failure."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO if world.chatty else logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        host = HOST.get()
        if host is not None and not host.alive:
            return  # the clean-up code of a killed process has logged this
        message = record.getMessage()
        self._world.note(host, f"{record.levelname.lower()}: {message}")
        if record.exc_info:
            error = "".join(traceback.format_exception(*record.exc_info))
            self._world.fail(f"{host.name if host else 'the simulation'} logged an exception: {message}\n{error}")


class World(SimFleet):
    def run(self) -> SimulationReport:
        self.loop = loop = SimLoop()
        loop.set_exception_handler(self._on_exception)
        loop.network = self.network = SimNetwork(loop, self._rng("network"), self.plan.network)
        loop.processes = self.processes = EngineProcesses(
            loop,
            self._rng("engines"),
            self.plan.profile,
            note=self.note,
            on_crash=self._on_crash,
            crash_folder=self._folder,
            update_breaks=self.plan.update_breaks,
        )
        loop.deadline_s = UP_S + WINDOW_S + CALL_S + 2 * END_S
        log = _TraceHandler(self)
        with simulated(loop, self._rng("secrets"), self._stamps), _capturing_logs(log):
            try:
                loop.run_until_complete(self._main())
            except SimulationHung as error:
                self.fail(f"hung: {error}")
            finally:
                self._tear_down()
        self.report.virtual_s = loop.time()
        self.report.hash = self.network.hash.hexdigest()
        return self.report

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        host = HOST.get()
        if host is not None and not host.alive:
            return
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)) if error else ""
        self.fail(f"unhandled exception in the event loop: {context['message']}\n{trace}")

    def _on_crash(self, host: SimProcess, error: Exception) -> None:
        self.fail(f"{host.name} crashed:\n{''.join(traceback.format_exception(error))}")

    async def _main(self) -> None:
        self.build()
        self._actions = Actions(self)
        await self._start_fleet()
        self.clients = SimProcess(self.loop, "clients")
        self.operator = SimProcess(self.loop, "operator")
        sending = [self._host_of(request).spawn(self._send_request(request)) for request in self.plan.requests]
        await self._carry_out_actions()
        await self._repair_fleet()
        await self._all_end(sending)
        self._judge()
        await self._until(
            lambda: not self._keyed(), END_S, "answers made for an Idempotency-Key have ended", self._keyed
        )
        await asyncio.sleep(SETTLE_S)
        await self._until(self._all_ready, FOLLOW_S, "every worker receives requests again")
        await self._until(
            lambda: not self._kv_leaks(), KV_RELEASE_S, "no KV is kept for other engines", self._kv_leaks
        )
        leaked = leaks.find_leaks(self.routers, self.servers, self.processes.living)
        for complaint in (*leaked, *contract_rules.implausible_counters(self.servers)):
            self.fail(complaint)
        self._count()

    def _kv_leaks(self) -> list[str]:
        return leaks.kv_leaks(self.processes.living)

    def _judge(self) -> None:
        for request in self.plan.requests:
            for complaint in (*judge(request, self._circumstances(request)), *self._broken_rules(request)):
                self.fail(complaint)
            if request.routed and has_tokens(request) and not self.placements.get((request.to, request.id)):
                self.fail(f"{request.name} was answered, but its placement was not observed")
            if not self._was_placed_at_a_dishonest_server(request):
                self._judge_aborts(request)

    def _judge_aborts(self, request: PlannedRequest) -> None:
        for choice, name in enumerate((request.name, *request.choice_names), -1):
            if name in self._aborted:
                for complaint in judge_abort(request, self._aborted[name], choice if choice >= 0 else None):
                    self.fail(complaint)

    def _broken_rules(self, request: PlannedRequest) -> Iterator[str]:
        if request.routed or not self._may_fail(request):
            yield from contract_rules.missed_deadline(request, request.stopped_s)
        waited = request.id in self._before_pause.get(request.to, ()) and self._ids[request.id] == 1
        # A fleet without usable weights cannot be resumed, and refuses a request at the end of the router's patience.
        resumable = not (self.report.actions["roll"] or self._may_lack_weights())
        if waited and self._pausers <= {request.to} and resumable:
            yield from self._refused_in_pause(request)

    def _refused_in_pause(self, request: PlannedRequest) -> Iterator[str]:
        """Guarantee 71: a request that was accepted before a pause is not refused because of it."""
        if request.reply.whole and not request.retries and f"{code_of(request)}" == "paused":
            yield f"71: {request.name} was accepted before the fleet was paused, but refused as paused"

    def _was_placed_at_a_dishonest_server(self, request: PlannedRequest) -> bool:
        dishonest = {self.hosts[name].url for name in self.dishonest}
        return not dishonest.isdisjoint(self.placements.get((request.to, request.id), ()))

    async def _start_fleet(self) -> None:
        for hosts, what in ((self.servers, "the servers listen"), (self.routers, "the routers listen")):
            for host in hosts:
                host.start()
            await self._until(partial(self._listen, hosts), UP_S, what)

    def _listen(self, hosts: Iterable[SimHost]) -> bool:
        return all(host.address in self.network.listeners for host in hosts)

    def _all_ready(self) -> bool:
        routers = [router.router for router in self.routers if router.router is not None]
        return all(worker.state == "ready" for router in routers for worker in router.fleet)

    async def _until(
        self,
        holds: Callable[[], bool],
        timeout_s: float,
        what: str,
        missing: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        until_s = self.loop.time() + timeout_s
        while not holds():
            if self.loop.time() > until_s:
                self.fail(f"timed out after {timeout_s:g} s waiting until {what}: {'; '.join(missing())}")
                return
            await asyncio.sleep(0.05)

    def _host_of(self, request: PlannedRequest) -> SimProcess:
        return SimProcess(self.loop, f"clients/{request.name}", self.clients)

    async def _send_request(self, request: PlannedRequest) -> None:
        await asyncio.sleep(request.at_s)
        host = HOST.get()
        self.note(host, f"sends to {request.to}: {request.path} {request.body}")
        address = self.hosts[request.to].address
        request.floor_version = self._floor_version(request.to)
        called = self.hosts[request.to].host
        request.stopped_s = -called.stopped_s
        if request.behaviour.stalls:
            assert host is not None
            host.spawn(self._check_stalled(request, host))
        await call(address, "POST", request.path, request.body, request.headers, request.behaviour, request.reply)
        request.stopped_s += called.stopped_s
        if not request.routed and self.hosts[request.to].host is not called:
            request.floor_version = 0  # a restarted process may have answered
        self.note(host, f"received {request.reply.status}, {len(request.reply.body)} bytes {request.reply.broken}")
        unique = self._ids[request.name] == 1  # no other tenant uses that id
        if request.reply.left and self.plan.calm and unique and "idempotency-key" not in request.headers:
            await self._check_gone(request)
        if request.retries and request.reply.broken:
            await asyncio.sleep(0.2)
            self.report.counts["asked again"] += 1
            # The retry may get the answer of the first attempt, generated by the weights of that time. A server that
            # was restarted since may have older weights.
            begun = not request.reply.broken.startswith("no connection")
            request.floor_version = (
                min(self._floor_version(request.to), request.floor_version)
                if begun
                else self._floor_version(request.to)
            )
            self._retried_s[request.name] = self.loop.time()
            for name in (request.name, *request.choice_names):
                self._aborted.pop(name, None)
            for names in self.asked_to_end.values():
                names.discard(request.name)  # that abort referred to the first attempt
            request.reply = await call(address, "POST", request.path, request.body, request.headers)
            self.note(
                host,
                f"retried and received {request.reply.status}, {len(request.reply.body)} bytes {request.reply.broken}",
            )

    async def _check_stalled(self, request: PlannedRequest, host: SimProcess) -> None:
        """Guarantee 62: the connection of a client that reads nothing is closed in time."""
        while not request.reply.ended_s:
            await asyncio.sleep(0.5)
            ends = [transport.peer for transport in self.network.transports if transport.host is host]
            if any(contract_rules.is_stuck(end, self.plan.stall_s) for end in ends):
                self.fail(
                    f"62: {request.to} keeps {request.name}, although its client has read nothing for {ends[0].stuck_s:g} s"
                )
                return

    async def _check_gone(self, request: PlannedRequest) -> None:
        """Check that no process works for a client that has disconnected."""
        await asyncio.sleep(GONE_S)
        unwanted = self._unwanted()
        await asyncio.sleep(GONE_S)
        if late := unwanted & self._unwanted():
            self.fail(f"engines still work for clients that disconnected {GONE_S:g} s ago: {late}")
        for server in self.servers:
            assert server.ledger is not None
            if server.ledger.named(request.name):
                self.fail(f"{server.name} still works for {request.name}, {GONE_S:g} s after its client disconnected")
        for router in self.routers:
            if router.router is not None and any(request.name == id for _, id, _ in router.router.live):
                self.fail(f"{router.name} still has {request.name}, {GONE_S:g} s after its client disconnected")

    def _keyed(self) -> list[str]:
        """Return requests with an Idempotency-Key whose answers servers still generate, even without a client."""
        names = [request.name for request in self.plan.requests if "idempotency-key" in request.headers]
        ledgers = [server.ledger for server in self.servers if server.ledger is not None]
        return [name for name in names if any(ledger.named(name) for ledger in ledgers)]

    def _unwanted(self) -> set[tuple[str, int, int]]:
        """Return aborted streams whose end engines have not confirmed: server, engine and stream id."""
        running = [server for server in self.servers if server.engines is not None]
        replicas = [(server.name, replica) for server in running for replica in server.engines.replicas]  # type: ignore[union-attr]
        return {(name, r.index, id) for name, r in replicas if r.client is not None for id in r.client._left}

    async def _all_end(self, sending: list[asyncio.Task[None]]) -> None:
        waiting: list[asyncio.Task[None]] = [*sending, *self._jobs]
        await asyncio.wait(waiting, timeout=END_S)
        for request, task in zip(self.plan.requests, sending, strict=True):
            if not task.done():
                self.fail(f"{request.name} has not ended {END_S:g} s after the last action: {request}")
        for job in self._jobs:
            if not job.done():
                self.fail(f"an action never ended: {job}")
        for task in waiting:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.fail(f"the simulation failed: {''.join(traceback.format_exception(error))}")

    async def _carry_out_actions(self) -> None:
        began_s = self.loop.time()
        for action in self.plan.actions:
            await asyncio.sleep(max(began_s + action.at_s - self.loop.time(), 0))
            self.report.actions[action.kind] += 1
            self.note(None, f"{action.kind} {action.target} {action.details or ''} for {action.duration_s:g} s")
            self._jobs.append(self.operator.spawn(self._actions.do(action)))
        await asyncio.sleep(max(began_s + WINDOW_S - self.loop.time(), 0))

    async def _repair_fleet(self) -> None:
        """End all faults, restart processes that have ended, and resume the fleet."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CALL_S + END_S)
        self.network.heal()
        self.processes.update_breaks = 0.0
        for host in (*self.routers, *self.servers):
            host.host.resume()
        await self._until(self._started, UP_S, "all servers and routers listen again")
        if self.plan.actions:
            await self.operator.spawn(self._resume_all())

    def _started(self) -> bool:
        """Whether all hosts listen. Hosts that have ended are restarted, e.g. after a failed start of their engine."""
        for host in (*self.routers, *self.servers):
            self.restart(host)
        return self._listen(self.hosts.values())

    async def _resume_all(self) -> None:
        """Resume the fleet through each router, because a router has no record of control calls to another."""
        for router in self.routers:
            for _ in range(TRIES):
                if not self.agreed:
                    await self._actions.update_all(router.name, "abort")
                reply = await self.control(router.name, "POST", "/v1/resume")
                if reply.status == 200 and self.agreed:
                    break
                await asyncio.sleep(1.0)
            else:
                self.fail(f"{router.name} could not update and resume the fleet: {bytes(reply.body)!r}")

    def _is_busy(self) -> bool:
        """Whether requests may be refused for lack of a place. Of several tenants, none gets all of them (guarantee 63)."""
        places = min(self.plan.settings.most_choices, self.plan.max_queue)
        choices = sum(request.n for request in self.plan.requests)
        return places < MANY or (bool(self.plan.tenants) and choices > shares.FACTOR * places // (shares.FACTOR + 1))

    def _circumstances(self, request: PlannedRequest) -> Circumstances:
        actions, plan = self.report.actions, self.plan
        return Circumstances(
            busy=self._is_busy(),
            aborts=frozenset(
                index
                for index in range(request.n)
                if any(action.ends_choice(request, index) for action in plan.actions)
            ),
            pause=self._paused
            or ((plan.servers - len(self._removed) <= 1 or not request.routed) and bool(actions["roll"])),
            faults=self._may_fail(request),
            updated=self.version > 0,
            reschedules=plan.profile.reschedules,
            abandoned=self._was_abandoned(request),
        )

    def _count(self) -> None:
        counts = self.report.counts
        counts["requests"] += len(self.plan.requests)
        counts["writes in pieces"] += self.network.splits
        for router in [router.router for router in self.routers if router.router is not None]:
            counts["retries"] += router.counters.retries
            counts["resumes"] += router.counters.resumes
            counts["prompts computed at once"] += router.counters.prefills_lost
        for scheduler in [engine.loop.scheduler for engine in self.processes.engines if engine.loop is not None]:
            counts["tokens"] += scheduler.counters.output_tokens
            counts["preemptions"] += scheduler.counters.preemptions
            counts["transfers"] += scheduler.counters.transfers
            counts["transfers lost"] += scheduler.counters.transfers_lost
            counts["leases expired"] += scheduler.counters.leases_expired
        for ledger in [server.ledger for server in self.servers if server.ledger is not None]:
            counts["stalled clients ended"] += ledger.metrics.aborts["client_stalled"]
        self.report.counts = +counts
        self._count_faults()

    def _count_faults(self) -> None:
        faults, kinds = self.report.faults, (*FAULTS, *KV_FAULTS, *CALLS_WITH_KILL, *hostile.ACTIONS)
        self.report.ends = ends = tally(self.plan.requests)
        faults += Counter({kind: n for kind, n in self.report.actions.items() if kind in kinds})
        faults += self.network.damage_counts
        faults["client left"] += ends["left"]
        faults["slow reader"] += sum(bool(request.behaviour.slow_s) for request in self.plan.requests)
        faults["stalled reader"] += sum(request.behaviour.stalls for request in self.plan.requests)
        faults["deadline passed"] += ends["deadline"]
        faults["queue full"] += ends["429 queue_full"]
        faults["update broke off"] += self.processes.broken_updates
        self.report.faults = +faults

    def _tear_down(self) -> None:
        """Kill all processes. A task that survives has no owner, which is a failure."""
        for host in self.hosts.values():
            host.host.kill()
        for name in ("clients", "operator"):
            if hasattr(self, name):
                getattr(self, name).kill()
        try:
            self.loop.deadline_s = self.loop.time() + 120
            self.loop.run_until_complete(self._gone())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except SimulationHung as error:
            self.fail(f"tasks did not end after their processes were killed: {error}, {list(self.loop.tasks)}")
        self.loop.close()

    async def _gone(self) -> None:
        here = asyncio.current_task()
        while waiting := [task for task in self.loop.tasks if task is not here]:
            await asyncio.wait(waiting)


class _capturing_logs:  # noqa: N801 - reads as `with _capturing_logs(handler)`
    """Send the logs of headgate, uvicorn and asyncio to one handler only."""

    NAMES = ("headgate", "uvicorn.error", "asyncio")

    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler
        self._before: list[tuple[logging.Logger, int, bool]] = []

    def __enter__(self) -> None:
        for name in self.NAMES:
            logger = logging.getLogger(name)
            self._before.append((logger, logger.level, logger.propagate))
            logger.addHandler(self._handler)
            logger.setLevel(self._handler.level)
            logger.propagate = False

    def __exit__(self, *error: object) -> None:
        for logger, level, propagate in self._before:
            logger.removeHandler(self._handler)
            logger.setLevel(level)
            logger.propagate = propagate


def simulate(
    seed: int,
    *,
    chatty: bool = False,
    only: tuple[str, ...] | None = None,
    actors: bool = True,
    choices: bool = True,
    fast_path: FastPath = PYTHON,
) -> SimulationReport:
    """Run one seed; `actors=False` leaves out the additional actors of `hostile`, `choices=False` aborts of choices."""
    # The folder is always the same: its name is part of the bytes sent, which must not differ between runs.
    folder = Path(tempfile.gettempdir()) / f"headgate-simulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    plan = hostile.draw(seed, only) if actors else draw(seed, only)
    if actors and choices:
        plan = name_choices(seed, plan)

    def run(plan: SimulationPlan) -> PlanResult:
        world = World(seed, plan, chatty=chatty, folder=folder, fast_path=fast_path)
        return PlanResult(plan.requests, world.placements, world.run())

    paired = SimulationReport(seed)
    if actors and choices and strict_pairs.is_drawn(seed):
        strict_pairs.add_pair(paired, plan, run)
    report = run(plan).report
    report.failures += paired.failures
    report.trace += paired.trace
    report.counts += paired.counts
    return report
