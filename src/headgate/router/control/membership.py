"""Membership of the fleet: GET /v1/workers, and joining and leaving at run time.

A worker that registers itself gives the time to live of its registration. When its heartbeats stop, it is removed as
if by an operator: it gets no more requests, and its requests in flight may finish.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headgate.contract.fleet import Joining
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)


class Registry:
    """Adds and removes workers. A worker that registered itself is removed when its heartbeats stop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._fleet = router.fleet
        self._due_s: dict[Worker, float] = {}

    def join(self, body: Joining) -> Worker:
        worker = self._fleet.add(body.url, body.role, pid=body.pid, managed=body.ttl_s is not None)
        if body.key is not None:
            worker.key = body.key
        if body.ttl_s is not None:
            self._due_s[worker] = self._router.loop.time() + body.ttl_s
        else:
            self._due_s.pop(worker, None)
        return worker

    async def leave(self, url: str, timeout_s: float) -> Worker:
        """Remove the worker. Returns when it has no requests of this router left, or at the timeout."""
        worker = self._fleet.find(url)
        self._due_s.pop(worker, None)
        self._fleet.remove(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while worker.in_flight:
                    await self._router.fleet_changed(timeout_s)
        return worker

    async def run(self) -> None:
        """Remove workers whose heartbeats have stopped."""
        while True:
            await asyncio.sleep(0.5)
            now_s = self._router.loop.time()
            present = set(self._fleet)
            for worker, due_s in tuple(self._due_s.items()):
                if worker not in present:
                    del self._due_s[worker]
                elif now_s > due_s:
                    del self._due_s[worker]
                    log.warning("%s has sent no heartbeat in time and is removed", worker.name)
                    self._fleet.remove(worker)


def describe(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "role": worker.role,
        "state": worker.state,
        "kind": worker.kind,
        "models": sorted(worker.models),
        "pid": worker.pid,
        "registered": worker.managed,
        "version": worker.version,
        "in_flight": worker.in_flight,
        "pending_tokens": worker.pending_tokens,
        "running": worker.running,
        "waiting": worker.waiting,
        "free_blocks": worker.free_blocks,
        "total_blocks": worker.total_blocks,
        "max_running": worker.max_running,
        "failures": worker.failures,
        "errors": worker.errors,
    }
