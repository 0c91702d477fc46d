"""Checks of an idle fleet: everything that requests acquired has been released. Each string returned is one violation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headgate.testing.sim.engine import EngineProcess
from headgate.testing.sim.hosts import SimRouter, SimServer


def find_leaks(
    routers: Iterable[SimRouter], servers: Iterable[SimServer], engines: Iterable[EngineProcess]
) -> Iterator[str]:
    for router in routers:
        yield from _router_leaks(router)
    for server in servers:
        yield from _server_leaks(server)
    for engine in engines:
        if engine.loop is None:
            continue
        scheduler = engine.loop.scheduler
        scheduler.check()
        if not engine.loop.idle or scheduler.pool.held:
            yield f"{engine.host.name} is not idle: {scheduler!r}, {scheduler.sequences}"


def kv_leaks(engines: Iterable[EngineProcess]) -> list[str]:
    """Return the leases, tickets and connections that engines still hold. Unused connections close after a while."""
    found = []
    for engine in engines:
        if engine.loop is not None and len(engine.loop.scheduler.leases):
            found.append(f"{engine.host.name} has {len(engine.loop.scheduler.leases)} leases")
        if engine.kv is not None:
            found += [f"{engine.host.name} has {thing}" for thing in engine.kv.leaks()]
    return found


def _router_leaks(host: SimRouter) -> Iterator[str]:
    router, name = host.router, host.name
    assert router is not None
    if router.live:
        yield f"{name} still has requests in flight: {list(router.live)}"
    if router.fleet.double_releases:
        yield f"{name} has released the load of a worker twice, {router.fleet.double_releases} times"
    if router.admission.in_flight or router.admission.waiting:
        yield f"{name}: {router.admission.in_flight} requests are admitted and {router.admission.waiting} are queued"
    for worker in router.fleet.with_leaving:
        if worker.in_flight or worker.pending_tokens:
            yield f"{name}: {worker!r} has {worker.pending_tokens} pending tokens"


def _server_leaks(server: SimServer) -> Iterator[str]:
    ledger, engines = server.ledger, server.engines
    assert ledger is not None and engines is not None
    if ledger.live or ledger.in_flight or ledger.unsettled:
        yield f"{server.name}: {ledger!r}, unsettled: {len(ledger.unsettled)}"
    for replica in engines.replicas:
        client = replica.client
        if client is None:
            yield f"{server.name}: engine {replica.index} is {replica.state}"
        elif client.open_streams or client._left:
            yield f"{server.name}: {client!r}, unconfirmed aborts: {client._left}"
