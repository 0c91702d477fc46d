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

from headgate.contract.abort import (
    UNREAD,
    AbortCause,
    AbortedRequest,
    AbortError,
    AbortRequest,
    AbortResult,
    readings,
)
from headgate.contract.errors import Forbidden
from headgate.edge.outflow import LEAST_S, await_readers
from headgate.router.control.abort_calls import abort_call
from headgate.router.control.fan_out import SLACK_S, CallerHeaders, WorkerReply
from headgate.router.data_path.request_info import UNREADABLE
from headgate.router.exchange.ending import CAUSE
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.router import Router

log = logging.getLogger(__name__)

GOING_ON = "it was asked to end, and has not yet"

Names = Sequence[str] | None  # of requests that a worker is asked to end; None: all that it has


@dataclass(frozen=True, slots=True)
class RouterScope:
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
class RoutedTarget:
    """A request of this router's, or one choice of it, under the name it was asked for."""

    name: str
    exchange: Exchange
    choice: int | None = None


class AbortOutcome(msgspec.Struct, kw_only=True):
    status: int | UnsetType = UNSET
    error: str | UnsetType = UNSET


class RouterAbortResult(AbortResult, kw_only=True):
    workers: dict[str, AbortOutcome]


class _Tagged(msgspec.Struct):
    tags: dict[str, str] = {}


def find(router: Router, tenants: Collection[str], name: str) -> list[RoutedTarget]:
    """One, or none; several only if several of these tenants use the same name."""
    for label, choice in readings(name):
        named = [e for tenant in tenants if (e := router.live.get((tenant, label, 0))) is not None]
        if found := [RoutedTarget(name, e, choice) for e in named if choice is None or choice < e.ask.n]:
            return found
    return []


async def abort(router: Router, body: AbortRequest, scope: RouterScope, asking: CallerHeaders) -> RouterAbortResult:
    unknown: list[str] = []
    if body.req_ids is None:
        scope.check_all()
        targets = _matching(router, scope, body.tags)
    else:
        targets, unknown = _named(router, scope, body.req_ids)
    due_s = router.loop.time() + body.timeout
    _end_here(targets, body.cause)
    merged = MergedAborts(_homes(targets))
    # Beside the calls: their workers wait for the same clients.
    telling = router.loop.create_task(_ended(targets, body.timeout))
    try:
        await _ask_workers(router, _asked(router, body, targets, unknown), body, asking, body.timeout, merged)
        if body.req_ids is None and (left_s := due_s - router.loop.time()) > 0:
            # By name: a worker reports truthfully that it does not know a request.
            await _ask_workers(router, _by_worker(_untold(targets, merged)), body, asking, left_s, merged)
        unheard = _end_unheard(targets, merged.unknown)
        if body.wait:
            await telling
            await _ended(unheard, LEAST_S)
    finally:
        telling.cancel()
    return merged.result(body, targets, unknown)


def _named(router: Router, scope: RouterScope, names: Iterable[str]) -> tuple[list[RoutedTarget], list[str]]:
    tenants = scope.tenants(router)
    found = {name: find(router, tenants, name) for name in names}
    unknown = [name for name, targets in found.items() if not targets]
    return [target for targets in found.values() for target in targets], unknown


def _matching(router: Router, scope: RouterScope, tags: Any) -> list[RoutedTarget]:
    """All of the caller's that are here, or those with these tags."""
    wanted = (tags or {}).items()
    mine = [exchange for exchange in router.live.values() if scope.sees(exchange)]
    return [RoutedTarget(e.id, e) for e in mine if not wanted or wanted <= _tags(e).items()]


def _tags(exchange: Exchange) -> dict[str, str]:
    try:
        return msgspec.json.decode(exchange.request.body, type=_Tagged).tags
    except UNREADABLE:
        return {}


def _end_here(targets: Iterable[RoutedTarget], cause: AbortCause) -> None:
    """End what no worker could be asked about. The others go on nowhere else."""
    for target in targets:
        exchange, whole = target.exchange, target.choice is None or target.exchange.ask.n == 1
        if whole and (exchange.worker is None or exchange.worker.kind != "headgate"):
            exchange.end(cause)
        elif whole:
            exchange.ask_end(cause)


def _end_unheard(targets: Iterable[RoutedTarget], unknown: Collection[str]) -> list[RoutedTarget]:
    """End what its worker does not know: the request is on its way there, and the abort was faster."""
    unheard = [target for target in targets if target.name in unknown and target.exchange.end_pending]
    for target in unheard:
        target.exchange.end()
    return unheard


def _asked(
    router: Router, body: AbortRequest, targets: Sequence[RoutedTarget], unknown: Sequence[str]
) -> Mapping[Worker, Names]:
    """What each worker concerned is asked to end."""
    everybody = [worker for worker in router.fleet if worker.kind in ("headgate", "unknown")]
    names = _by_worker(targets)
    if body.req_ids is None:
        # A worker that leaves the fleet is asked for the requests of this router alone.
        urls = {worker.url for worker in everybody}
        leaving = {worker: named for worker, named in names.items() if worker.url not in urls}
        return dict.fromkeys(everybody) | leaving
    for target in targets:
        for worker in _left_behind(router, target.exchange):
            names[worker].append(target.name)
    for worker in everybody if unknown else ():
        names[worker] += unknown
    return names


async def _ask_workers(
    router: Router,
    asked: Mapping[Worker, Names],
    body: AbortRequest,
    asking: CallerHeaders,
    timeout_s: float,
    merged: MergedAborts,
) -> None:
    every = {"abort_all": True} if body.tags is None else {"tags": body.tags}
    plain = {"wait": body.wait, "timeout": timeout_s} | ({} if body.cause == CAUSE else {"cause": body.cause})
    calls = {
        worker: abort_call(plain | (every if names is None else {"req_ids": names}))
        for worker, names in asked.items()
    }
    for reply in await router.worker_calls.fan_out(calls, asking, timeout_s + SLACK_S):
        merged.add(reply, asked[reply.worker])


def _by_worker(targets: Iterable[RoutedTarget]) -> defaultdict[Worker, list[str]]:
    names: defaultdict[Worker, list[str]] = defaultdict(list)
    for target in targets:
        worker = target.exchange.worker
        if worker is not None and worker.kind == "headgate" and not target.exchange.cut:
            names[worker].append(target.name)
    return names


def _homes(targets: Iterable[RoutedTarget]) -> dict[str, set[str]]:
    """The addresses of the workers that have requests of each name now."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for target in targets:
        worker = target.exchange.worker
        homes[target.name] |= set() if worker is None else {worker.url}
    return homes


def _left_behind(router: Router, exchange: Exchange) -> list[Worker]:
    """Workers that may still make an answer which has moved: for an `Idempotency-Key` they do, though nothing reads it."""
    if not exchange.departures or exchange.request.header(b"idempotency-key") is None:
        return []
    urls = {each.worker for each in exchange.departures}
    return [worker for worker in router.fleet if worker.url in urls and worker is not exchange.worker]


def _untold(targets: Iterable[RoutedTarget], merged: MergedAborts) -> list[RoutedTarget]:
    """Requests on their way to a worker that was asked to end all it had, and did not have them."""
    silent = {reply.worker.url for reply in merged.silent}
    unnamed = [target for target in targets if not target.exchange.over and not merged.tells_of(target.name)]
    return [target for target in unnamed if (worker := target.exchange.worker) is None or worker.url not in silent]


async def end_at_leaving(
    router: Router, exchanges: Sequence[Exchange], cause: AbortCause, asking: CallerHeaders, timeout_s: float
) -> set[Exchange]:
    """End requests at workers that leave the fleet, which no pause of it reaches; returns what those have ended."""
    targets = [RoutedTarget(exchange.id, exchange) for exchange in exchanges]
    for exchange in exchanges:
        exchange.ask_end(cause)
    merged, body = MergedAborts(_homes(targets)), AbortRequest(cause=cause)
    await _ask_workers(router, _by_worker(targets), body, asking, timeout_s, merged)
    return {target.exchange for target in targets if target.name in merged.aborted}


async def _ended(targets: Sequence[RoutedTarget], timeout_s: float) -> None:
    exchanges = [target.exchange for target in targets if target.exchange.ending and not target.exchange.over]
    await await_readers({exchange.when_over(): exchange.client.transport for exchange in exchanges}, timeout_s)


class MergedAborts:
    """What the workers have reported, by name.

    A worker's report counts for the requests that it was asked to end, unless the router knows a request to be at
    another worker.
    """

    def __init__(self, homes: Mapping[str, set[str]]) -> None:
        self._homes = homes
        self.workers: dict[str, AbortOutcome] = {}
        self.silent: list[WorkerReply] = []
        self.aborted: dict[str, list[int]] = {}  # tokens; several if tenants use the same name
        self.finished: set[str] = set()
        self.unknown: set[str] = set()  # to the workers that were asked
        self.errors: dict[str, AbortError] = {}
        self.accepted: dict[str, None] = {}

    def tells_of(self, name: str) -> bool:
        """Whether a worker has it, or had."""
        return name in self.aborted or name in self.finished or name in self.errors or name in self.accepted

    def add(self, reply: WorkerReply, asked: Names) -> None:
        if not reply.ok:
            self.silent.append(reply)
            self.workers[reply.worker.url] = AbortOutcome(status=reply.status or UNSET, error=reply.error)
            return
        self.workers[reply.worker.url] = AbortOutcome(status=reply.status)
        self._take(reply.told.result, reply.worker.url, None if asked is None else frozenset(asked))

    def _take(self, told: AbortResult, url: str, asked: frozenset[str] | None) -> None:
        def counts(name: str) -> bool:
            return (asked is None or name in asked) and url in self._homes.get(name, (url,))

        for each in told.aborted:
            if counts(each.request_id):
                self.aborted.setdefault(each.request_id, []).append(each.output_token_count)
        self.finished |= set(filter(counts, told.already_finished))
        self.unknown |= set(filter(counts, told.not_found))
        self.errors |= {error.request_id: error for error in told.errors if counts(error.request_id)}
        self.accepted |= dict.fromkeys(filter(counts, told.accepted or ()))

    def result(
        self, body: AbortRequest, targets: Sequence[RoutedTarget], unknown: Collection[str]
    ) -> RouterAbortResult:
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

    def _judge(self, result: RouterAbortResult, name: str, target: RoutedTarget | None) -> None:
        if target is not None and name not in self.errors and target.exchange.end_pending:
            unread = name in self.aborted and target.exchange.is_unread
            result.errors.append(AbortError(name, "not_told", UNREAD if unread else GOING_ON))
        elif target is not None and target.exchange.cut:  # its worker may have made more, which no client was sent
            result.aborted.append(AbortedRequest(name, target.exchange.journal.tokens))
        elif name in self.aborted:
            counts = self.aborted[name]
            result.aborted.append(AbortedRequest(name, counts.pop(0) if len(counts) > 1 else counts[0]))
        elif name in self.errors:
            result.errors.append(self.errors[name])
        elif name in self.finished:
            result.already_finished.append(name)
        elif target is not None and not target.exchange.over:
            result.errors.append(AbortError(name, "not_told", GOING_ON))
        elif target is not None:
            result.already_finished.append(name)
        elif self.silent:
            who = ", ".join(reply.worker.name for reply in self.silent)
            result.errors.append(
                AbortError(name, "unreachable", f"nobody who answered knows it; no answer from {who}")
            )
        else:
            result.not_found.append(name)

    def _accepted(
        self, result: RouterAbortResult, targets: Sequence[RoutedTarget], unknown: Collection[str]
    ) -> RouterAbortResult:
        result.accepted = list(dict.fromkeys([*(target.name for target in targets), *self.accepted]))
        for name in unknown:
            if name in self.finished:
                result.already_finished.append(name)
            elif name not in self.accepted:
                result.not_found.append(name)
        return result
