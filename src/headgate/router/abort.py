"""Ending requests wherever they are: each is asked of the worker that has it, and told truthfully.

What this router has placed it knows; what it does not know is asked of everybody: another router may have placed it. From
the moment it is asked to end, a request goes on nowhere else. What waits here, or is between two workers, or is at a worker
that has no such call, ends here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from headgate.api.abort import UNREAD, Aborted, AbortRequest, AbortResult, Trouble, readings
from headgate.api.errors import Forbidden
from headgate.api.outflow import await_readers
from headgate.router.ask import UNREADABLE
from headgate.router.fanout import KEYS, SLACK_S, Asking, Call, Reply, ask, fan_out
from headgate.router.worker import Worker

if TYPE_CHECKING:
    from headgate.router.relay import Exchange
    from headgate.router.router import Router

log = logging.getLogger(__name__)

FORMER_S = 5.0  # for an attempt that nobody reads to end

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose requests a caller may see and end."""

    tenant: str
    admin: bool

    def check_all(self) -> None:
        if not (self.tenant or self.admin):
            raise Forbidden(
                "without a key only requests that are named by their ids can be seen and ended; send a key"
            )

    def sees(self, exchange: Exchange) -> bool:
        return self.admin or exchange.tenant == self.tenant

    def tenants(self, router: Router) -> Collection[str]:
        """The tenants by whose names to look: the admin's word is for all that have requests here."""
        return dict.fromkeys(e.tenant for e in router.live.values()) if self.admin else (self.tenant,)


@dataclass(frozen=True, slots=True)
class Target:
    """A request of this router's, or one choice of it, under the name it was asked for."""

    name: str
    exchange: Exchange
    choice: int | None = None


class AbortOutcome(msgspec.Struct, kw_only=True):
    status: int | UnsetType = UNSET
    error: str | UnsetType = UNSET


class RouterAbortResult(AbortResult, kw_only=True):
    workers: dict[str, AbortOutcome]


class WorkerAborts(msgspec.Struct):
    result: AbortResult


class _Tagged(msgspec.Struct):
    tags: dict[str, str] = {}


def find(router: Router, tenants: Collection[str], name: str) -> list[Target]:
    """One, or none; several only if several of these tenants use the same name."""
    for label, choice in readings(name):
        named = [e for tenant in tenants if (e := router.live.get((tenant, label, 0))) is not None]
        if found := [Target(name, e, choice) for e in named if choice is None or choice < e.ask.n]:
            return found
    return []


async def abort(router: Router, body: AbortRequest, scope: Scope, asking: Asking) -> RouterAbortResult:
    unknown: list[str] = []
    if body.req_ids is None:
        scope.check_all()
        targets = _matching(router, scope, body.tags)
    else:
        targets, unknown = _named(router, scope, body.req_ids)
    due_s = router.loop.time() + body.timeout
    _end_here(targets)
    homes = _homes(targets)
    # Beside the calls: their workers wait for the same clients.
    telling = router.loop.create_task(_ended(targets, body.timeout))
    try:
        calls = _calls(router, body, targets, unknown)
        merged = Merged(await fan_out(router, calls, asking, body.timeout + SLACK_S), homes)
        if body.req_ids is None and (left_s := due_s - router.loop.time()) > 0:
            again = _again(body, _untold(targets, merged), left_s)
            merged.add(await fan_out(router, again, asking, left_s + SLACK_S))
        _end_unheard(targets, merged.unknown)
        if body.wait:
            await telling
    finally:
        telling.cancel()
    return merged.result(body, targets, unknown)


def _named(router: Router, scope: Scope, names: Iterable[str]) -> tuple[list[Target], list[str]]:
    tenants = scope.tenants(router)
    found = {name: find(router, tenants, name) for name in names}
    unknown = [name for name, targets in found.items() if not targets]
    return [target for targets in found.values() for target in targets], unknown


def _matching(router: Router, scope: Scope, tags: Any) -> list[Target]:
    """All of the caller's that are here, or those with these tags."""
    wanted = (tags or {}).items()
    mine = [exchange for exchange in router.live.values() if scope.sees(exchange)]
    return [Target(e.id, e) for e in mine if not wanted or wanted <= _tags(e).items()]


def _tags(exchange: Exchange) -> dict[str, str]:
    try:
        return msgspec.json.decode(exchange.request.body, type=_Tagged).tags
    except UNREADABLE:
        return {}


def _end_here(targets: Iterable[Target]) -> None:
    """End what no worker could be asked about. The others go on nowhere else."""
    for target in targets:
        exchange, whole = target.exchange, target.choice is None or target.exchange.ask.n == 1
        exchange.ending = exchange.ending or whole
        if whole and (exchange.worker is None or exchange.worker.kind != "headgate"):
            exchange.end()


def _end_unheard(targets: Iterable[Target], unknown: Collection[str]) -> None:
    """End what its worker does not know: the request is on its way there, and the abort was faster."""
    for target in targets:
        exchange = target.exchange
        if target.name in unknown and exchange.ending and not exchange.over:
            exchange.end()


def _calls(
    router: Router, body: AbortRequest, targets: Sequence[Target], unknown: Sequence[str]
) -> dict[Worker, Call]:
    """One call for each worker concerned."""
    plain = {"wait": body.wait, "timeout": body.timeout}
    everybody = [worker for worker in router.fleet if worker.kind in ("headgate", "unknown")]
    if body.req_ids is None:
        which = {"abort_all": True} if body.tags is None else {"tags": body.tags}
        return dict.fromkeys(everybody, _call(plain | which))
    names = _by_worker(targets)
    for target in targets:
        for worker in _left_behind(router, target.exchange):
            names[worker].append(target.name)
    for worker in everybody if unknown else ():
        names[worker] += unknown
    return {worker: _call(plain | {"req_ids": asked}) for worker, asked in names.items()}


def _by_worker(targets: Iterable[Target]) -> defaultdict[Worker, list[str]]:
    names: defaultdict[Worker, list[str]] = defaultdict(list)
    for target in targets:
        worker = target.exchange.worker
        if worker is not None and worker.kind == "headgate":
            names[worker].append(target.name)
    return names


def _homes(targets: Iterable[Target]) -> dict[str, set[Worker | None]]:
    """The workers that have requests of each name now."""
    homes: defaultdict[str, set[Worker | None]] = defaultdict(set)
    for target in targets:
        homes[target.name].add(target.exchange.worker)
    return homes


def _left_behind(router: Router, exchange: Exchange) -> list[Worker]:
    """Workers that may still make an answer which has moved: for an `Idempotency-Key` they do, though nothing reads it."""
    if not exchange.departures or exchange.request.header(b"idempotency-key") is None:
        return []
    urls = {each.worker for each in exchange.departures}
    return [worker for worker in router.fleet if worker.url in urls and worker is not exchange.worker]


def _untold(targets: Iterable[Target], merged: Merged) -> list[Target]:
    """What was on its way to a worker that was asked to end all it had, and did not have this."""
    silent = {reply.worker for reply in merged.silent}
    return [
        target
        for target in targets
        if not target.exchange.over and not merged.tells_of(target.name) and target.exchange.worker not in silent
    ]


def _again(body: AbortRequest, targets: Iterable[Target], timeout_s: float) -> dict[Worker, Call]:
    """The same, by name: a worker says truthfully that it does not know one."""
    plain = {"wait": body.wait, "timeout": timeout_s}
    return {worker: _call(plain | {"req_ids": names}) for worker, names in _by_worker(targets).items()}


def _call(body: dict[str, Any]) -> Call:
    return Call("POST", "/v1/abort_requests", encode(body), WorkerAborts)


async def end_former(exchange: Exchange, worker: Worker) -> None:
    """End an earlier attempt at a request that is to go on: for an `Idempotency-Key` its worker makes it for nobody."""
    keys = tuple(header for header in exchange.request.head.headers if header[0] in KEYS)
    call = _call({"req_ids": [exchange.id], "wait": True, "timeout": FORMER_S})
    await ask(exchange.router, worker, call, Asking(exchange.tenant, keys), FORMER_S + 1)


async def _ended(targets: Sequence[Target], timeout_s: float) -> None:
    exchanges = [target.exchange for target in targets if target.exchange.ending and not target.exchange.over]
    await await_readers({exchange.when_over(): exchange.client.transport for exchange in exchanges}, timeout_s)


class Merged:
    """What the workers have said, by name; of a request that has moved, only the worker that has it now counts."""

    def __init__(self, replies: Sequence[Reply], homes: Mapping[str, set[Worker | None]]) -> None:
        self._homes = homes
        self.workers: dict[str, AbortOutcome] = {}
        self.silent: list[Reply] = []
        self.aborted: dict[str, list[int]] = {}  # tokens; several if tenants use the same name
        self.finished: set[str] = set()
        self.unknown: set[str] = set()  # to those who were asked
        self.errors: dict[str, Trouble] = {}
        self.accepted: dict[str, None] = {}
        self.add(replies)

    def add(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._take(reply)

    def tells_of(self, name: str) -> bool:
        """Whether somebody has it, or had."""
        return name in self.aborted or name in self.finished or name in self.errors or name in self.accepted

    def _take(self, reply: Reply) -> None:
        if not reply.ok:
            self.silent.append(reply)
            self.workers[reply.worker.url] = AbortOutcome(status=reply.status or UNSET, error=reply.error)
            return
        self.workers[reply.worker.url] = AbortOutcome(status=reply.status)
        told: AbortResult = reply.told.result
        away = {name for name, homes in self._homes.items() if reply.worker not in homes}
        for each in told.aborted:
            if each.request_id not in away:
                self.aborted.setdefault(each.request_id, []).append(each.output_token_count)
        self.finished |= set(told.already_finished) - away
        self.unknown |= set(told.not_found) - away
        self.errors |= {error.request_id: error for error in told.errors if error.request_id not in away}
        self.accepted |= {name: None for name in told.accepted or () if name not in away}

    def result(self, body: AbortRequest, targets: Sequence[Target], unknown: Collection[str]) -> RouterAbortResult:
        result = RouterAbortResult(workers=self.workers)
        if not body.wait:
            return self._accepted(result, targets, unknown)
        for target in {(target.exchange.tenant, target.name): target for target in targets}.values():
            self._judge(result, target.name, target)
        here = {target.name for target in targets}
        for name in dict.fromkeys([*unknown, *self.aborted, *self.errors]):
            if name not in here:
                self._judge(result, name, None)
        return result

    def _judge(self, result: RouterAbortResult, name: str, target: Target | None) -> None:
        if target is not None and target.exchange.cut:  # its worker may have made more, which nobody was told
            result.aborted.append(Aborted(name, target.exchange.journal.tokens))
        elif target is not None and name in self.aborted and target.exchange.is_unread:
            result.errors.append(Trouble(name, "not_told", UNREAD))
        elif name in self.aborted:
            counts = self.aborted[name]
            result.aborted.append(Aborted(name, counts.pop(0) if len(counts) > 1 else counts[0]))
        elif name in self.errors:
            result.errors.append(self.errors[name])
        elif name in self.finished:
            result.already_finished.append(name)
        elif target is not None and not target.exchange.over:
            result.errors.append(Trouble(name, "not_told", "it was asked to end, and has not yet"))
        elif target is not None:
            result.already_finished.append(name)
        elif self.silent:
            who = ", ".join(reply.worker.name for reply in self.silent)
            result.errors.append(Trouble(name, "unreachable", f"nobody who answered knows it; no answer from {who}"))
        else:
            result.not_found.append(name)

    def _accepted(
        self, result: RouterAbortResult, targets: Sequence[Target], unknown: Collection[str]
    ) -> RouterAbortResult:
        result.accepted = list(dict.fromkeys([*(target.name for target in targets), *self.accepted]))
        for name in unknown:
            if name in self.finished:
                result.already_finished.append(name)
            elif name not in self.accepted:
                result.not_found.append(name)
        return result
