"""Fair scheduling of callbacks on an event loop: a few per iteration of the loop, round robin among tenants.

A tenant's callback waits for a few callbacks of other tenants, not for all that were queued before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once  # callbacks that may still run in this iteration
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # queues by tenant, in round-robin order

    def __repr__(self) -> str:
        return f"<Turns {sum(map(len, self._waiting.values()))} waiting>"

    def call(self, tenant: str, act: Callable[[], None]) -> None:
        """Call `act` now if this iteration has callbacks left, otherwise in a later iteration."""
        if self._left:
            self._act(act)
        else:
            self._waiting.setdefault(tenant, deque()).append(act)

    def _act(self, act: Callable[[], None]) -> None:
        if self._left == self._at_once:
            asyncio.get_running_loop().call_soon(self._next)
        self._left -= 1
        act()

    def _next(self) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            act = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # after the others
            self._act(act)
