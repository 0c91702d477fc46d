"""Aborts requests wherever they are, and reports the outcome for each.

The router asks the worker that has a request to end it. If the router does not know an id, another router may have
placed the request, so all workers are asked. Once its end was requested, a request is neither retried nor resumed.
The router itself ends a request that waits in the router, is between two workers, or is at a worker without an abort
call.
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
from headgate.contract.keys import Caller
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

NOT_ENDED = "its end was requested, but it has not ended yet"

Names = Sequence[str] | None  # ids of requests that a worker is asked to end; None for all that it has


@dataclass(frozen=True, slots=True)
class RoutedTarget:
    """A request of this router, or one choice of a request, under the name that the caller used."""

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
    """Find requests by name. There are several only if several of these tenants use the same name."""
    for label, choice in readings(name):
        named = [e for tenant in tenants if (e := router.live.get((tenant, label, 0))) is not None]
        if found := [RoutedTarget(name, e, choice) for e in named if choice is None or choice < e.info.n]:
            return found
    return []


def tenants_of(router: Router, caller: Caller) -> Collection[str]:
    """Return the tenants whose requests the caller may name: for an admin, all tenants with requests here."""
    return dict.fromkeys(e.tenant for e in router.live.values()) if caller.admin else (caller.tenant,)


async def abort(router: Router, body: AbortRequest, caller: Caller, headers: CallerHeaders) -> RouterAbortResult:
    unknown: list[str] = []
    if body.req_ids is None:
        caller.check_may_list()
        targets = _matching(router, caller, body.tags)
    else:
        targets, unknown = _named(router, caller, body.req_ids)
    began_s = router.loop.time()
    due_s = began_s + body.timeout
    _end_here(targets, body.cause)
    merged = MergedAborts(targets)
    # This wait runs beside the calls to workers, because the workers wait for the same clients.
    waiting = router.loop.create_task(_wait_ended(targets, body.timeout))
    try:
        await _ask_workers(router, _ids_to_end(router, body, targets, unknown), body, headers, body.timeout, merged)
        if body.req_ids is None and (left_s := due_s - router.loop.time()) > 0:
            # The second call names ids, because a worker then reports those that it does not know.
            await _ask_workers(router, _ids_by_worker(_unreported(targets, merged)), body, headers, left_s, merged)
        late = _end_overtaken(targets, merged)
        targets += (arrived := _end_arrived(router, caller, merged, targets, body.cause, began_s))
        if body.wait:
            await waiting
            await _wait_ended([*late, *arrived], LEAST_S)
    finally:
        waiting.cancel()
    return merged.result(body, targets, unknown, caller)


def _named(router: Router, caller: Caller, names: Iterable[str]) -> tuple[list[RoutedTarget], list[str]]:
    tenants = tenants_of(router, caller)
    found = {name: find(router, tenants, name) for name in names}
    unknown = [name for name, targets in found.items() if not targets]
    return [target for targets in found.values() for target in targets], unknown


def _matching(router: Router, caller: Caller, tags: Any) -> list[RoutedTarget]:
    """Return the caller's requests in this router; only those with these tags, if tags are given."""
    wanted = (tags or {}).items()
    mine = [exchange for exchange in router.live.values() if caller.sees(exchange.tenant)]
    return [RoutedTarget(e.id, e) for e in mine if not wanted or wanted <= _tags(e).items()]


def _tags(exchange: Exchange) -> dict[str, str]:
    try:
        return msgspec.json.decode(exchange.request.body, type=_Tagged).tags
    except UNREADABLE:
        return {}


def _end_here(targets: Iterable[RoutedTarget], cause: AbortCause) -> None:
    """End requests that no worker can be asked to end. Mark all others as ending, so that they are not retried."""
    for target in targets:
        exchange = target.exchange
        if target.choice is not None and exchange.info.n > 1:
            exchange.ask_choice_end(target.choice, cause)
        elif exchange.worker is None or exchange.worker.kind != "headgate":
            exchange.end(cause)
        else:
            exchange.ask_end(cause)


def _end_overtaken(targets: Iterable[RoutedTarget], merged: MergedAborts) -> list[RoutedTarget]:
    """End requests that their worker does not know, because the abort arrived there before the request."""
    overtaken = [target for target in targets if merged.is_unknown(target) and target.exchange.end_pending]
    for target in overtaken:
        target.exchange.end()
    return overtaken


def _end_arrived(
    router: Router,
    caller: Caller,
    merged: MergedAborts,
    known: Iterable[RoutedTarget],
    cause: AbortCause,
    since_s: float,
) -> list[RoutedTarget]:
    """Requests that reached this router during the call, and that their worker reports to have ended.

    They are marked as ending, so that they are not resumed elsewhere. A report on a request that has already left the
    worker is discarded: a pause or a shutdown had ended it there, and it continues.
    """
    names, tenants, arrived = {target.name for target in known}, tenants_of(router, caller), list[RoutedTarget]()
    for name, enders in [(name, urls) for name, urls in merged.enders.items() if name not in names]:
        found = find(router, tenants, name)
        at_enders = [
            each for each in found if each.exchange.worker is not None and each.exchange.worker.url in enders
        ]
        if not at_enders and enders <= _left_workers(router, caller, name, found, since_s):
            merged.discard(name)
        arrived += at_enders
    _end_here(arrived, cause)
    return arrived


def _left_workers(
    router: Router, caller: Caller, name: str, found: Iterable[RoutedTarget], since_s: float
) -> set[str]:
    """The addresses of workers that a request of this name has left, if it is in the router or was after `since_s`."""
    departures = [each for target in found for each in target.exchange.departures]
    moved = router.moved.get(name, None if caller.admin else caller.tenant)
    if moved is not None and moved.ended_s >= since_s:
        departures += moved.departures
    return {departure.worker for departure in departures}


def _ids_to_end(
    router: Router, body: AbortRequest, targets: Sequence[RoutedTarget], unknown: Sequence[str]
) -> Mapping[Worker, Names]:
    """Return the ids that each worker is asked to end."""
    all_workers = [worker for worker in router.fleet if worker.kind in ("headgate", "unknown")]
    names = _ids_by_worker(targets)
    if body.req_ids is None:
        # A worker that was removed is asked to end only the requests of this router.
        urls = {worker.url for worker in all_workers}
        leaving = {worker: named for worker, named in names.items() if worker.url not in urls}
        return dict.fromkeys(all_workers) | leaving
    for target in targets:
        for worker in _former_workers(router, target.exchange):
            names[worker].append(target.name)
    for worker in all_workers if unknown else ():
        names[worker] += unknown
    return names


async def _ask_workers(
    router: Router,
    asked: Mapping[Worker, Names],
    body: AbortRequest,
    caller: CallerHeaders,
    timeout_s: float,
    merged: MergedAborts,
) -> None:
    every = {"abort_all": True} if body.tags is None else {"tags": body.tags}
    common = {"wait": body.wait, "timeout": timeout_s} | ({} if body.cause == CAUSE else {"cause": body.cause})
    calls = {
        worker: abort_call(common | (every if names is None else {"req_ids": names}))
        for worker, names in asked.items()
    }
    for reply in await router.worker_calls.fan_out(calls, caller, timeout_s + SLACK_S):
        merged.add(reply, asked[reply.worker])


def _ids_by_worker(targets: Iterable[RoutedTarget]) -> defaultdict[Worker, list[str]]:
    names: defaultdict[Worker, list[str]] = defaultdict(list)
    for target in targets:
        worker = target.exchange.worker
        if worker is not None and worker.kind == "headgate" and not target.exchange.cut:
            names[worker].append(target.name)
    return names


def _holders(targets: Iterable[RoutedTarget]) -> dict[str, dict[Exchange, str | None]]:
    """Map the name of each request to the addresses of the workers that have it now, one for each tenant's request."""
    holders: defaultdict[str, dict[Exchange, str | None]] = defaultdict(dict)
    for target in targets:
        worker = target.exchange.worker
        holders[target.name][target.exchange] = None if worker is None else worker.url
    return holders


def _former_workers(router: Router, exchange: Exchange) -> list[Worker]:
    """Return former workers that may still compute the request: with an `Idempotency-Key` they finish it."""
    if not exchange.departures or exchange.request.header(b"idempotency-key") is None:
        return []
    urls = {each.worker for each in exchange.departures}
    return [worker for worker in router.fleet if worker.url in urls and worker is not exchange.worker]


def _unreported(targets: Iterable[RoutedTarget], merged: MergedAborts) -> list[RoutedTarget]:
    """Return requests that were on their way to a worker when it was asked to end all its requests."""
    silent = {reply.worker.url for reply in merged.silent}
    unnamed = [target for target in targets if not target.exchange.over and not merged.reports_on(target)]
    return [target for target in unnamed if (worker := target.exchange.worker) is None or worker.url not in silent]


async def end_at_removed_workers(
    router: Router, exchanges: Sequence[Exchange], cause: AbortCause, caller: CallerHeaders, timeout_s: float
) -> set[Exchange]:
    """End requests at removed workers, which a pause of the fleet does not reach. Returns the ended requests."""
    targets = [RoutedTarget(exchange.id, exchange) for exchange in exchanges]
    for exchange in exchanges:
        exchange.ask_end(cause)
    merged, body = MergedAborts(targets), AbortRequest(cause=cause)
    await _ask_workers(router, _ids_by_worker(targets), body, caller, timeout_s, merged)
    return {target.exchange for target in targets if merged.report_on(target) is not None}


async def _wait_ended(targets: Sequence[RoutedTarget], timeout_s: float) -> None:
    exchanges = [target.exchange for target in targets if target.exchange.ending and not target.exchange.over]
    await await_readers({exchange.when_over(): exchange.client.transport for exchange in exchanges}, timeout_s)


@dataclass(frozen=True, slots=True)
class AbortReport:
    """A worker's report that it has ended a request."""

    worker: str
    tokens: int
    tenant: str | UnsetType  # if the caller is an admin, and the request is not its own

    def may_be_about(self, tenant: str) -> bool:
        """Whether the request may be this tenant's. The empty tenant of a router without keys matches every request."""
        return self.tenant is UNSET or not tenant or self.tenant == tenant


class MergedAborts:
    """The workers' reports, by name of the request. Requests of several tenants may have the same name.

    A worker's report counts for the requests that it was asked to end, unless the router knows that a request is at
    another worker.
    """

    def __init__(self, targets: Iterable[RoutedTarget]) -> None:
        self._holders = _holders(targets)
        self.workers: dict[str, AbortOutcome] = {}
        self.silent: list[WorkerReply] = []
        self.aborted: defaultdict[str, list[AbortReport]] = defaultdict(list)
        self.finished: set[str] = set()
        self._unknown: defaultdict[str, set[str]] = defaultdict(set)  # addresses of workers that do not know it
        self.errors: dict[str, AbortError] = {}
        self.accepted: dict[str, None] = {}
        self.enders: defaultdict[str, set[str]] = defaultdict(set)  # addresses of workers that have ended it, or will

    def reports_on(self, target: RoutedTarget) -> bool:
        """Whether a worker has or had the request."""
        name, aborted = target.name, self.report_on(target) is not None
        return aborted or name in self.finished or name in self.errors or name in self.accepted

    def report_on(self, target: RoutedTarget) -> AbortReport | None:
        """Return the report of the worker that has ended this request; None if only other tenants' requests ended."""
        tenant, reports = target.exchange.tenant, self.aborted.get(target.name, ())
        holder = self._holders.get(target.name, {}).get(target.exchange)
        found = [report for report in reports if report.may_be_about(tenant) and holder in (None, report.worker)]
        return min(found, key=lambda report: report.tenant != tenant, default=None)

    def is_unknown(self, target: RoutedTarget) -> bool:
        """Whether the worker that has the request was asked to end it and did not know it.

        A worker that reports the same request as ended contradicts itself; its answer to the request then counts.
        """
        worker, unknown = target.exchange.worker, self._unknown.get(target.name, ())
        return bool(unknown) and (worker is None or worker.url in unknown) and not self.reports_on(target)

    def add(self, reply: WorkerReply, asked: Names) -> None:
        if not reply.ok:
            self.silent.append(reply)
            self.workers[reply.worker.url] = AbortOutcome(status=reply.status or UNSET, error=reply.error)
            return
        self.workers[reply.worker.url] = AbortOutcome(status=reply.status)
        self._merge(reply.answer.result, reply.worker.url, None if asked is None else frozenset(asked))

    def _merge(self, report: AbortResult, url: str, asked: frozenset[str] | None) -> None:
        def counts(name: str) -> bool:
            holders = self._holders.get(name)
            return (asked is None or name in asked) and (holders is None or url in holders.values())

        for each in report.aborted:
            if counts(each.request_id):
                self.aborted[each.request_id].append(AbortReport(url, each.output_token_count, each.tenant))
                self.enders[each.request_id].add(url)
        self.finished |= set(filter(counts, report.already_finished))
        for name in filter(counts, report.not_found):
            self._unknown[name].add(url)
        self.errors |= {error.request_id: error for error in report.errors if counts(error.request_id)}
        for name in filter(counts, report.accepted or ()):
            self.accepted[name] = None
            self.enders[name].add(url)

    def discard(self, name: str) -> None:
        """Discard what workers have reported on a request that has left them."""
        self.aborted.pop(name, None)
        self.accepted.pop(name, None)

    def result(
        self, body: AbortRequest, targets: Sequence[RoutedTarget], unknown: Collection[str], caller: Caller
    ) -> RouterAbortResult:
        result = RouterAbortResult(workers=self.workers)
        if not body.wait:
            return self._accepted(result, targets, unknown)
        here: defaultdict[str, set[str]] = defaultdict(set)  # the tenants of the targets, by name
        for target in {(target.exchange.tenant, target.name): target for target in targets}.values():
            self._classify(result, target, caller)
            here[target.name].add(target.exchange.tenant)
        for name, reports in self.aborted.items():
            others = [each for each in reports if not any(map(each.may_be_about, here.get(name, ())))]
            for tenant, report in {each.tenant: each for each in reversed(others)}.items():
                result.aborted.append(AbortedRequest(name, report.tokens, tenant))
        for name in dict.fromkeys([*unknown, *self.errors]):
            if name not in here and not self.aborted.get(name):
                self._classify_unknown(result, name)
        return result

    def _classify(self, result: RouterAbortResult, target: RoutedTarget, caller: Caller) -> None:
        name, exchange, report = target.name, target.exchange, self.report_on(target)
        tenant = exchange.tenant if caller.is_foreign(exchange.tenant) else UNSET
        if name not in self.errors and exchange.end_pending:
            unread = report is not None and exchange.is_unread
            result.errors.append(AbortError(name, "not_told", UNREAD if unread else NOT_ENDED))
        elif exchange.cut:  # the worker may have generated more tokens than the client was sent
            result.aborted.append(AbortedRequest(name, _sent_tokens(target), tenant))
        elif self._continues_elsewhere(target):
            result.errors.append(AbortError(name, "not_told", NOT_ENDED))
        elif report is not None:
            result.aborted.append(AbortedRequest(name, report.tokens, tenant))
        elif name in self.errors:
            result.errors.append(self.errors[name])
        elif name in self.finished or exchange.over:
            result.already_finished.append(name)
        else:
            result.errors.append(AbortError(name, "not_told", NOT_ENDED))

    def _continues_elsewhere(self, target: RoutedTarget) -> bool:
        """Whether the request has left the worker that was asked to end a choice of it; its next worker will do so."""
        exchange, holder = target.exchange, self._holders.get(target.name, {}).get(target.exchange)
        left = holder is not None and (exchange.worker is None or exchange.worker.url != holder)
        return target.choice in exchange.choice_ends and left and not exchange.over and not _has_ended(target)

    def _classify_unknown(self, result: RouterAbortResult, name: str) -> None:
        """Classify a request that this router does not have, and that no worker has ended."""
        if name in self.errors:
            result.errors.append(self.errors[name])
        elif name in self.finished:
            result.already_finished.append(name)
        elif self.silent:
            names = ", ".join(reply.worker.name for reply in self.silent)
            result.errors.append(
                AbortError(name, "unreachable", f"no worker that answered knows it; no answer from {names}")
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


def _has_ended(target: RoutedTarget) -> bool:
    """Whether the client has received the end of the choice."""
    choice = None if target.choice is None else target.exchange.journal.choices.get(target.choice)
    return choice is not None and choice.finish is not None


def _sent_tokens(target: RoutedTarget) -> int:
    """The number of tokens that the client has received of the request, or of the choice."""
    journal = target.exchange.journal
    if target.choice is None:
        return journal.tokens
    return len(journal.choices[target.choice].tokens) if target.choice in journal.choices else 0
