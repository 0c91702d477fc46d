"""What operators do in a run and what goes wrong, each a method that is named like its deed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from headgate.protocol.request import Ticket
from headgate.testing.sim.caller import ReceivedAnswer
from headgate.testing.sim.engine import EngineProcess
from headgate.testing.sim.hostile_deeds import HostileDeeds
from headgate.testing.sim.hosts import SimServer
from headgate.testing.sim.loop import SimProcess
from headgate.testing.sim.network import Damage, SimTransport
from headgate.testing.sim.script import ROUTERS, PlannedAction

if TYPE_CHECKING:
    from headgate.router.fleet.worker import Worker
    from headgate.testing.sim.world import World

END_S = 60.0  # for a server that was asked to end
BACK_S = 60.0  # for whoever was away to be like the others


def _states(reply: ReceivedAnswer) -> dict[str, str]:
    """Of the workers that have followed a control call, as it was answered; none if it was not."""
    told = reply.json() if reply.whole else {}
    result = told.get("result") if isinstance(told, dict) else None
    workers = result.get("workers", {}) if isinstance(result, dict) else {}
    return {url: each["state"] for url, each in workers.items() if "error" not in each}


class Deeds(HostileDeeds):
    def __init__(self, world: World) -> None:
        self._world = world
        self._loop, self._network, self._processes = world.loop, world.network, world.processes

    async def do(self, deed: PlannedAction) -> None:
        await getattr(self, deed.what)(deed)

    def _engine(self, deed: PlannedAction) -> EngineProcess | None:
        """One of a server's engines."""
        engines = [e for e in self._processes.living if e.host.name.startswith(deed.who + "/")]
        return engines[int(deed.more["which"] * len(engines))] if engines else None

    # -- processes ----------------------------------------------------------------------

    async def kill_engine(self, deed: PlannedAction) -> None:
        if (engine := self._engine(deed)) is not None:
            engine.end(-9)

    async def kill_server(self, deed: PlannedAction) -> None:
        server = self._world.hosts[deed.who]
        server.host.kill()
        await asyncio.sleep(deed.lasts_s)
        self._world.restart(server)

    async def kill_router(self, deed: PlannedAction) -> None:
        world, router = self._world, self._world.hosts[deed.who]
        for ask in world.plan.asks:
            ask.disturbed |= ask.to == deed.who
        router.host.kill()
        world.floors.pop(deed.who, None)
        world.resumes += 1  # of a pause it will know nothing
        await asyncio.sleep(min(deed.lasts_s, 1.0))
        world.restart(router)
        world.agreed &= not world.version  # a new router does not know what the last one was told

    async def lose_machine(self, deed: PlannedAction) -> None:
        self._network.darken(deed.who)
        self._world.hosts[deed.who].host.kill()
        await asyncio.sleep(deed.lasts_s)
        self._network.lighten(deed.who)
        self._world.restart(self._world.hosts[deed.who])

    async def stop_engine(self, deed: PlannedAction) -> None:
        if (engine := self._engine(deed)) is not None:
            engine.host.stop()
            await asyncio.sleep(deed.lasts_s)
            engine.host.go_on()

    async def stall_engine(self, deed: PlannedAction) -> None:
        """The thread of its loop hangs; those of its sockets do not."""
        engine = self._engine(deed)
        if engine is not None and engine.turner is not None:
            engine.turner.stalled = True
            await asyncio.sleep(deed.lasts_s)
            engine.turner.go_on()

    async def slow_engine(self, deed: PlannedAction) -> None:
        engines = [e for e in self._processes.living if e.host.name.startswith(deed.who + "/")]
        for executor in [engine.executor for engine in engines if engine.executor is not None]:
            executor.slowness = deed.more["times"]
        await asyncio.sleep(deed.lasts_s)
        for executor in [engine.executor for engine in engines if engine.executor is not None]:
            executor.slowness = 1.0

    async def stop_server(self, deed: PlannedAction) -> None:
        host = self._world.hosts[deed.who].host
        host.stop()
        await asyncio.sleep(deed.lasts_s)
        host.go_on()

    async def shutdown(self, deed: PlannedAction) -> None:
        server = self._world.hosts[deed.who]
        task = server.task
        if not server.alive or task is None:
            return
        server.signals.send()
        await asyncio.wait([task], timeout=END_S)
        if not task.done():
            self._world.fail(f"{server.name} did not end within {END_S:g} s of being asked to")
        server.host.kill()
        await asyncio.sleep(deed.lasts_s)
        self._world.restart(server)

    async def return_old(self, deed: PlannedAction) -> None:
        """The newest weights can no longer be had, and an engine dies that comes back with what it starts with."""
        self._world.spoil_weights()
        await self.kill_engine(deed)

    async def jump_clock(self, deed: PlannedAction) -> None:
        self._loop.skew_s += deed.more["by_s"]

    # -- the network ----------------------------------------------------------------------

    async def cut(self, deed: PlannedAction) -> None:
        await self._cut_between((deed.via, deed.who), deed.lasts_s)

    async def cut_peers(self, deed: PlannedAction) -> None:
        for server in self._world.servers:
            if server.name != deed.who:
                self._network.cut(server.name, deed.who)
        await asyncio.sleep(deed.lasts_s)
        for server in self._world.servers:
            self._network.mend(server.name, deed.who)

    async def _cut_between(self, pair: tuple[str, str], lasts_s: float) -> None:
        self._network.cut(*pair)
        await asyncio.sleep(lasts_s)
        self._network.mend(*pair)

    async def slow_network(self, deed: PlannedAction) -> None:
        others = [*ROUTERS, *(server.name for server in self._world.servers if server.name != deed.who)]
        for other in others:
            self._network.slow_down(other, deed.who, deed.more["most_s"])
        await asyncio.sleep(deed.lasts_s)
        for other in others:
            self._network.slow_down(other, deed.who, 0.0)

    async def reset(self, deed: PlannedAction) -> None:
        world = self._world
        asks = {f"clients/{ask.name}": ask for ask in world.plan.asks}
        for transport in self._to_reset(deed):
            for host in (transport.host, transport.peer.host):
                if host.name in asks:
                    asks[host.name].disturbed = True
            world.note(transport.host, f"loses its connection to {transport.peer.host.name}")
            transport.break_off()

    def _to_reset(self, deed: PlannedAction) -> Iterator[SimTransport]:
        """Connections that a plan draws, one after the other; or all from one host to another that it names."""
        if "between" in deed.more:
            named = [t for t in self._network.transports if [t.host.name, t.peer.host.name] == deed.more["between"]]
            yield from named
            return
        for which in deed.more["which"]:
            transports = [t for t in self._network.transports if t.host is not self._world.operator]
            transports = [t for t in transports if t.peer.host is not self._world.operator]
            if transports:
                yield transports[int(which * len(transports))]

    # -- KV on its way ----------------------------------------------------------------------

    async def corrupt_kv(self, deed: PlannedAction) -> None:
        await self._damage(Damage(corrupted=deed.more["share"]), deed.lasts_s)

    async def cut_kv_short(self, deed: PlannedAction) -> None:
        await self._damage(Damage(cut_short=deed.more["share"]), deed.lasts_s)

    async def _damage(self, damage: Damage, lasts_s: float) -> None:
        self._network.damage = damage
        await asyncio.sleep(lasts_s)
        if self._network.damage is damage:
            self._network.damage = None

    async def kill_in_transfer(self, deed: PlannedAction) -> None:
        """The next transfer that comes to some point loses the engine that has come to it, or the other one."""
        struck: asyncio.Future[EngineProcess | None] = self._loop.create_future()

        def on_stage(engine: EngineProcess, stage: str, ticket: Ticket | None) -> None:
            if stage == deed.more["stage"] and not struck.done():
                peer = self._processes.serving(ticket) if ticket is not None and deed.more["peer"] else None
                struck.set_result(peer or engine)

        self._processes.watchers.append(on_stage)
        try:
            async with asyncio.timeout(deed.lasts_s):
                engine = await struck
                await asyncio.sleep(deed.more["after_s"])
            if engine is not None and engine.code is None:
                self._world.report.faults[f"killed at {deed.more['stage']}"] += 1
                engine.end(-9)
        except TimeoutError:
            pass  # there was no such transfer
        finally:
            self._processes.watchers.remove(on_stage)

    # -- operators ----------------------------------------------------------------------------

    async def abort(self, deed: PlannedAction) -> None:
        await self._abort(deed.via, deed.more)

    async def abort_all(self, deed: PlannedAction) -> None:
        await self._abort(deed.via, {"abort_all": True})

    async def abort_tags(self, deed: PlannedAction) -> None:
        await self._abort(deed.via, deed.more)

    async def abort_and_kill(self, deed: PlannedAction) -> None:
        """Whoever has one of those requests dies in the same moment."""
        world, more = self._world, deed.more
        having = [s for s in world.servers if any(s.ledger and s.ledger.named(name) for name in more["req_ids"])]
        kill = world.operator.spawn(self._kill_soon(having, deed))
        await self._abort(deed.via, {"req_ids": more["req_ids"], "wait": more["wait"]})
        await kill

    async def _kill_soon(self, servers: list[SimServer], deed: PlannedAction) -> None:
        await asyncio.sleep(deed.more["after_s"])
        for server in servers:
            if deed.more["whole"]:
                server.host.kill()
            else:
                for engine in [e for e in self._processes.living if e.host.name.startswith(server.name + "/")]:
                    engine.end(-9)
        await asyncio.sleep(min(deed.lasts_s, 1.0))
        for server in servers:
            self._world.restart(server)

    async def _abort(self, via: str, body: dict[str, Any]) -> None:
        world, asked_s = self._world, self._loop.time()
        reply = await world.control(via, "POST", "/v1/abort_requests", body)
        if reply.status not in (200, 202):
            return
        result = reply.json()["result"]
        told = {each["request_id"]: each["output_token_count"] for each in result["aborted"]}
        world.told_aborted(via, asked_s, told)
        for each in result["errors"]:
            if each["code"] == "not_told":  # it was found, and has been asked to end
                world.asked_to_end[via].add(each["request_id"])

    async def pause(self, deed: PlannedAction) -> None:
        world = self._world
        paused = _states(await world.control(deed.via, "POST", "/v1/pause", deed.more))
        await asyncio.sleep(deed.lasts_s)
        pauses, lives = world.pauses, {server: self._life(server, deed.via) for server in world.servers}
        reply = await world.control(deed.back, "POST", "/v1/resume")
        if deed.back != deed.via and reply.status == 200:
            had = _states(reply)
            # A server that had not followed the pause may yet do so, for the router that was asked for it.
            both = [url for url, state in paused.items() if state == "paused" and url in had]
            resumed = {server: life for server, life in lives.items() if server.url in both and None not in life}
            await self._let_go(
                deed.via,
                lambda: world.pauses != pauses or not any(self._life(s, deed.via) == resumed[s] for s in resumed),
            )

    def _life(self, server: SimServer, router: str) -> tuple[SimProcess | None, Worker | None]:
        """Its process, and the worker that it is to a router: another one after it was removed and has joined again."""
        return server.host if server.alive else None, self._world.worker(router, server)

    async def _let_go(self, router: str, overtaken: Callable[[], bool]) -> None:
        """A router must notice that the fleet which it has paused was resumed by another one, if any of it still lives."""
        until_s = self._loop.time() + BACK_S
        while self._world.holds(router) and not overtaken():
            if self._loop.time() > until_s:
                self._world.fail(f"{router} holds a fleet that was resumed {BACK_S:g} s ago")
                return
            await asyncio.sleep(0.05)

    async def pause_one(self, deed: PlannedAction) -> None:
        await self._world.control(deed.who, "POST", "/v1/pause", deed.more)
        await asyncio.sleep(deed.lasts_s)
        await self._world.control(deed.who, "POST", "/v1/resume")

    async def pause_and_kill(self, deed: PlannedAction) -> None:
        """Somebody dies in a pause of the whole fleet, and must be paused when he is back."""
        world, body = self._world, {"mode": deed.more["mode"], "timeout": 5}
        resumes, host = world.resumes, world.hosts[deed.who].host
        reply = await world.control(deed.via, "POST", "/v1/pause", body)
        # Whoever is taken out of the fleet is not paused with it.
        removed = any(other.what == "remove" and other.who == deed.who for other in world.plan.deeds)
        if reply.status == 200 and not removed:
            if deed.more["whole"]:
                await self.kill_server(deed)
            else:
                await self.kill_engine(deed)
            await self._come_back_paused(deed, host, lambda: world.resumes != resumes)
        await world.control(deed.via, "POST", "/v1/resume")

    async def _come_back_paused(self, deed: PlannedAction, host: SimProcess, overtaken: Callable[[], bool]) -> None:
        """`host`: the server when the pause was asked. One that was started anew since runs until its router pauses it."""
        world, until_s = self._world, self._loop.time() + BACK_S
        server = next(server for server in world.servers if server.name == deed.who)
        while not overtaken():
            if server.failed:  # its engine was killed before it ran
                world.restart(server)
            states = world.engine_states(server)
            if not deed.more["whole"] and "running" in states and server.host is host:
                world.fail(f"an engine of {server.name} came back to a pause and runs")
                return
            if states and set(states) == {"paused"}:
                return
            if self._loop.time() > until_s:
                world.fail(f"{server.name} came back to a paused fleet, and is not paused: {states}")
                return
            await asyncio.sleep(0.02)

    async def update(self, deed: PlannedAction) -> None:
        await self.update_all(deed.via, deed.more["mode"])

    async def update_all(self, via: str, mode: str) -> None:
        world = self._world
        await world.control(via, "POST", "/v1/pause", {"mode": mode, "timeout": 5})
        await self._update(via, world.new_weights())
        await world.control(via, "POST", "/v1/resume")

    async def _update(self, via: str, body: dict[str, Any]) -> None:
        world = self._world
        processes = {server: server.host for server in world.servers}
        reply = await world.control(via, "POST", "/v1/update_weights", body)
        world.updated(via, body["version"], reply, processes)

    async def roll(self, deed: PlannedAction) -> None:
        await self._update(deed.via, self._world.new_weights() | {"strategy": "rolling", "drain_timeout": 2})

    async def flush(self, deed: PlannedAction) -> None:
        await self._world.control(deed.via, "POST", "/v1/flush_cache")

    async def remove(self, deed: PlannedAction) -> None:
        world = self._world
        server = next(server for server in world.servers if server.name == deed.who)
        await world.control(deed.via, "DELETE", f"/v1/workers?url={server.url}&timeout=2")
        await asyncio.sleep(deed.lasts_s)
        role = world.roles[world.servers.index(server)]
        await world.control(deed.via, "POST", "/v1/workers", {"url": server.url, "role": role})

    async def look(self, deed: PlannedAction) -> None:
        for path in ("/v1/requests", "/health", "/v1/workers", "/v1/loads", "/v1/is_paused"):
            await self._world.control(deed.via, "GET", path)
        await self._world.control(deed.who, "GET", "/v1/requests")
