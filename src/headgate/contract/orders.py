"""The order in which a router asks for pauses and resumes: a call that a later one has overtaken is refused.

The calls of one router travel on several connections, and one of them may be delayed (a lost packet, a stopped process)
until after the next one. Each therefore carries the router's boot id and a number that only grows. A call may also depend
on what was asked last: a router resumes no server that another caller has paused since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headgate.errors import RequestError

ORDER_HEADER = "x-headgate-order"  # ROUTER:NUMBER
ONLY_IF_HEADER = "x-headgate-only-if"
RUNNING = "running"  # only if the server was last asked to run
OWN = "own"  # only if this router has asked last
MOST_ROUTERS = 64  # whose numbers are kept


class Overtaken(RequestError):
    status = 409
    code = "overtaken"


@dataclass(frozen=True, slots=True)
class Order:
    router: str = ""  # empty: a caller that numbers nothing
    number: int = 0
    only_if: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Order:
        router, _, number = headers.get(ORDER_HEADER, "").rpartition(":")
        if not router:
            return cls()
        if not (number.isascii() and number.isdigit() and len(number) <= 18 and len(router) <= 64):
            raise RequestError(f"{ORDER_HEADER} is ROUTER:NUMBER, not {headers[ORDER_HEADER]!r}")
        return cls(router, int(number), headers.get(ONLY_IF_HEADER, ""))


UNORDERED = Order()


class Orders:
    def __init__(self) -> None:
        self._last = ""  # the router that has asked last
        self._newest: dict[str, int] = {}  # by router

    def take(self, order: Order, *, paused: bool) -> None:
        """Raises if this call is no longer to be carried out. `paused`: what the server was last asked to be."""
        if order.router:
            self._check(order, paused)
            self._newest.pop(order.router, None)
            self._newest[order.router] = order.number
            if len(self._newest) > MOST_ROUTERS:
                del self._newest[next(iter(self._newest))]
        self._last = order.router

    def _check(self, order: Order, paused: bool) -> None:
        if order.number < self._newest.get(order.router, 0):
            raise Overtaken("a later pause or resume of the same router came before this one")
        if (order.only_if == RUNNING and paused) or (order.only_if == OWN and self._last != order.router):
            raise Overtaken("another caller has paused or resumed this server since")
