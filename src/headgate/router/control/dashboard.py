"""The dashboard's view of a fleet: its workers, the requests in the router, and the sum of all metrics."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from headgate.contract.dashboard import BOUNDS, Numbers, state_of
from headgate.dashboard.frame import EndedView, FleetView, MemberView, RequestView, Viewer
from headgate.dashboard.meter import Counts
from headgate.dashboard.page import NUMBERS
from headgate.router.control.fan_out import CallerHeaders, WorkerCall, WorkerReply
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import EndedExchange, Exchange
    from headgate.router.router import Router

ASK_TIMEOUT_S = 0.8  # a worker that takes longer is shown without its own metrics

decode = msgspec.json.Decoder(Numbers).decode


class RouterSource:
    kind = "router"
    bounds = BOUNDS

    def __init__(self, router: Router, version: str) -> None:
        self.version = version
        self._router = router

    async def look(self) -> FleetView:
        router = self._router
        numbers = await self._fetch_numbers()
        workers = router.fleet.with_leaving
        sources = {"router": _own_counts(router)}
        for worker, report in numbers.items():
            # The router counts requests, because the workers' counts include a request that has moved twice.
            sources[f"{worker.url}/"] = replace(report.counts, requests=0)
            sources |= {f"{worker.url}/{engine.engine}": engine.counts for engine in report.engines}
        return FleetView(
            model=", ".join(sorted({model for worker in workers for model in worker.models})),
            state=_state(router),
            cards=[_member_view(worker, numbers.get(worker)) for worker in workers],
            sources=sources,
            over=router.draining and not router.live,
        )

    async def _fetch_numbers(self) -> dict[Worker, Numbers]:
        router = self._router
        calls = {worker: WorkerCall("GET", NUMBERS) for worker in router.fleet if worker.kind == "headgate"}
        replies = await router.worker_calls.fan_out(calls, CallerHeaders(), ASK_TIMEOUT_S)
        return {reply.worker: report for reply in replies if (report := _read(reply)) is not None}

    def requests(self, viewer: Viewer, most: int) -> tuple[list[RequestView], int]:
        visible = [exchange for exchange in self._router.live.values() if viewer.sees(exchange.tenant)]
        now_s = self._router.loop.time()
        return [_request_view(exchange, now_s) for exchange in islice(visible, most)], len(visible)

    def ended(self, viewer: Viewer, most: int) -> list[EndedView]:
        latest: dict[tuple[str, str], EndedExchange] = {}  # an id may have been used again
        for ended in reversed(self._router.ended):
            if len(latest) == most:
                break
            if viewer.sees(ended.tenant):
                latest.setdefault((ended.tenant, ended.id), ended)
        now_s = self._router.loop.time()
        return [_ended_view(ended, now_s) for ended in latest.values()]


def _read(reply: WorkerReply) -> Numbers | None:
    """Return the worker's numbers; None if it does not answer, or is an older version without this call."""
    try:
        return decode(reply.body) if reply.ok else None
    except msgspec.MsgspecError:
        return None


def _own_counts(router: Router) -> Counts:
    counters = router.counters
    return Counts(requests=counters.requests, retries=counters.retries, resumes=counters.resumes)


def _state(router: Router) -> str:
    states = {worker.state for worker in router.fleet}
    if router.draining:
        return "draining"
    if router.holding:
        return "pausing" if "ready" in states else "paused"
    if router.fleet.rolling:
        return "updating"
    return "running" if "ready" in states else "paused" if "paused" in states else "down"


def _member_view(worker: Worker, report: Numbers | None) -> MemberView:
    view = MemberView(
        id=worker.url,
        name=worker.name.removeprefix("http://"),
        detail=worker.kind,
        state=worker.state,
        role=worker.role,
        version=worker.version,
        running=worker.running,
        waiting=worker.waiting,
        total=worker.total_blocks,
        held=worker.total_blocks - worker.free_blocks,
    )
    if report is None or not report.engines:
        return view
    for name in ("running", "waiting", "total", "held", "leased", "cached"):
        setattr(view, name, sum(getattr(engine, name) for engine in report.engines))
    details = dict.fromkeys(engine.detail for engine in report.engines if engine.detail)
    view.detail = ", ".join([*details, *([f"{len(report.engines)} engines"] if len(report.engines) > 1 else [])])
    if worker.state == "paused":
        view.state = state_of(report)  # the report distinguishes more states than the router does
    return view


def _request_view(exchange: Exchange, now_s: float) -> RequestView:
    tokens = exchange.journal.tokens
    worker = exchange.worker or (exchange.prefill_request.worker if exchange.prefill_request is not None else None)
    return RequestView(
        id=exchange.id,
        tenant=exchange.tenant,
        kind=exchange.request.path.rpartition("/")[2],
        phase=_phase(exchange, tokens),
        age_s=round(now_s - exchange.began_s, 2),
        tokens=tokens,
        worker=None if worker is None else worker.url,
        moves=exchange.moves,
        first_token_s=None if exchange.first_token_s is None else round(exchange.first_token_s, 3),
    )


def _ended_view(ended: EndedExchange, now_s: float) -> EndedView:
    return EndedView(
        ended.id,
        ended.tenant,
        ended.path.removeprefix("/v1/"),
        ago_s=round(now_s - ended.ended_s, 2),
        took_s=round(ended.ended_s - ended.began_s, 3),
        end=ended.cause,
        moves=ended.moves,
    )


def _phase(exchange: Exchange, tokens: int) -> str:
    if exchange.attempt is None:
        return "prefill" if exchange.prefill_request is not None else "moving" if exchange.moves else "queued"
    if tokens or exchange.unresumable:
        return "decode"
    return "transfer" if exchange.prefill_request is not None else "prefill"
