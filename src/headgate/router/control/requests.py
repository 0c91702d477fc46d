"""Lists the requests in flight in the whole fleet, and shows the timeline of one, from workers and this router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta, to_builtins

from headgate.contract.errors import NotFound
from headgate.contract.keys import Caller
from headgate.contract.operations.control import LIST_REQUESTS, SHOW_REQUEST
from headgate.contract.requests import RequestList
from headgate.router.control.abort import find, tenants_of
from headgate.router.control.fan_out import CallerHeaders, WorkerCall, WorkerReply, call_of, of_kind, to_all
from headgate.router.exchange.prefill import prefill_name
from headgate.router.exchange.timeline import Stage, WorkerReport, stages

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.fleet.worker import Worker
    from headgate.router.router import Router


Moment = Annotated[float, Meta(ge=0, le=1e12)]


class TimelineEvent(msgspec.Struct):
    event: str
    at_s: Moment


class RequestAge(msgspec.Struct):
    age_s: Moment


class UsageTimes(msgspec.Struct):
    arrived: Moment
    elapsed_s: Moment


class WorkerPart(msgspec.Struct):
    """The decoded fields of a worker's answer to GET /v1/requests/{id}. All other fields are passed on undecoded."""

    status: str
    events: list[TimelineEvent]
    age_s: Moment | None = None
    request: RequestAge | None = None
    usage: UsageTimes | None = None

    def __post_init__(self) -> None:
        if self.request is None and self.usage is None:
            raise ValueError("the answer has neither request nor usage")


async def list_requests(router: Router, caller: Caller, headers: CallerHeaders) -> dict[str, Any]:
    caller.check_may_list()
    workers = of_kind(router.fleet, ("headgate",))
    before = _visible(router, caller)
    replies = await router.worker_calls.fan_out(
        to_all(workers, call_of(LIST_REQUESTS, reads=RequestList)),
        headers,
        router.config.control_timeout_s,
    )
    visible = _visible(router, caller)
    ended = before.keys() - visible.keys()
    reported: dict[tuple[str, str, str], dict[str, Any]] = {}
    for reply in replies:
        entries = [to_builtins(entry) for entry in reply.answer.data] if reply.ok else []
        for entry in entries:
            identity = _entry_identity(router, entry)
            exchange = visible.get(identity)
            if entry.get("kind") == "prefill" or identity in ended or not _is_current(reply.worker, exchange):
                continue
            # A request of this router is listed once. Requests of other routers are distinguished by their worker.
            key = (*identity, "" if exchange is not None else reply.worker.url)
            reported[key] = entry | {"worker": reply.worker.url}
    known = {key[:2] for key in reported}
    here = [_entry(exchange, router) for name, exchange in visible.items() if name not in known]
    unreachable = [reply.worker.url for reply in replies if not reply.ok]
    return {"object": "list", "data": [*reported.values(), *here], "unreachable": unreachable}


def _visible(router: Router, caller: Caller) -> dict[tuple[str, str], Exchange]:
    return {_identity(router, e.tenant, e.id): e for e in router.live.values() if caller.sees(e.tenant)}


def _identity(router: Router, tenant: str, id: str) -> tuple[str, str]:
    """Return what identifies a request. A router without keys ignores the tenant, which only its workers know."""
    return (tenant if router.config.api_keys or router.config.admin_key else "", id)


def _entry_identity(router: Router, entry: dict[str, Any]) -> tuple[str, str]:
    return _identity(router, entry.get("tenant", ""), entry["request_id"])


def _is_current(worker: Worker, exchange: Exchange | None) -> bool:
    """Whether `worker` has the request now. A former worker may still compute it, for its `Idempotency-Key`."""
    return exchange is None or exchange.worker is None or exchange.worker is worker


async def show_request(router: Router, caller: Caller, headers: CallerHeaders, name: str) -> dict[str, Any]:
    exchange = next((target.exchange for target in find(router, tenants_of(router, caller), name)), None)
    ours = of_kind(router.fleet, ("headgate",))
    replies, prefills = await asyncio.gather(
        _ask(router, headers, [worker for worker in ours if _may_know(worker, exchange)], name),
        _ask(router, headers, [worker for worker in ours if worker.role == "prefill"], prefill_name(name)),
    )
    reported: list[WorkerPart] = [reply.answer for reply in replies if reply.ok]
    timeline = [to_builtins(stage) for stage in _stages(router, caller, exchange, name, replies, prefills)]
    if exchange is not None and not exchange.cut and not any(each.status == "in_flight" for each in reported):
        entry = _entry(exchange, router)
        here = {"request_id": entry["request_id"], "status": "in_flight", "events": [], "age_s": entry["age_s"]}
        return {**here, "request": entry, "stages": timeline}
    if not reported:
        raise _unknown(name, replies)
    last = max((reply for reply in replies if reply.ok), key=lambda reply: _latest(reply.answer))
    return {**last.fields(), "worker": last.worker.url, "stages": timeline}


async def _ask(router: Router, caller: CallerHeaders, workers: Sequence[Worker], name: str) -> list[WorkerReply]:
    call = WorkerCall("GET", SHOW_REQUEST.path.format(id=quote(name, safe="")), reads=WorkerPart)
    return await router.worker_calls.fan_out(to_all(workers, call), caller, router.config.control_timeout_s)


def _may_know(worker: Worker, exchange: Exchange | None) -> bool:
    """Whether the worker may have a record of the request; if this router placed it, only workers that had it do."""
    if exchange is None or exchange.worker is None:
        return True
    return worker is exchange.worker or any(each.worker == worker.url for each in exchange.departures)


def _stages(
    router: Router,
    caller: Caller,
    exchange: Exchange | None,
    name: str,
    replies: Sequence[WorkerReply],
    prefills: Sequence[WorkerReply],
) -> list[Stage]:
    parts: list[WorkerReport] = [
        (reply.worker, "prompt", to_builtins(reply.answer)) for reply in prefills if reply.ok
    ]
    parts += [(reply.worker, "answer", to_builtins(reply.answer)) for reply in replies if reply.ok]
    if exchange is not None:
        return stages(parts, exchange.departures, exchange.began)
    moved = router.moved.get(name, None if caller.admin else caller.tenant)
    if moved is None or not parts:
        return stages(parts)
    return stages(parts, moved.departures, moved.began)


def _latest(reported: WorkerPart) -> tuple[bool, float]:
    """Sort key: the report of the last worker of a request that has moved is the greatest."""
    return reported.status == "in_flight", -inf if reported.age_s is None else -reported.age_s


def _unknown(name: str, replies: list[WorkerReply]) -> NotFound:
    silent = [reply.worker.name for reply in replies if not reply.ok and reply.status != 404]
    more = f" (no answer from {', '.join(silent)})" if silent else ""
    return NotFound(f"there is no request {name!r}, or it ended long ago{more}", param="id", code="request_not_found")


def _entry(exchange: Exchange, router: Router) -> dict[str, Any]:
    """Return the entry of a request that no worker reports.

    The request waits here, or its worker does not answer or is of another kind.
    """
    worker = exchange.worker
    return {
        "request_id": exchange.id,
        "tenant": exchange.tenant,
        "kind": exchange.request.path.rpartition("/")[2],
        "phase": "queued" if worker is None else "running",
        "age_s": round(router.loop.time() - exchange.began_s, 6),
        "output_tokens": exchange.journal.tokens,
        "tags": {},
        "choices": [],
        "worker": None if worker is None else worker.url,
    }
