"""What is in flight in the whole fleet, and what happened to one request: the workers' own words, and what waits here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta, to_builtins

from headgate.contract.errors import NotFound
from headgate.contract.operations.control import LIST_REQUESTS, SHOW_REQUEST
from headgate.contract.requests import RequestList
from headgate.router.control.abort import RouterScope, find
from headgate.router.control.fan_out import CallerHeaders, WorkerCall, WorkerReply, call_of, of_kind, to_all
from headgate.router.exchange.prefill import prefill_name
from headgate.router.exchange.timeline import Stage, WorkerReport, stages

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.fleet.worker import Worker
    from headgate.router.router import Router


Moment = Annotated[float, Meta(ge=0, le=1e12)]


class Happened(msgspec.Struct):
    event: str
    at_s: Moment


class Aged(msgspec.Struct):
    age_s: Moment


class Elapsed(msgspec.Struct):
    arrived: Moment
    elapsed_s: Moment


class WorkerPart(msgspec.Struct):
    """What is read of a worker's answer to GET /v1/requests/{id}; all of it is passed on."""

    status: str
    events: list[Happened]
    age_s: Moment | None = None
    request: Aged | None = None
    usage: Elapsed | None = None

    def __post_init__(self) -> None:
        if self.request is None and self.usage is None:
            raise ValueError("it has neither request nor usage")


async def list_requests(router: Router, scope: RouterScope, asking: CallerHeaders) -> dict[str, Any]:
    scope.check_all()
    workers = of_kind(router.fleet, ("headgate",))
    replies = await router.worker_calls.fan_out(
        to_all(workers, call_of(LIST_REQUESTS, reads=RequestList)),
        asking,
        router.config.control_timeout_s,
    )
    mine = {_name(router, e.tenant, e.id): e for e in router.live.values() if scope.sees(e)}
    told: list[dict[str, Any]] = []
    for reply in replies:
        entries = [to_builtins(entry) for entry in reply.told.data] if reply.ok else []
        told += [entry | {"worker": reply.worker.url} for entry in entries if entry.get("kind") != "prefill"]
    told = [entry for entry in told if _is_there(entry, mine.get(_name_of(router, entry)))]
    known = {_name_of(router, entry) for entry in told}
    here = [_entry(exchange, router) for name, exchange in mine.items() if name not in known]
    return {"object": "list", "data": told + here, "unreachable": [r.worker.url for r in replies if not r.ok]}


def _name(router: Router, tenant: str, id: str) -> tuple[str, str]:
    """What tells one request from another; a router without keys does not know the tenants of its workers."""
    return (tenant if router.config.api_keys or router.config.admin_key else "", id)


def _name_of(router: Router, entry: dict[str, Any]) -> tuple[str, str]:
    return _name(router, entry.get("tenant", ""), entry["request_id"])


def _is_there(entry: dict[str, Any], exchange: Exchange | None) -> bool:
    """Whether it is told by the worker that has it now: one that it has left may still make it, for its key."""
    return exchange is None or exchange.worker is None or exchange.worker.url == entry["worker"]


async def show_request(router: Router, scope: RouterScope, asking: CallerHeaders, name: str) -> dict[str, Any]:
    exchange = next((target.exchange for target in find(router, scope.tenants(router), name)), None)
    ours = of_kind(router.fleet, ("headgate",))
    replies, prompts = await asyncio.gather(
        _ask(router, asking, [worker for worker in ours if _may_know(worker, exchange)], name),
        _ask(router, asking, [worker for worker in ours if worker.role == "prefill"], prefill_name(name)),
    )
    told: list[WorkerPart] = [reply.told for reply in replies if reply.ok]
    story = [to_builtins(stage) for stage in _stages(router, scope, exchange, name, replies, prompts)]
    if exchange is not None and not exchange.cut and not any(each.status == "in_flight" for each in told):
        entry = _entry(exchange, router)
        here = {"request_id": entry["request_id"], "status": "in_flight", "events": [], "age_s": entry["age_s"]}
        return {**here, "request": entry, "stages": story}
    if not told:
        raise _unknown(name, replies)
    last = max((reply for reply in replies if reply.ok), key=lambda reply: _latest(reply.told))
    return {**last.fields(), "worker": last.worker.url, "stages": story}


async def _ask(router: Router, asking: CallerHeaders, workers: Sequence[Worker], name: str) -> list[WorkerReply]:
    call = WorkerCall("GET", SHOW_REQUEST.path.format(id=quote(name, safe="")), reads=WorkerPart)
    return await router.worker_calls.fan_out(to_all(workers, call), asking, router.config.control_timeout_s)


def _may_know(worker: Worker, exchange: Exchange | None) -> bool:
    """Whether to ask it: of what is here and placed, only those who have it or had it know."""
    if exchange is None or exchange.worker is None:
        return True
    return worker is exchange.worker or any(each.worker == worker.url for each in exchange.departures)


def _stages(
    router: Router,
    scope: RouterScope,
    exchange: Exchange | None,
    name: str,
    replies: Sequence[WorkerReply],
    prompts: Sequence[WorkerReply],
) -> list[Stage]:
    words: list[WorkerReport] = [(reply.worker, "prompt", to_builtins(reply.told)) for reply in prompts if reply.ok]
    words += [(reply.worker, "answer", to_builtins(reply.told)) for reply in replies if reply.ok]
    if exchange is not None:
        return stages(words, exchange.departures, exchange.began)
    moved = router.moved.get(name, None if scope.admin else scope.tenant)
    if moved is None or not words:
        return stages(words)
    return stages(words, moved.departures, moved.began)


def _latest(told: WorkerPart) -> tuple[bool, float]:
    """Of an answer that has moved, the last worker's word."""
    return told.status == "in_flight", -inf if told.age_s is None else -told.age_s


def _unknown(name: str, replies: list[WorkerReply]) -> NotFound:
    silent = [reply.worker.name for reply in replies if not reply.ok and reply.status != 404]
    more = f" (no answer from {', '.join(silent)})" if silent else ""
    return NotFound(f"there is no request {name!r}, or it ended long ago{more}", param="id", code="request_not_found")


def _entry(exchange: Exchange, router: Router) -> dict[str, Any]:
    """One that no worker has told of: it waits here, or its worker is of another kind or does not answer."""
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
