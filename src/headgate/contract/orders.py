"""The order of a router's pause and resume calls: a call that arrives after a later one is refused.

The calls of one router use several connections, and one call may be delayed (a lost packet, a stopped process) until
after the next one. Each call therefore carries the router's boot id and an increasing number. A call may also be
conditional on the previous ones: a router does not resume a server that another caller has paused since, and does not
pause a restarted server that another router has resumed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headgate.errors import RequestError

ORDER_HEADER = "x-headgate-order"  # ROUTER:NUMBER
ONLY_IF_HEADER = "x-headgate-only-if"
RUNNING = "running"  # only if the last call was not a pause
OWN = "own"  # only if the last call came from the same router
UNRESUMED = "unresumed"  # only if the last unconditional call of a router was not a resume
MOST_ROUTERS = 64  # routers whose last number is remembered


class Overtaken(RequestError):
    status = 409
    code = "overtaken"


class AlreadyResumed(Overtaken):
    code = "resumed"


@dataclass(frozen=True, slots=True)
class Order:
    router: str = ""  # empty: the caller does not number its calls
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
        self._last = ""  # the router that sent the last call
        self._newest: dict[str, int] = {}  # by router
        self._resumed = False  # whether the last unconditional call of a router was a resume

    def take(self, order: Order, *, paused: bool, resumes: bool = False) -> None:
        """Record the call, or raise if it is obsolete. `paused`: the server was last asked to pause.

        `resumes`: the call is a resume. A resume without a router may be part of an update of this server alone, and a
        conditional one only undoes its router's own pause; neither says that the fleet should run.
        """
        if order.router:
            self._check(order, paused)
            self._newest.pop(order.router, None)
            self._newest[order.router] = order.number
            if len(self._newest) > MOST_ROUTERS:
                del self._newest[next(iter(self._newest))]
            if not order.only_if:
                self._resumed = resumes
        self._last = order.router

    def _check(self, order: Order, paused: bool) -> None:
        if order.number < self._newest.get(order.router, 0):
            raise Overtaken("a later pause or resume of the same router came before this one")
        if (order.only_if == RUNNING and paused) or (order.only_if == OWN and self._last != order.router):
            raise Overtaken("another caller has paused or resumed this server since")
        if order.only_if == UNRESUMED and self._resumed:
            raise AlreadyResumed("another router has resumed this server since it started")
