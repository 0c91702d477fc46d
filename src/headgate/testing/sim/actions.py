"""Carries out planned actions: calls of operators, and faults. Each method is named like the `kind` of its action."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from headgate.contract.abort import readings
from headgate.protocol.request import Ticket
from headgate.router.fleet.worker import Worker
from headgate.testing.sim.caller import ReceivedAnswer
from headgate.testing.sim.engine import EngineProcess
from headgate.testing.sim.fleet import SimFleet
from headgate.testing.sim.hostile_actions import HostileActions
from headgate.testing.sim.hosts import SimServer
from headgate.testing.sim.loop import SimProcess
from headgate.testing.sim.network import KvDamage, SimTransport
from headgate.testing.sim.script import ROUTERS, PlannedAction

END_S = 60.0  # longest time for a server to shut down
BACK_S = 60.0  # longest time for a process that was unavailable to reach the state of the fleet


def _states(reply: ReceivedAnswer) -> dict[str, str]:
    """Return the states of the workers that have carried out a control call, by address; empty without an answer."""
    answer = reply.json() if reply.whole else {}
    result = answer.get("result") if isinstance(answer, dict) else None
    workers = result.get("workers", {}) if isinstance(result, dict) else {}
    return {url: each["state"] for url, each in workers.items() if "error" not in each}


class Actions(HostileActions):
    def __init__(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        self._loop, self._network, self._processes = fleet.loop, fleet.network, fleet.processes

    async def do(self, action: PlannedAction) -> None:
        await getattr(self, action.kind)(action)

    def _engine(self, action: PlannedAction) -> EngineProcess | None:
        """Return the engine that the plan has drawn, of the target server."""
        engines = [e for e in self._processes.living if e.host.name.startswith(action.target + "/")]
        return engines[int(action.details["which"] * len(engines))] if engines else None

    # -- processes ----------------------------------------------------------------------

    async def kill_engine(self, action: PlannedAction) -> None:
        if (engine := self._engine(action)) is not None:
            engine.end(-9)

    async def kill_server(self, action: PlannedAction) -> None:
        server = self._fleet.hosts[action.target]
        server.host.kill()
        await asyncio.sleep(action.duration_s)
        self._fleet.restart(server)

    async def kill_router(self, action: PlannedAction) -> None:
        fleet, router = self._fleet, self._fleet.hosts[action.target]
        for request in fleet.plan.requests:
            request.disturbed |= request.to == action.target
        router.host.kill()
        fleet.floor_versions.pop(action.target, None)
        fleet.resumes += 1  # the new router has no record of a pause
        await asyncio.sleep(min(action.duration_s, 1.0))
        fleet.restart(router)
        fleet.agreed &= not fleet.version  # the new router has no record of earlier updates

    async def lose_machine(self, action: PlannedAction) -> None:
        self._network.isolate(action.target)
        self._fleet.hosts[action.target].host.kill()
        await asyncio.sleep(action.duration_s)
        self._network.rejoin(action.target)
        self._fleet.restart(self._fleet.hosts[action.target])

    async def stop_engine(self, action: PlannedAction) -> None:
        if (engine := self._engine(action)) is not None:
            engine.host.stop()
            await asyncio.sleep(action.duration_s)
            engine.host.resume()

    async def stall_engine(self, action: PlannedAction) -> None:
        """Make the thread of the engine loop hang, while the channel and transfer threads continue."""
        engine = self._engine(action)
        if engine is not None and engine.driver is not None:
            engine.driver.stalled = True
            await asyncio.sleep(action.duration_s)
            engine.driver.resume()

    async def slow_engine(self, action: PlannedAction) -> None:
        engines = [e for e in self._processes.living if e.host.name.startswith(action.target + "/")]
        for executor in [engine.executor for engine in engines if engine.executor is not None]:
            executor.slowness = action.details["times"]
        await asyncio.sleep(action.duration_s)
        for executor in [engine.executor for engine in engines if engine.executor is not None]:
            executor.slowness = 1.0

    async def stop_server(self, action: PlannedAction) -> None:
        host = self._fleet.hosts[action.target].host
        host.stop()
        await asyncio.sleep(action.duration_s)
        host.resume()

    async def shutdown(self, action: PlannedAction) -> None:
        server = self._fleet.hosts[action.target]
        task = server.task
        if not server.alive or task is None:
            return
        server.signals.send()
        await asyncio.wait([task], timeout=END_S)
        if not task.done():
            self._fleet.fail(f"{server.name} did not shut down within {END_S:g} s of the signal")
        server.host.kill()
        await asyncio.sleep(action.duration_s)
        self._fleet.restart(server)

    async def return_old(self, action: PlannedAction) -> None:
        """Remove the newest weights and kill an engine, which then restarts with older weights."""
        self._fleet.spoil_weights()
        await self.kill_engine(action)

    async def jump_clock(self, action: PlannedAction) -> None:
        self._loop.skew_s += action.details["by_s"]

    # -- the network ----------------------------------------------------------------------

    async def cut(self, action: PlannedAction) -> None:
        await self._cut_between((action.via, action.target), action.duration_s)

    async def cut_peers(self, action: PlannedAction) -> None:
        for server in self._fleet.servers:
            if server.name != action.target:
                self._network.cut(server.name, action.target)
        await asyncio.sleep(action.duration_s)
        for server in self._fleet.servers:
            self._network.mend(server.name, action.target)

    async def _cut_between(self, pair: tuple[str, str], duration_s: float) -> None:
        self._network.cut(*pair)
        await asyncio.sleep(duration_s)
        self._network.mend(*pair)

    async def slow_network(self, action: PlannedAction) -> None:
        others = [*ROUTERS, *(server.name for server in self._fleet.servers if server.name != action.target)]
        for other in others:
            self._network.slow_down(other, action.target, action.details["most_s"])
        await asyncio.sleep(action.duration_s)
        for other in others:
            self._network.slow_down(other, action.target, 0.0)

    async def reset(self, action: PlannedAction) -> None:
        fleet = self._fleet
        requests = {f"clients/{request.name}": request for request in fleet.plan.requests}
        for transport in self._to_reset(action):
            for host in (transport.host, transport.peer.host):
                if host.name in requests:
                    requests[host.name].disturbed = True
            fleet.note(transport.host, f"loses its connection to {transport.peer.host.name}")
            transport.reset()

    def _to_reset(self, action: PlannedAction) -> Iterator[SimTransport]:
        """Yield the connections that the plan has drawn, or all connections between two named hosts."""
        if "between" in action.details:
            named = [
                t for t in self._network.transports if [t.host.name, t.peer.host.name] == action.details["between"]
            ]
            yield from named
            return
        for which in action.details["which"]:
            transports = [t for t in self._network.transports if t.host is not self._fleet.operator]
            transports = [t for t in transports if t.peer.host is not self._fleet.operator]
            if transports:
                yield transports[int(which * len(transports))]

    # -- KV transfers -----------------------------------------------------------------------

    async def corrupt_kv(self, action: PlannedAction) -> None:
        await self._damage(KvDamage(corrupted=action.details["share"]), action.duration_s)

    async def cut_kv_short(self, action: PlannedAction) -> None:
        await self._damage(KvDamage(cut_short=action.details["share"]), action.duration_s)

    async def _damage(self, damage: KvDamage, duration_s: float) -> None:
        self._network.damage = damage
        await asyncio.sleep(duration_s)
        if self._network.damage is damage:
            self._network.damage = None

    async def kill_in_transfer(self, action: PlannedAction) -> None:
        """Kill an engine, or its peer, when the next transfer reaches the given stage."""
        victim: asyncio.Future[EngineProcess | None] = self._loop.create_future()

        def on_stage(engine: EngineProcess, stage: str, ticket: Ticket | None) -> None:
            if stage == action.details["stage"] and not victim.done():
                peer = self._processes.serving(ticket) if ticket is not None and action.details["peer"] else None
                victim.set_result(peer or engine)

        self._processes.watchers.append(on_stage)
        try:
            async with asyncio.timeout(action.duration_s):
                engine = await victim
                await asyncio.sleep(action.details["after_s"])
            if engine is not None and engine.code is None:
                self._fleet.report.faults[f"killed at {action.details['stage']}"] += 1
                engine.end(-9)
        except TimeoutError:
            pass  # no transfer reached the stage
        finally:
            self._processes.watchers.remove(on_stage)

    # -- operators ----------------------------------------------------------------------------

    async def abort(self, action: PlannedAction) -> None:
        await self._abort(action.via, action.details)

    async def abort_all(self, action: PlannedAction) -> None:
        await self._abort(action.via, {"abort_all": True})

    async def abort_tags(self, action: PlannedAction) -> None:
        await self._abort(action.via, action.details)

    async def abort_and_kill(self, action: PlannedAction) -> None:
        """Abort requests, and at the same time kill the servers or engines that have them."""
        fleet, details = self._fleet, action.details
        labels = [label for name in details["req_ids"] for label, _ in readings(name)]
        having = [s for s in fleet.servers if any(s.ledger and s.ledger.named(label) for label in labels)]
        kill = fleet.operator.spawn(self._kill_soon(having, action))
        await self._abort(action.via, {"req_ids": details["req_ids"], "wait": details["wait"]})
        await kill

    async def _kill_soon(self, servers: list[SimServer], action: PlannedAction) -> None:
        await asyncio.sleep(action.details["after_s"])
        for server in servers:
            if action.details["whole"]:
                server.host.kill()
            else:
                for engine in [e for e in self._processes.living if e.host.name.startswith(server.name + "/")]:
                    engine.end(-9)
        await asyncio.sleep(min(action.duration_s, 1.0))
        for server in servers:
            self._fleet.restart(server)

    async def _abort(self, via: str, body: dict[str, Any]) -> None:
        fleet, abort_s = self._fleet, self._loop.time()
        reply = await fleet.control(via, "POST", "/v1/abort_requests", body)
        if reply.status not in (200, 202):
            return
        result = reply.json()["result"]
        aborted = {each["request_id"]: each["output_token_count"] for each in result["aborted"]}
        fleet.record_aborted(via, abort_s, aborted)
        for each in result["errors"]:
            if each["code"] == "not_told":  # the request was found, and its end was requested
                fleet.asked_to_end[via].add(each["request_id"])

    async def pause(self, action: PlannedAction) -> None:
        fleet = self._fleet
        paused = _states(await fleet.control(action.via, "POST", "/v1/pause", action.details))
        await asyncio.sleep(action.duration_s)
        pauses, identities = fleet.pauses, {server: self._identity(server, action.via) for server in fleet.servers}
        reply = await fleet.control(action.undo_via, "POST", "/v1/resume")
        if action.undo_via != action.via and reply.status == 200:
            resumed = _states(reply)
            # A server that has not yet paused may still do so, because the first router repeats the call.
            both = [url for url, state in paused.items() if state == "paused" and url in resumed]
            unchanged = {
                server: each for server, each in identities.items() if server.url in both and None not in each
            }
            await self._check_released(
                action.via,
                lambda: (
                    fleet.pauses != pauses
                    or not any(self._identity(s, action.via) == unchanged[s] for s in unchanged)
                ),
            )

    def _identity(self, server: SimServer, router: str) -> tuple[SimProcess | None, Worker | None]:
        """Return the server's process, and its worker object in a router, which is new after a removal and return."""
        return server.host if server.alive else None, self._fleet.worker(router, server)

    async def _check_released(self, router: str, overtaken: Callable[[], bool]) -> None:
        """Check that a router notices when another router has resumed the fleet, if a resumed server still runs."""
        until_s = self._loop.time() + BACK_S
        while self._fleet.holds(router) and not overtaken():
            if self._loop.time() > until_s:
                self._fleet.fail(f"{router} still holds requests, although the fleet was resumed {BACK_S:g} s ago")
                return
            await asyncio.sleep(0.05)

    async def pause_one(self, action: PlannedAction) -> None:
        await self._fleet.control(action.target, "POST", "/v1/pause", action.details)
        await asyncio.sleep(action.duration_s)
        await self._fleet.control(action.target, "POST", "/v1/resume")

    async def pause_and_kill(self, action: PlannedAction) -> None:
        """Kill a server or engine while the fleet is paused, and check that it is paused after its restart."""
        fleet, body = self._fleet, {"mode": action.details["mode"], "timeout": 5}
        resumes, host = fleet.resumes, fleet.hosts[action.target].host
        reply = await fleet.control(action.via, "POST", "/v1/pause", body)
        # A server that was removed from the fleet is not paused with it.
        removed = any(other.kind == "remove" and other.target == action.target for other in fleet.plan.actions)
        if reply.status == 200 and not removed:
            if action.details["whole"]:
                await self.kill_server(action)
            else:
                await self.kill_engine(action)
            await self._check_returns_paused(action, host, lambda: fleet.resumes != resumes)
        await fleet.control(action.via, "POST", "/v1/resume")

    async def _check_returns_paused(
        self, action: PlannedAction, host: SimProcess, overtaken: Callable[[], bool]
    ) -> None:
        """Check that a killed server or engine is paused after its restart.

        `host` is the server's process when the pause was sent. A newer process runs until its router pauses it.
        """
        fleet, until_s = self._fleet, self._loop.time() + BACK_S
        server = next(server for server in fleet.servers if server.name == action.target)
        while not overtaken():
            if server.failed:  # its engine was killed while it started
                fleet.restart(server)
            states = fleet.engine_states(server)
            if not action.details["whole"] and "running" in states and server.host is host:
                fleet.fail(f"an engine of {server.name} restarted during a pause and is running")
                return
            if states and set(states) == {"paused"}:
                return
            if self._loop.time() > until_s:
                fleet.fail(f"{server.name} restarted while the fleet was paused, and is not paused: {states}")
                return
            await asyncio.sleep(0.02)

    async def update(self, action: PlannedAction) -> None:
        await self.update_all(action.via, action.details["mode"])

    async def update_all(self, via: str, mode: str) -> None:
        fleet = self._fleet
        await fleet.control(via, "POST", "/v1/pause", {"mode": mode, "timeout": 5})
        await self._update(via, fleet.new_weights())
        await fleet.control(via, "POST", "/v1/resume")

    async def _update(self, via: str, body: dict[str, Any]) -> None:
        fleet = self._fleet
        processes = {server: server.host for server in fleet.servers}
        reply = await fleet.control(via, "POST", "/v1/update_weights", body)
        fleet.updated(via, body["version"], reply, processes)

    async def roll(self, action: PlannedAction) -> None:
        await self._update(action.via, self._fleet.new_weights() | {"strategy": "rolling", "drain_timeout": 2})

    async def flush(self, action: PlannedAction) -> None:
        await self._fleet.control(action.via, "POST", "/v1/flush_cache")

    async def remove(self, action: PlannedAction) -> None:
        fleet = self._fleet
        server = next(server for server in fleet.servers if server.name == action.target)
        await fleet.control(action.via, "DELETE", f"/v1/workers?url={server.url}&timeout=2")
        await asyncio.sleep(action.duration_s)
        role = fleet.roles[fleet.servers.index(server)]
        await fleet.control(action.via, "POST", "/v1/workers", {"url": server.url, "role": role})

    async def look(self, action: PlannedAction) -> None:
        for path in ("/v1/requests", "/health", "/v1/workers", "/v1/loads", "/v1/is_paused"):
            await self._fleet.control(action.via, "GET", path)
        await self._fleet.control(action.target, "GET", "/v1/requests")
