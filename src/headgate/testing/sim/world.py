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
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headgate.config import RouteConfig
from headgate.testing.sim.caller import Manners, Reply, call
from headgate.testing.sim.engine import Processes
from headgate.testing.sim.hosts import KEY, SimHost, SimRouter, SimServer, simulated, workers
from headgate.testing.sim.judge import Circumstances, judge, judge_abort, tally
from headgate.testing.sim.loop import HOST, Host, Hung, SimLoop
from headgate.testing.sim.network import Network
from headgate.testing.sim.script import MADE_UP_FOR, ROUTER, TROUBLE, WINDOW_S, Ask, Deed, Plan, draw

UP_S = 30.0  # for the fleet to come up
CALL_S = 120.0  # for a control call to be answered, whatever its own timeout
END_S = 200.0  # for everything to end after the last trouble
SETTLE_S = 3.0
GONE_S = 0.25  # for the news that a client has left to be everywhere, in good weather
FOLLOW_S = 60.0  # for workers that were away to be like the others
TRIES = 40  # of an operator who wants the fleet to run again


@dataclass
class Report:
    """What a run was like."""

    seed: int
    failures: list[str] = field(default_factory=list)
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
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
    def __init__(self, seed: int, plan: Plan, *, chatty: bool, folder: Path) -> None:
        self.report = Report(seed)
        self.chatty = chatty
        self.plan = plan
        self._seed = seed
        self._folder = folder  # for weights, and for what a crash leaves
        self._version = 0  # of the newest weights that anybody was given
        self._jobs: list[asyncio.Task[None]] = []  # of operators
        self._agreed = True  # the last update has reached everybody
        self._paused = False  # somebody has asked for that
        self._aborted: dict[str, int] = {}  # what callers of an abort were told
        self._calls = 0

    # -- for everybody --------------------------------------------------------------------

    def note(self, host: Host | None, what: str) -> None:
        self.report.trace.append((self.loop.time(), host.name if host else "-", what))

    def fail(self, what: str) -> None:
        self.report.failures.append(what)
        self.note(None, f"WRONG: {what}")

    def _rng(self, use: str) -> random.Random:
        return random.Random(f"{use} {self._seed}")

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> Report:
        self.loop = loop = SimLoop()
        loop.set_exception_handler(self._on_exception)
        loop.network = self.network = Network(loop, self._rng("network"), self.plan.weather)
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
        with simulated(loop, self._rng("secrets")), _listening(log):
            try:
                loop.run_until_complete(self._main())
            except Hung as error:
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

    def _on_crash(self, host: Host, error: Exception) -> None:
        self.fail(f"{host.name} crashed:\n{''.join(traceback.format_exception(error))}")

    async def _main(self) -> None:
        self._build()
        await self._come_up()
        self._client = Host(self.loop, "clients")
        self._operator = Host(self.loop, "operator")
        asking = [self._host_of(ask).spawn(self._ask(ask)) for ask in self.plan.asks]
        await self._do_deeds()
        await self._set_right()
        await self._all_end(asking)
        for ask in self.plan.asks:
            for complaint in judge(ask, self._circumstances(ask)):
                self.fail(complaint)
            if ask.name in self._aborted:
                for complaint in judge_abort(ask, self._aborted[ask.name]):
                    self.fail(complaint)
        await asyncio.sleep(SETTLE_S)
        await self._until(self._all_ready, FOLLOW_S, "every worker gets requests again")
        for complaint in self._left_behind():
            self.fail(complaint)
        self._count()

    def _build(self) -> None:
        plan = self.plan
        self.servers = [SimServer(self.loop, f"server{i}", plan.settings) for i in range(plan.servers)]
        config = RouteConfig(
            workers=workers(self.servers),
            policy=plan.policy,
            max_in_flight=plan.max_in_flight,
            max_queue=plan.max_queue,
            admin_key=KEY,
            worker_key=KEY,
        )
        self.router = SimRouter(self.loop, ROUTER, config, self._seed)
        self.hosts: dict[str, SimHost] = {host.name: host for host in (self.router, *self.servers)}

    async def _come_up(self) -> None:
        for server in self.servers:
            server.start()
        await self._until(lambda: all(self._listens(server) for server in self.servers), UP_S, "the servers are up")
        self.router.start()
        await self._until(lambda: self._listens(self.router), UP_S, "the router is up")

    def _listens(self, host: SimHost) -> bool:
        return host.address in self.network.listeners

    def _all_ready(self) -> bool:
        assert self.router.router is not None
        return all(worker.state == "ready" for worker in self.router.router.fleet)

    async def _until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> bool:
        until_s = self.loop.time() + timeout_s
        while not holds():
            if self.loop.time() > until_s:
                self.fail(f"not within {timeout_s:g} s: {what}")
                return False
            await asyncio.sleep(0.05)
        return True

    # -- clients ------------------------------------------------------------------------------

    def _host_of(self, ask: Ask) -> Host:
        return Host(self.loop, f"clients/{ask.name}", self._client)

    async def _ask(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s)
        host = HOST.get()
        self.note(host, f"asks {ask.to}: {ask.path} {ask.body}")
        address = self.hosts[ask.to].address
        await call(address, "POST", ask.path, ask.body, ask.headers, ask.manners, ask.reply)
        self.note(host, f"got {ask.reply.status}, {len(ask.reply.body)} bytes {ask.reply.broken}")
        if ask.reply.left and self.plan.calm and "idempotency-key" not in ask.headers:
            await self._check_gone(ask)
        if ask.retries and ask.reply.broken:
            await asyncio.sleep(0.2)
            self.report.counts["asked again"] += 1
            ask.reply = await call(address, "POST", ask.path, ask.body, ask.headers)
            self.note(host, f"asked again and got {ask.reply.status}, {len(ask.reply.body)} bytes {ask.reply.broken}")

    async def _check_gone(self, ask: Ask) -> None:
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
        assert self.router.router is not None
        if ask.name in self.router.router.live:
            self.fail(f"the router still has {ask.name}, {GONE_S:g} s after its client has left")

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
            work: Coroutine[Any, Any, None] = getattr(self, f"_{deed.what}")(deed)
            self._jobs.append(self._operator.spawn(work))
        await asyncio.sleep(max(began_s + WINDOW_S - self.loop.time(), 0))

    async def _control(self, to: str, method: str, path: str, body: Any = None) -> Reply:
        """A control call; one to a router that is up is always answered."""
        self._calls += 1
        self._paused |= path == "/v1/pause"
        self.report.counts["control calls"] += 1
        number, address = self._calls, self.hosts[to].address
        self.note(self._operator, f"call {number} to {to}: {method} {path} {body or ''}")
        headers = {"authorization": f"Bearer {KEY}"}
        reply = await call(address, method, path, body, headers, Manners(patience_s=CALL_S))
        self.note(self._operator, f"call {number}: {reply.status} {bytes(reply.body)[:300]!r} {reply.broken}")
        if reply.broken.startswith("no end"):
            self.fail(f"{method} {path} to {to} was not answered within {CALL_S:g} s")
        if reply.broken and to == ROUTER and not self.report.deeds["kill_router"]:
            self.fail(f"{method} {path}: the router hung up: {reply.broken}")
        if path == "/v1/pause" and reply.status == 200:
            self._check_paused()
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

    async def _kill_engine(self, deed: Deed) -> None:
        engines = [e for e in self.processes.living if e.host.name.startswith(deed.who + "/")]
        if engines:
            engines[int(deed.more["which"] * len(engines))].end(-9)

    async def _kill_server(self, deed: Deed) -> None:
        server = self.hosts[deed.who]
        server.host.kill()
        await asyncio.sleep(deed.lasts_s)
        self._restart(server)

    async def _kill_router(self, deed: Deed) -> None:
        for ask in self.plan.asks:
            ask.disturbed |= ask.to == ROUTER
        self.router.host.kill()
        await asyncio.sleep(min(deed.lasts_s, 1.0))
        self._restart(self.router)
        self._agreed &= not self._version  # a new router does not know what the last one was told

    async def _jump_clock(self, deed: Deed) -> None:
        self.loop.skew_s += deed.more["by_s"]

    def _restart(self, server: SimHost) -> None:
        if not server.alive:
            self.note(server.host, "starts again")
            server.start()

    async def _lose_machine(self, deed: Deed) -> None:
        self.network.darken(deed.who)
        self.hosts[deed.who].host.kill()
        await asyncio.sleep(deed.lasts_s)
        self.network.lighten(deed.who)
        self._restart(self.hosts[deed.who])

    async def _stop_engine(self, deed: Deed) -> None:
        engines = [e for e in self.processes.living if e.host.name.startswith(deed.who + "/")]
        if engines:
            host = engines[int(deed.more["which"] * len(engines))].host
            host.stop()
            await asyncio.sleep(deed.lasts_s)
            host.go_on()

    async def _stop_server(self, deed: Deed) -> None:
        host = self.hosts[deed.who].host
        host.stop()
        await asyncio.sleep(deed.lasts_s)
        host.go_on()

    async def _cut(self, deed: Deed) -> None:
        self.network.cut(ROUTER, deed.who)
        await asyncio.sleep(deed.lasts_s)
        self.network.mend(ROUTER, deed.who)

    async def _break(self, deed: Deed) -> None:
        asks = {f"clients/{ask.name}": ask for ask in self.plan.asks}
        for which in deed.more["which"]:
            transports = [t for t in self.network.transports if t.host is not self._operator]
            transports = [t for t in transports if t.peer.host is not self._operator]
            if not transports:
                return
            transport = transports[int(which * len(transports))]
            for host in (transport.host, transport.peer.host):
                if host.name in asks:
                    asks[host.name].disturbed = True
            self.note(transport.host, f"loses its connection to {transport.peer.host.name}")
            transport.break_off()

    async def _shutdown(self, deed: Deed) -> None:
        server = self.hosts[deed.who]
        task = server.task
        if not server.alive or task is None:
            return
        server.signals.send()
        await asyncio.wait([task], timeout=60)
        if not task.done():
            self.fail(f"{server.name} did not end within 60 s of being asked to")
        server.host.kill()
        await asyncio.sleep(deed.lasts_s)
        self._restart(server)

    async def _abort(self, deed: Deed) -> None:
        reply = await self._control(ROUTER, "POST", "/v1/abort_requests", deed.more)
        if reply.status == 200:
            aborted = reply.json()["result"]["aborted"]
            self._aborted |= {each["request_id"]: each["output_token_count"] for each in aborted}

    async def _abort_all(self, deed: Deed) -> None:
        await self._abort(replace(deed, more={"abort_all": True}))

    async def _abort_tags(self, deed: Deed) -> None:
        await self._abort(deed)

    async def _pause(self, deed: Deed) -> None:
        await self._control(ROUTER, "POST", "/v1/pause", deed.more)
        await asyncio.sleep(deed.lasts_s)
        await self._control(ROUTER, "POST", "/v1/resume")

    async def _pause_one(self, deed: Deed) -> None:
        await self._control(deed.who, "POST", "/v1/pause", deed.more)
        await asyncio.sleep(deed.lasts_s)
        await self._control(deed.who, "POST", "/v1/resume")

    def _weights(self) -> dict[str, Any]:
        self._version += 1
        path = self._folder / f"weights-{self._version}.safetensors"
        if not path.exists():
            path.write_bytes(b"")
        return {"path": str(path), "version": self._version}

    async def _update(self, deed: Deed) -> None:
        await self._update_all(deed.more["mode"])

    async def _update_all(self, mode: str) -> None:
        await self._control(ROUTER, "POST", "/v1/pause", {"mode": mode, "timeout": 5})
        reply = await self._control(ROUTER, "POST", "/v1/update_weights", self._weights())
        self._agreed = reply.status == 200
        await self._control(ROUTER, "POST", "/v1/resume")

    async def _roll(self, deed: Deed) -> None:
        body = self._weights() | {"strategy": "rolling", "drain_timeout": 2}
        reply = await self._control(ROUTER, "POST", "/v1/update_weights", body)
        self._agreed = reply.status == 200

    async def _flush(self, deed: Deed) -> None:
        await self._control(ROUTER, "POST", "/v1/flush_cache")

    async def _remove(self, deed: Deed) -> None:
        url = self.hosts[deed.who].url
        await self._control(ROUTER, "DELETE", f"/v1/workers?url={url}&timeout=2")
        await asyncio.sleep(deed.lasts_s)
        await self._control(ROUTER, "POST", "/v1/workers", {"url": url})

    async def _look(self, deed: Deed) -> None:
        for path in ("/v1/requests", "/health", "/v1/workers", "/v1/loads", "/v1/is_paused"):
            await self._control(ROUTER, "GET", path)
        await self._control(deed.who, "GET", "/v1/requests")

    # -- the end -----------------------------------------------------------------------------

    async def _set_right(self) -> None:
        """No more trouble, and operators who see to it that the fleet runs again."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CALL_S + END_S)
        self.network.heal()
        self.processes.update_breaks = 0.0
        for server in self.servers:
            server.host.go_on()
            self._restart(server)
        await self._until(lambda: all(self._listens(s) for s in self.servers), UP_S, "the servers are up again")
        if self.plan.deeds:
            await self._operator.spawn(self._resume_all())

    async def _resume_all(self) -> None:
        for _ in range(TRIES):
            if not self._agreed:
                await self._update_all("abort")
            reply = await self._control(ROUTER, "POST", "/v1/resume")
            if reply.status == 200 and self._agreed:
                return
            await asyncio.sleep(1.0)
        self.fail(f"the fleet cannot be made one again: {bytes(reply.body)!r}")

    def _circumstances(self, ask: Ask) -> Circumstances:
        deeds, plan = self.report.deeds, self.plan
        return Circumstances(
            busy=plan.settings.most_choices < 64 or plan.max_queue < 64,
            abort=any(deed.ends(ask) for deed in plan.deeds),
            pause=self._paused or ((plan.servers == 1 or ask.to != ROUTER) and bool(deeds["roll"])),
            trouble=self._in_trouble(ask),
            updated=self._version > 0,
            reschedules=plan.pace.reschedules,
        )

    def _in_trouble(self, ask: Ask) -> bool:
        """Whether it may fail: a router with several workers makes up for the loss of engines and connections."""
        removed = {deed.who for deed in self.plan.deeds if deed.what == "remove"}
        if ask.to == ROUTER and self.plan.servers > max(len(removed), 1):
            return any(name not in MADE_UP_FOR for name in self.report.deeds)
        return any(name in (*TROUBLE, "remove", "roll") for name in self.report.deeds)

    def _left_behind(self) -> Iterator[str]:
        yield from self._router_left()
        for server in self.servers:
            yield from self._server_left(server)
        for engine in self.processes.living:
            if engine.loop is None:
                continue
            scheduler = engine.loop.scheduler
            scheduler.check()
            if not engine.loop.idle or scheduler.pool.held:
                yield f"{engine.host.name} is not idle: {scheduler!r}, {scheduler.sequences}"

    def _router_left(self) -> Iterator[str]:
        router = self.router.router
        assert router is not None
        if router.live:
            yield f"the router has {list(router.live)} in flight"
        if router.fleet.double_releases:
            yield f"the router has given load back twice, {router.fleet.double_releases} times"
        if router.admission.in_flight or router.admission.waiting:
            yield f"{router.admission.in_flight} places are taken, and {router.admission.waiting} wait for one"
        for worker in router.fleet.everyone:
            if worker.in_flight or worker.pending_tokens:
                yield f"{worker!r} has {worker.pending_tokens} pending tokens"

    def _server_left(self, server: SimServer) -> Iterator[str]:
        ledger, engines = server.ledger, server.engines
        assert ledger is not None and engines is not None
        if ledger.live or ledger.in_flight or ledger.unsettled:
            yield f"{server.name}: {ledger!r}, unsettled: {len(ledger.unsettled)}"
        for replica in engines.replicas:
            client = replica.client
            if client is None:
                yield f"{server.name}: engine {replica.index} is {replica.state}"
            elif client.open_streams or client._left:
                yield f"{server.name}: {client!r}, left {client._left}"

    def _count(self) -> None:
        counts, router = self.report.counts, self.router.router
        assert router is not None
        counts["requests"] += len(self.plan.asks)
        counts["retries"] += router.counters.retries
        counts["resumes"] += router.counters.resumes
        self.report.ends = tally(self.plan.asks)
        for engine in self.processes.engines:
            if engine.loop is not None:
                counts["tokens"] += engine.loop.scheduler.counters.output_tokens
                counts["preemptions"] += engine.loop.scheduler.counters.preemptions

    def _tear_down(self) -> None:
        """End all hosts; whatever does not end then has escaped its owner."""
        for host in self.hosts.values():
            host.host.kill()
        for name in ("_client", "_operator"):
            if hasattr(self, name):
                getattr(self, name).kill()
        try:
            self.loop.deadline_s = self.loop.time() + 120
            self.loop.run_until_complete(self._gone())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except Hung as error:
            self.fail(f"tasks that do not end: {error}, {list(self.loop.tasks)}")
        self.loop.close()

    async def _gone(self) -> None:
        here = asyncio.current_task()
        while waiting := [task for task in self.loop.tasks if task is not here]:
            await asyncio.wait(waiting)


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


def simulate(seed: int, *, chatty: bool = False, only: tuple[str, ...] | None = None) -> Report:
    """Run one seed."""
    # Always the same folder: its name is in what is sent, and that must not differ from run to run.
    folder = Path(tempfile.gettempdir()) / f"headgate-simulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return World(seed, draw(seed, only), chatty=chatty, folder=folder).run()
