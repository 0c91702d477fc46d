"""One run: a plan is carried out, set right again, and judged.

What is checked at the end: each answer (`judge`), that nobody waits for ever, that everything taken is home when nothing is
asked any more (blocks, rows, streams, places, load, connections, tasks), and that nobody has logged a bug.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headgate.config import EngineConfig, RouteConfig
from headgate.device.weights.file_stamps import Stamps
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.exchange.relay import Exchange
from headgate.router.fleet.worker import Worker
from headgate.testing.sim import home, hostile, promises
from headgate.testing.sim.caller import ClientBehaviour, ReceivedAnswer, call
from headgate.testing.sim.deeds import Deeds
from headgate.testing.sim.engine import Processes
from headgate.testing.sim.hosts import KEY, SimHost, SimRouter, SimServer, simulated, workers
from headgate.testing.sim.judge import Circumstances, code_of, judge, judge_abort, tally
from headgate.testing.sim.loop import HOST, SimLoop, SimProcess, SimulationHung
from headgate.testing.sim.network import SimNetwork
from headgate.testing.sim.script import (
    DEADLY,
    KV_TROUBLE,
    MADE_UP_FOR,
    ROUTERS,
    TROUBLE,
    WINDOW_S,
    Plan,
    PlannedAction,
    PlannedRequest,
    draw,
)

UP_S = 30.0  # for the fleet to come up
CALL_S = 120.0  # for a control call to be answered, whatever its own timeout
END_S = 200.0  # for everything to end after the last trouble
SETTLE_S = 3.0
GONE_S = 0.25  # for the news that a client has left to be everywhere, in good weather
KV_HOME_S = 15.0  # for leases that nobody fetches and connections that nobody uses
FOLLOW_S = 60.0  # for workers that were away to be like the others
TRIES = 40  # of an operator who wants the fleet to run again


@dataclass
class SimulationReport:
    """What a run was like."""

    seed: int
    failures: list[str] = field(default_factory=list)
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    hash: str = ""

    def timeline(self) -> str:
        return "\n".join(f"{when_s:9.4f}  {who:<18}  {what}" for when_s, who, what in self.trace)


class _Log(logging.Handler):
    """What is logged becomes part of the timeline; a bug that is logged is a failure."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO if world.chatty else logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        host = HOST.get()
        if host is not None and not host.alive:
            return  # the clean-up of a process that is gone
        told = record.getMessage()
        self._world.note(host, f"{record.levelname.lower()}: {told}")
        if record.exc_info:
            error = "".join(traceback.format_exception(*record.exc_info))
            self._world.fail(f"{host.name if host else 'somebody'} logged a bug: {told}\n{error}")


class World:
    def __init__(self, seed: int, plan: Plan, *, chatty: bool, folder: Path, fast_path: FastPath = PYTHON) -> None:
        self.report = SimulationReport(seed)
        self.chatty = chatty
        self.plan = plan
        self._seed = seed
        self._fast_path = fast_path
        self._folder = folder  # for weights, and for what a crash leaves
        self.roles = plan.roles or ("mixed",) * plan.servers
        self.version = 0  # of the newest weights that anybody was given
        self.agreed = True  # the last update has reached everybody
        self.floors: dict[str, int] = {}  # by router: the weights of the last update that it has carried out
        self.resumes = 0  # calls that may have ended a pause
        self.pauses = 0
        self.asked_to_end: dict[str, set[str]] = {name: set() for name in ROUTERS}  # by router: and not heard of yet
        self._held: dict[str, tuple[SimProcess, int]] = {}  # by server: in which life it was given which weights
        self._spoiled: Counter[str] = Counter()  # files of weights that are others now
        self._jobs: list[asyncio.Task[None]] = []  # of operators
        self._paused = False  # somebody has asked for that
        self._aborted: dict[str, int] = {}  # what callers of an abort were told
        self._asked_again: dict[str, float] = {}  # requests with a key, and when their clients have tried again
        self._calls = 0
        self.liars: dict[str, None] = {}  # servers that have lied
        self._unknown_claims: set[tuple[str, str]] = set()  # router and id: claimed by a liar when it was not there
        self._ids = Counter(ask.id for ask in plan.asks)
        self._placements: dict[tuple[str, str], list[str]] = {}  # addresses of workers, by router and id
        self._held_live: dict[str, list[tuple[Exchange, ...]]] = {}  # by router: what it had at each pause
        self._before_pause: dict[str, set[str]] = {}  # by router: ids that it had accepted before it was paused
        self._pausers: set[str] = set()  # processes that were asked for a pause

    # -- for everybody --------------------------------------------------------------------

    def note(self, host: SimProcess | None, what: str) -> None:
        self.report.trace.append((self.loop.time(), host.name if host else "-", what))

    def fail(self, what: str) -> None:
        self.report.failures.append(what)
        self.note(None, f"WRONG: {what}")

    def _rng(self, use: str) -> random.Random:
        return random.Random(f"{use} {self._seed}")

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> SimulationReport:
        self.loop = loop = SimLoop()
        loop.set_exception_handler(self._on_exception)
        loop.network = self.network = SimNetwork(loop, self._rng("network"), self.plan.weather)
        loop.processes = self.processes = Processes(
            loop,
            self._rng("engines"),
            self.plan.pace,
            note=self.note,
            on_crash=self._on_crash,
            crash_folder=self._folder,
            update_breaks=self.plan.update_breaks,
        )
        loop.deadline_s = UP_S + WINDOW_S + CALL_S + 2 * END_S
        log = _Log(self)
        with simulated(loop, self._rng("secrets"), self._stamps), _listening(log):
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
        told = "".join(traceback.format_exception(error)) if error else ""
        self.fail(f"the loop was told of a bug: {context['message']}\n{told}")

    def _on_crash(self, host: SimProcess, error: Exception) -> None:
        self.fail(f"{host.name} crashed:\n{''.join(traceback.format_exception(error))}")

    async def _main(self) -> None:
        self._build()
        await self._come_up()
        self.clients = SimProcess(self.loop, "clients")
        self.operator = SimProcess(self.loop, "operator")
        asking = [self._host_of(ask).spawn(self._ask(ask)) for ask in self.plan.asks]
        await self._do_deeds()
        await self._set_right()
        await self._all_end(asking)
        self._judge()
        await self._until(lambda: not self._keyed(), END_S, "what is made for a key has ended", World._keyed)
        await asyncio.sleep(SETTLE_S)
        await self._until(self._all_ready, FOLLOW_S, "every worker gets requests again")
        await self._until(lambda: not any(home.kv_left(self)), KV_HOME_S, "no KV is kept for anybody", home.kv_left)
        for complaint in (*home.left_behind(self), *promises.moved_counters(self)):
            self.fail(complaint)
        self._count()

    def _judge(self) -> None:
        for ask in self.plan.asks:
            for complaint in (*judge(ask, self._circumstances(ask)), *self._broken_promises(ask)):
                self.fail(complaint)
            if ask.name in self._aborted and not self._was_at_a_liar(ask):
                for complaint in judge_abort(ask, self._aborted[ask.name]):
                    self.fail(complaint)

    def _broken_promises(self, ask: PlannedRequest) -> Iterator[str]:
        if ask.routed or not self._in_trouble(ask):
            yield from promises.missed_deadline(ask, ask.away_s)
        waited = ask.id in self._before_pause.get(ask.to, ()) and self._ids[ask.id] == 1
        if waited and self._pausers <= {ask.to} and not self.report.deeds["roll"]:
            yield from self._refused_in_pause(ask)

    def _refused_in_pause(self, ask: PlannedRequest) -> Iterator[str]:
        """71."""
        if ask.reply.whole and not ask.retries and f"{code_of(ask)}" == "paused":
            yield f"71: {ask.name} was accepted before the fleet was paused, and refused as paused"

    def _was_at_a_liar(self, ask: PlannedRequest) -> bool:
        lying = {self.hosts[name].url for name in self.liars}
        return not lying.isdisjoint(self._placements.get((ask.to, ask.id), ()))

    def _build(self) -> None:
        plan, kv = self.plan, self.plan.kv
        engine = [EngineConfig(kv_listen=None) if kv is None else kv.config(i) for i in range(plan.servers)]
        keys = {tenant: f"key-of-{tenant}" for tenant in plan.tenants}
        self.servers = [
            SimServer(
                self.loop,
                f"server{i}",
                plan.settings,
                engine[i],
                keys if "servers" in plan.keys_at else {},
                self._tokenised,
                plan.stall_s,
            )
            for i in range(plan.servers)
        ]
        config = RouteConfig(
            workers=workers(self.servers, self.roles),
            policy=plan.policy,
            max_in_flight=plan.max_in_flight,
            max_queue=plan.max_queue,
            disaggregate_tokens=256 if kv is None else kv.disaggregate_tokens,
            ticket_timeout_s=10.0 if kv is None else kv.ticket_timeout_s,
            api_keys=keys if "routers" in plan.keys_at else {},
            client_stall_timeout_s=plan.stall_s,
            admin_key=KEY,
            worker_key=KEY,
        )
        names = ROUTERS[: plan.routers]
        self.routers = [
            SimRouter(self.loop, name, config, self._seed + i, self, self._fast_path) for i, name in enumerate(names)
        ]
        self.hosts: dict[str, SimHost] = {host.name: host for host in (*self.routers, *self.servers)}
        self._deeds = Deeds(self)

    @property
    def router(self) -> SimRouter:
        return self.routers[0]

    async def _come_up(self) -> None:
        for hosts, what in ((self.servers, "the servers are up"), (self.routers, "the routers are up")):
            for host in hosts:
                host.start()
            await self._until(partial(self._listen, hosts), UP_S, what)

    def _listen(self, hosts: Iterable[SimHost]) -> bool:
        return all(host.address in self.network.listeners for host in hosts)

    def _all_ready(self) -> bool:
        routers = [router.router for router in self.routers if router.router is not None]
        return all(worker.state == "ready" for router in routers for worker in router.fleet)

    def engine_states(self, server: SimServer) -> list[str]:
        """Of engines that streams or calls can reach; none while one is away."""
        replicas = [] if server.engines is None or not server.alive else server.engines.replicas
        if any(replica.client is None for replica in replicas):
            return []
        processes = {engine.get_pid(): engine for engine in self.processes.living}
        loops = [processes[r.pid].loop for r in replicas if r.pid in processes]
        return [loop.control.state for loop in loops if loop is not None]

    def worker(self, router: str, server: SimServer) -> Worker | None:
        """A server as a router knows it; None if it is not in the router's fleet."""
        host = next(host for host in self.routers if host.name == router)
        workers = host.router.fleet if host.router is not None else ()
        return next((worker for worker in workers if worker.url == server.url), None)

    def holds(self, router: str) -> bool:
        host = next(host for host in self.routers if host.name == router)
        return host.router is not None and host.alive and host.router.holding

    # -- what must not happen on the way ----------------------------------------------------

    def placed(self, router: str, exchange: Exchange, url: str) -> None:
        self._placements.setdefault((router, exchange.id), []).append(url)
        if exchange.cut:
            return  # it has ended, and a worker is asked for its words
        if exchange.ending or (exchange.id in self.asked_to_end[router] and self._ids[exchange.id] == 1):
            self.fail(f"{exchange.id} goes to another worker, although somebody has asked for its end")

    def told_aborted(self, router: str, asked_s: float, tokens: dict[str, int]) -> None:
        """What the caller of an abort was told. Another router's requests may have gone on before it heard."""
        here = {ask.name for ask in self.plan.asks if ask.to == router and self._is_meant(ask, asked_s)}
        told = {name: count for name, count in tokens.items() if name in here and self._ids[name] == 1}
        self._aborted |= told
        self.asked_to_end[router] |= told.keys()

    def _is_meant(self, ask: PlannedRequest, asked_s: float) -> bool:
        """Whether an abort of then can only have met this request as its client knows it.

        One with a key may have been asked once more since, or have been answered while a worker still made it for the key.
        A router may have ended one at whose worker something was wrong, and the worker learns of it later.
        """
        left_behind = "idempotency-key" in ask.headers or self._in_trouble(ask)
        answered = ask.reply.whole and ask.reply.ended_s <= asked_s and left_behind
        again_s = self._asked_again.get(ask.name, -1.0)
        return again_s < asked_s and not answered and self._ids[ask.name] == 1 and self._is_known(ask, asked_s)

    def _is_known(self, ask: PlannedRequest, asked_s: float) -> bool:
        """Whether a router knows better than a worker that lies: of what it does not have, it can only repeat claims."""
        there = 0 < ask.reply.began_s < asked_s - GONE_S and not 0 < ask.reply.ended_s <= asked_s
        return not self.liars or (there and (ask.to, ask.id) not in self._unknown_claims)

    def claimed(self, ids: Iterable[str]) -> None:
        """A worker claims now that it has aborted these."""
        for host in self.routers:
            live = {id for _, id, _ in host.router.live} if host.router is not None else set()
            self._unknown_claims |= {(host.name, id) for id in ids if id not in live}

    def _tokenised(self, text: str) -> None:
        if len(text) > promises.LONGEST_TEXT:
            self.fail(f"64: {len(text)} characters were tokenised, which no context holds")

    def held(self, router: str, live: tuple[Exchange, ...]) -> None:
        """A router is paused now, and has these requests."""
        self._held_live.setdefault(router, []).append(live)
        self._before_pause.setdefault(router, set()).update(exchange.id for exchange in live)

    def alone_in_trouble(self, deed: PlannedAction) -> bool:
        """Whether nothing but this deed stops, ends or pauses a process of this run."""
        kinds = (*TROUBLE, *KV_TROUBLE, *DEADLY, *hostile.STOPS, "pause", "pause_one", "update", "roll", "remove")
        return not any(other.what in kinds for other in self.plan.deeds if other is not deed)

    async def _until(
        self,
        holds: Callable[[], bool],
        timeout_s: float,
        what: str,
        why: Callable[[World], Iterable[str]] = lambda _: (),
    ) -> None:
        until_s = self.loop.time() + timeout_s
        while not holds():
            if self.loop.time() > until_s:
                self.fail(f"not within {timeout_s:g} s: {what} {'; '.join(why(self))}")
                return
            await asyncio.sleep(0.05)

    # -- clients ------------------------------------------------------------------------------

    def _host_of(self, ask: PlannedRequest) -> SimProcess:
        return SimProcess(self.loop, f"clients/{ask.name}", self.clients)

    async def _ask(self, ask: PlannedRequest) -> None:
        await asyncio.sleep(ask.at_s)
        host = HOST.get()
        self.note(host, f"asks {ask.to}: {ask.path} {ask.body}")
        address = self.hosts[ask.to].address
        ask.floor = self._floor(ask.to)
        asked = self.hosts[ask.to].host
        ask.away_s = -asked.away_s
        if ask.manners.stalls:
            assert host is not None
            host.spawn(self._check_stalled(ask, host))
        await call(address, "POST", ask.path, ask.body, ask.headers, ask.manners, ask.reply)
        ask.away_s += asked.away_s
        if not ask.routed and self.hosts[ask.to].host is not asked:
            ask.floor = 0  # another process has answered, perhaps
        self.note(host, f"got {ask.reply.status}, {len(ask.reply.body)} bytes {ask.reply.broken}")
        alone = self._ids[ask.name] == 1  # no other tenant has a request of that id
        if ask.reply.left and self.plan.calm and alone and "idempotency-key" not in ask.headers:
            await self._check_gone(ask)
        if ask.retries and ask.reply.broken:
            await asyncio.sleep(0.2)
            self.report.counts["asked again"] += 1
            # What was begun the first time may be answered now by the weights of then; a server that has been started
            # anew since may have older ones.
            begun = not ask.reply.broken.startswith("no connection")
            ask.floor = min(self._floor(ask.to), ask.floor) if begun else self._floor(ask.to)
            self._asked_again[ask.name] = self.loop.time()
            self._aborted.pop(ask.name, None)
            for names in self.asked_to_end.values():
                names.discard(ask.name)  # this one is another
            ask.reply = await call(address, "POST", ask.path, ask.body, ask.headers)
            self.note(host, f"asked again and got {ask.reply.status}, {len(ask.reply.body)} bytes {ask.reply.broken}")

    async def _check_stalled(self, ask: PlannedRequest, host: SimProcess) -> None:
        """62: the connection of a client that reads nothing is given up in time."""
        while not ask.reply.ended_s:
            await asyncio.sleep(0.5)
            ends = [transport.peer for transport in self.network.transports if transport.host is host]
            if any(promises.is_stuck(end, self.plan.stall_s) for end in ends):
                self.fail(
                    f"62: {ask.to} still holds {ask.name}, whose client has read nothing for {ends[0].stuck_s:g} s"
                )
                return

    async def _check_gone(self, ask: PlannedRequest) -> None:
        """Nobody works for a client that has left."""
        await asyncio.sleep(GONE_S)
        unwanted = self._unwanted()
        await asyncio.sleep(GONE_S)
        if late := unwanted & self._unwanted():
            self.fail(f"engines still work for clients that left {GONE_S:g} s ago: {late}")
        for server in self.servers:
            assert server.ledger is not None
            if server.ledger.named(ask.name):
                self.fail(f"{server.name} still works for {ask.name}, {GONE_S:g} s after its client has left")
        for router in self.routers:
            if router.router is not None and any(ask.name == id for _, id, _ in router.router.live):
                self.fail(f"{router.name} still has {ask.name}, {GONE_S:g} s after its client has left")

    def _keyed(self) -> list[str]:
        """Answers that are made for an Idempotency-Key, whether their client is there or not."""
        names = [ask.name for ask in self.plan.asks if "idempotency-key" in ask.headers]
        ledgers = [server.ledger for server in self.servers if server.ledger is not None]
        return [name for name in names if any(ledger.named(name) for ledger in ledgers)]

    def _unwanted(self) -> set[tuple[str, int, int]]:
        """What engines have not confirmed to have ended."""
        running = [server for server in self.servers if server.engines is not None]
        replicas = [(server.name, replica) for server in running for replica in server.engines.replicas]  # type: ignore[union-attr]
        return {(name, r.index, id) for name, r in replicas if r.client is not None for id in r.client._left}

    async def _all_end(self, asking: list[asyncio.Task[None]]) -> None:
        waiting: list[asyncio.Task[None]] = [*asking, *self._jobs]
        await asyncio.wait(waiting, timeout=END_S)
        for ask, task in zip(self.plan.asks, asking, strict=True):
            if not task.done():
                self.fail(f"{ask.name} has had no end {END_S:g} s after the last trouble: {ask}")
        for job in self._jobs:
            if not job.done():
                self.fail(f"an operator waits for ever: {job}")
        for task in waiting:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.fail(f"the simulation failed: {''.join(traceback.format_exception(error))}")

    # -- operators, and what goes wrong ---------------------------------------------------------

    async def _do_deeds(self) -> None:
        began_s = self.loop.time()
        for deed in self.plan.deeds:
            await asyncio.sleep(max(began_s + deed.at_s - self.loop.time(), 0))
            self.report.deeds[deed.what] += 1
            self.note(None, f"{deed.what} {deed.who} {deed.more or ''} for {deed.lasts_s:g} s")
            self._jobs.append(self.operator.spawn(self._deeds.do(deed)))
        await asyncio.sleep(max(began_s + WINDOW_S - self.loop.time(), 0))

    async def control(
        self, to: str, method: str, path: str, body: Any = None, tenant: str | None = None
    ) -> ReceivedAnswer:
        """A control call; one to a router that is up is always answered."""
        self._calls += 1
        self._paused |= path == "/v1/pause"
        self.pauses += path == "/v1/pause"
        self.resumes += path in ("/v1/resume", "/v1/update_weights")
        named = "/v1/requests/ID" if path.startswith("/v1/requests/") else path.partition("?")[0]
        self.report.controls[f"{method} {named}"] += 1
        number, address = self._calls, self.hosts[to].address
        self.note(self.operator, f"call {number} to {to}: {method} {path} {body or ''}")
        headers = {"authorization": f"Bearer {KEY}"} if tenant is None else self._key(tenant)
        called, began_s, holds = self.hosts[to].host, self.loop.time(), len(self._held_live.get(to, ()))
        resumes, away_s = self.resumes, called.away_s
        if path == "/v1/pause":
            self._pausers.add(to)
        reply = await call(address, method, path, body, headers, ClientBehaviour(patience_s=CALL_S))
        self.note(self.operator, f"call {number}: {reply.status} {bytes(reply.body)[:300]!r} {reply.broken}")
        if reply.broken.startswith("no end"):
            self.fail(f"{method} {path} to {to} was not answered within {CALL_S:g} s")
        self.resumes += path in ("/v1/resume", "/v1/update_weights")
        if reply.broken and to in ROUTERS and not self.report.deeds["kill_router"]:
            self.fail(f"{method} {path}: the router hung up: {reply.broken}")
        if not reply.broken:
            self._check_answer(to, path, body, reply, called.away_s - away_s)
        if path == "/v1/pause" and reply.status == 200:
            self._check_paused()
            held = self._held_live.get(to, [])[holds:]
            if resumes == self.resumes and body and body.get("mode", "abort") == "abort":
                self._check_obeyed(held, began_s)
        if reply.status >= 500 and reply.status not in (502, 503, 504):
            self.fail(f"{method} {path} to {to} answered {reply.status}: {bytes(reply.body)!r}")
        return reply

    def _check_paused(self) -> None:
        """What is paused by aborting has nothing that was begun."""
        for engine in self.processes.living:
            if engine.loop is None or (engine.loop.control.state, engine.loop.control.mode) != ("paused", "abort"):
                continue
            begun = [seq for seq in engine.loop.scheduler.sequences.values() if seq.started_s is not None]
            if begun:
                self.fail(f"{engine.host.name} is paused, and still has {begun}")

    def _key(self, tenant: str) -> dict[str, str]:
        return hostile.key_of(tenant if self.plan.tenants else "")

    def _check_answer(self, to: str, path: str, body: Any, reply: ReceivedAnswer, away_s: float) -> None:
        """What holds of every control answer, whatever has happened."""
        complaints: list[str] = []
        dark = any(deed.what == "lose_machine" and deed.who == to for deed in self.plan.deeds)  # and out of reach
        if not dark and not (path == "/v1/update_weights" and body and "strategy" in body):
            complaints += promises.late_answer(f"{path} to {to}", reply, promises.timeout_of(path, body), away_s)
        if reply.status in (200, 202) and to in ROUTERS and not self.liars:
            told = reply.json()
            if path != "/v1/requests" or len(self.routers) == 1:  # which knows where each request is
                complaints += promises.lists_twice(path, told, self._ids)
            if (
                reply.status == 200
                and path == "/v1/pause"
                and not any(deed.what in hostile.ASKING for deed in self.plan.deeds)
            ):
                # Another router moves a request from a server that is paused to one that is about to be.
                moving = [ask for ask in self.plan.asks if ask.routed and ask.to != to]
                asks = (*self.plan.asks, *moving * (len(self.servers) - 1))
                complaints += promises.overcounts(told["result"], asks, reply.began_s)
        if to in ROUTERS and self.liars and not self._other_trouble() and not self.plan.update_breaks:
            others = [server.url for server in self.servers if server.name not in self.liars]
            complaints += promises.slanders(_result_of(reply), others)
        for complaint in complaints:
            self.fail(complaint)

    def _other_trouble(self) -> bool:
        return any(deed.what not in (*hostile.HARMLESS, *MADE_UP_FOR) for deed in self.plan.deeds)

    def _check_obeyed(self, held: list[tuple[Exchange, ...]], began_s: float) -> None:
        """71: what a router had accepted when it was paused by aborting is over when the pause is said to be done."""
        if len(held) != 1:
            return  # another pause at the same time
        slow = {ask.id for ask in self.plan.asks if ask.manners.stalls or ask.manners.slow_s}  # not all is read yet
        if going_on := [exchange.id for exchange in held[0] if not exchange.over and exchange.id not in slow]:
            self.fail(f"71: the fleet is paused by aborting, and {going_on} have not ended")

    def restart(self, server: SimHost) -> None:
        if not server.alive:
            self.note(server.host, "starts again")
            server.start()

    # -- weights ------------------------------------------------------------------------------

    def new_weights(self) -> dict[str, Any]:
        """What an update is asked with."""
        self.version += 1
        path = self._weights(self.version)
        if not path.exists():
            path.write_bytes(b"")
        return {"path": str(path), "version": self.version}

    def _weights(self, version: int) -> Path:
        return self._folder / f"weights-{version}.safetensors"

    def updated(self, via: str, version: int, reply: ReceivedAnswer, processes: dict[SimServer, SimProcess]) -> None:
        """`processes`: of the servers when the update began; one that was started anew since may have older weights."""
        followed = reply.status == 200
        self.agreed = followed and (self.agreed or version == self.version)  # a newer one may have been refused
        if followed:
            self.floors[via] = max(version, self.floors.get(via, 0))
            had = reply.json()["result"]["workers"]  # others may not have been of the fleet just then
            for server in self.servers:
                if server.alive and server.host is processes[server] and server.url in had:
                    self._held[server.name] = server.host, version

    def _floor(self, to: str) -> int:
        """The oldest weights that may answer whoever asks now."""
        if to in ROUTERS:
            return self.floors.get(to, 0)
        host, version = self._held.get(to, (None, 0))
        return version if host is self.hosts[to].host else 0

    def spoil_weights(self) -> None:
        """The newest file is another one now: who starts cannot have those weights."""
        self._spoiled[self._weights(self.version).name] += 1
        self.agreed &= not self.version

    def _stamps(self, path: str | Path) -> Stamps:
        name = Path(path).name
        return {name: (1, 0, self._spoiled[name])}

    # -- the end -----------------------------------------------------------------------------

    async def _set_right(self) -> None:
        """No more trouble, and operators who see to it that the fleet runs again."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CALL_S + END_S)
        self.network.heal()
        self.processes.update_breaks = 0.0
        for host in (*self.routers, *self.servers):
            host.host.go_on()
        await self._until(self._started, UP_S, "everybody is up again")
        if self.plan.deeds:
            await self.operator.spawn(self._resume_all())

    def _started(self) -> bool:
        """Whether everybody listens; who has ended, perhaps because its engine was killed before it ran, is started."""
        for host in (*self.routers, *self.servers):
            self.restart(host)
        return self._listen(self.hosts.values())

    async def _resume_all(self) -> None:
        """Through each router: none of them knows what was asked of the other."""
        for router in self.routers:
            for _ in range(TRIES):
                if not self.agreed:
                    await self._deeds.update_all(router.name, "abort")
                reply = await self.control(router.name, "POST", "/v1/resume")
                if reply.status == 200 and self.agreed:
                    break
                await asyncio.sleep(1.0)
            else:
                self.fail(f"the fleet cannot be made one again: {bytes(reply.body)!r}")

    def _circumstances(self, ask: PlannedRequest) -> Circumstances:
        deeds, plan = self.report.deeds, self.plan
        return Circumstances(
            busy=plan.settings.most_choices < 64 or plan.max_queue < 64,
            abort=any(deed.ends(ask) for deed in plan.deeds),
            pause=self._paused
            or ((plan.servers - len(self._removed) <= 1 or not ask.routed) and bool(deeds["roll"])),
            trouble=self._in_trouble(ask),
            updated=self.version > 0,
            reschedules=plan.pace.reschedules,
        )

    @property
    def _removed(self) -> set[str]:
        """Servers that a router is without for a while."""
        return {deed.who for deed in self.plan.deeds if deed.what == "remove"}

    @property
    def _outdated(self) -> set[str]:
        """Servers that came back without the newest weights."""
        return {deed.who for deed in self.plan.deeds if deed.what == "return_old"}

    def _in_trouble(self, ask: PlannedRequest) -> bool:
        """Whether it may fail: a router with several workers makes up for the loss of engines and connections."""
        if ask.routed and self.plan.servers - len(self._removed) > 1:
            lacking = self.processes.quarantined | self._removed
            if lacking and len(lacking | self._outdated) >= self.plan.servers:
                return True  # at some time, perhaps, no server had weights
            return any(name not in (*MADE_UP_FOR, *hostile.HARMLESS) for name in self.report.deeds)
        if self.processes.broken_updates:
            return True  # an engine whose update broke off answers nothing until another one succeeds
        return any(name in (*TROUBLE, *DEADLY, *hostile.STOPS, "remove", "roll") for name in self.report.deeds)

    def _count(self) -> None:
        counts = self.report.counts
        counts["requests"] += len(self.plan.asks)
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
        faults, kinds = self.report.faults, (*TROUBLE, *KV_TROUBLE, *DEADLY, *hostile.DEEDS)
        self.report.ends = ends = tally(self.plan.asks)
        faults += Counter({what: n for what, n in self.report.deeds.items() if what in kinds})
        faults += self.network.harm
        faults["client left"] += ends["left"]
        faults["slow reader"] += sum(bool(ask.manners.slow_s) for ask in self.plan.asks)
        faults["stalled reader"] += sum(ask.manners.stalls for ask in self.plan.asks)
        faults["deadline passed"] += ends["deadline"]
        faults["queue full"] += ends["429 queue_full"]
        faults["update broke off"] += self.processes.broken_updates
        self.report.faults = +faults

    def _tear_down(self) -> None:
        """End all hosts; whatever does not end then has escaped its owner."""
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
            self.fail(f"tasks that do not end: {error}, {list(self.loop.tasks)}")
        self.loop.close()

    async def _gone(self) -> None:
        here = asyncio.current_task()
        while waiting := [task for task in self.loop.tasks if task is not here]:
            await asyncio.wait(waiting)


def _result_of(reply: ReceivedAnswer) -> Any:
    """Of an answer or of an error."""
    told = reply.json() if reply.whole else {}
    return told.get("result") or told.get("error", {}).get("result") if isinstance(told, dict) else None


class _listening:  # noqa: N801 - reads as `with _listening(log)`
    """Logs of ours, uvicorn's and asyncio's go to one handler alone."""

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
    fast_path: FastPath = PYTHON,
) -> SimulationReport:
    """Run one seed; without `actors`, as it was before there were hostile ones."""
    # Always the same folder: its name is in what is sent, and that must not differ from run to run.
    folder = Path(tempfile.gettempdir()) / f"headgate-simulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    plan = hostile.draw(seed, only) if actors else draw(seed, only)
    return World(seed, plan, chatty=chatty, folder=folder, fast_path=fast_path).run()
