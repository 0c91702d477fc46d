"""Work on the event loop that tenants take turns in: a few calls in each turn of the loop, round robin among tenants.

The work of one tenant waits for a few calls of another, and not for all that were made before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once  # in this turn
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by tenant; the first is the next

    def __repr__(self) -> str:
        return f"<Turns {sum(map(len, self._waiting.values()))} waiting>"

    def call(self, tenant: str, act: Callable[[], None]) -> None:
        """Call `act`: now if this turn has room, else in one of the next."""
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
                self._waiting[tenant] = queue  # behind the others
            self._act(act)
