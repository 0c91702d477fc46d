"""What the dashboard shows of a fleet: its workers, what passes through the router, and everybody's numbers together."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from headgate.contract.dashboard import BOUNDS, Numbers, state_of
from headgate.dashboard.frame import FleetView, MemberView, RequestView, Viewer
from headgate.dashboard.meter import Counts
from headgate.dashboard.page import NUMBERS
from headgate.router.control.fan_out import CallerHeaders, WorkerCall, WorkerReply
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.router import Router

ASK_TIMEOUT_S = 0.8  # a worker that takes longer is shown without its own numbers

decode = msgspec.json.Decoder(Numbers).decode


class RouterSource:
    kind = "router"
    bounds = BOUNDS

    def __init__(self, router: Router, version: str) -> None:
        self.version = version
        self._router = router

    async def look(self) -> FleetView:
        router = self._router
        numbers = await self._ask()
        workers = router.fleet.everyone
        sources = {"router": _own_counts(router)}
        for worker, told in numbers.items():
            # Requests are counted here: at the workers one that has moved counts twice.
            sources[f"{worker.url}/"] = replace(told.counts, requests=0)
            sources |= {f"{worker.url}/{engine.engine}": engine.counts for engine in told.engines}
        return FleetView(
            model=", ".join(sorted({model for worker in workers for model in worker.models})),
            state=_state(router),
            cards=[_card(worker, numbers.get(worker)) for worker in workers],
            sources=sources,
            over=router.draining and not router.live,
        )

    async def _ask(self) -> dict[Worker, Numbers]:
        router = self._router
        calls = {worker: WorkerCall("GET", NUMBERS) for worker in router.fleet if worker.kind == "headgate"}
        replies = await router.worker_calls.fan_out(calls, CallerHeaders(), ASK_TIMEOUT_S)
        return {reply.worker: told for reply in replies if (told := _read(reply)) is not None}

    def requests(self, viewer: Viewer, most: int) -> tuple[list[RequestView], int]:
        mine = [exchange for exchange in self._router.live.values() if viewer.sees(exchange.tenant)]
        now_s = self._router.loop.time()
        return [_shown(exchange, now_s) for exchange in islice(mine, most)], len(mine)


def _read(reply: WorkerReply) -> Numbers | None:
    """None of a worker that does not answer, or is of an older version and has no such call."""
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


def _card(worker: Worker, told: Numbers | None) -> MemberView:
    card = MemberView(
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
    if told is None or not told.engines:
        return card
    for name in ("running", "waiting", "total", "held", "leased", "cached"):
        setattr(card, name, sum(getattr(engine, name) for engine in told.engines))
    details = dict.fromkeys(engine.detail for engine in told.engines if engine.detail)
    card.detail = ", ".join([*details, *([f"{len(told.engines)} engines"] if len(told.engines) > 1 else [])])
    if worker.state == "paused":
        card.state = state_of(told)  # which knows more words
    return card


def _shown(exchange: Exchange, now_s: float) -> RequestView:
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
    )


def _phase(exchange: Exchange, tokens: int) -> str:
    if exchange.attempt is None:
        return "prefill" if exchange.prefill_request is not None else "moving" if exchange.moves else "queued"
    if tokens or exchange.unresumable:
        return "decode"
    return "transfer" if exchange.prefill_request is not None else "prefill"
