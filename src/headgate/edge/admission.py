"""Limits the number of requests in flight and queues the rest fairly among tenants.

A request over the limit waits; if the queue is full too, it is refused at once. A free place goes to the tenant with
the fewest requests in flight; tenants with equally few take turns. A full queue accepts a new request only if another
tenant has more requests waiting; one of those is then refused instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headgate.contract.errors import QueueFull
from headgate.edge.sharing import Sharing
from headgate.shares import Shares


class Admission:
    def __init__(self, limit: int | None, queue: int, sharing: Sharing | None = None) -> None:
        self._limit = limit
        self._queue = queue
        self._shares = Shares(limit or 0)
        self._sharing = sharing or Sharing()
        self.in_flight = 0
        self.waited = 0  # requests that had to wait
        self.waited_s = 0.0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def try_enter(self, tenant: str) -> bool:
        """Take a place if one is free for this tenant; returns whether it was.

        This overtakes no waiting request: a place that becomes free goes to a waiting request at once.
        """
        if self._limit is not None and not self._has_place(tenant):
            return False
        self._take(tenant)
        return True

    def _has_place(self, tenant: str) -> bool:
        return self._shares.may_take(tenant, several=self._sharing.several)

    def _take(self, tenant: str) -> None:
        self.in_flight += 1
        if self._limit is not None:
            self._shares.take(tenant)

    async def enter(
        self, tenant: str, keep_alive: Callable[[], None] = lambda: None, every_s: float | None = None
    ) -> None:
        """Take a place, and wait for one if necessary; raises QueueFull at once if too many requests wait."""
        if self.try_enter(tenant):
            return
        if self.waiting >= self._queue:
            self._make_room(tenant)
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        began_s = loop.time()
        self.waited += 1
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            while not place.done():
                await asyncio.wait((place,), timeout=every_s)
                if not place.done():
                    keep_alive()
            place.result()
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(tenant)  # the place was granted at the moment of the cancellation
            else:
                self._forget(tenant, place)
            raise
        finally:
            self.waited_s += loop.time() - began_s

    def _make_room(self, tenant: str) -> None:
        """Drop a waiting request, because the queue is full: the newest of the tenant that has the most waiting.

        If no other tenant has more waiting requests, raise QueueFull for the new request.
        """
        own = len(self._waiting.get(tenant, ()))
        largest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        if len(self._waiting.get(largest, ())) <= own + 1:
            raise self._full()
        loser = self._waiting[largest][-1]
        self._forget(largest, loser)
        if not loser.done():  # a request that was cancelled needs no answer
            loser.set_exception(self._full())

    def _full(self) -> QueueFull:
        return QueueFull(
            f"{self._limit} requests are in flight and {self._queue} wait; more are refused until some have ended"
        )

    def leave(self, tenant: str) -> None:
        self.in_flight -= 1
        if self._limit is None:
            return
        self._shares.give_back(tenant)
        while (least := self._next()) is not None:
            queue = self._waiting.pop(least)
            place = queue.popleft()
            if queue:
                self._waiting[least] = queue  # at the end: of tenants with equally few places, the first is next
            if not place.done():
                self._take(least)
                place.set_result(None)

    def _next(self) -> str | None:
        """Return the tenant that gets the next place: of those below their share, the one with the fewest places."""
        able = [tenant for tenant in self._waiting if self._has_place(tenant)]
        return min(able, key=self._shares.held.__getitem__, default=None)

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._waiting[tenant]

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)
