"""The dashboard's data about one server: engines, requests and counts.

`/dashboard/numbers` returns the same to a router, as counts that can be added to those of other servers.
"""

from __future__ import annotations

import asyncio
from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import PREFILL, PROBE
from headgate.api.accounting.metrics import EngineView, query_engines
from headgate.api.control.requests import SequenceStatuses, in_flight, query_sequences
from headgate.api.host import ServerContext, host_of
from headgate.api.state import Api
from headgate.contract.dashboard import BOUNDS, EngineNumbers, Numbers, state_of
from headgate.contract.requests import UsageRecord
from headgate.dashboard.feed import Feed
from headgate.dashboard.frame import EndedView, FleetView, MemberView, RequestView, Viewer
from headgate.dashboard.meter import Counts
from headgate.edge.dashboard import watched

MOST_SEARCHED = 1000  # ended requests that are searched for those of one viewer
UNLISTED = (PROBE, PREFILL)
QUERY_TIMEOUT_S = 0.8  # an engine that takes longer is shown as not responding

# From our phases to those that the page shows; a phase that is not listed is shown as it is.
PHASES = {"preparing": "queued", "waiting": "queued", "preempted": "queued", "loading": "transfer"}


class ServerSource:
    kind = "server"
    bounds = BOUNDS

    def __init__(self, api: Api, host: ServerContext) -> None:
        self.version = host.version
        self._api = api
        self._host = host
        self._seen: SequenceStatuses = {}

    async def look(self) -> FleetView:
        numbers, self._seen = await asyncio.gather(query_server(self._host), self._sequences())
        ledger = self._host.ledger
        sources = {f"{engine.engine}/": engine.counts for engine in numbers.engines}
        return FleetView(
            model=self._host.model_name,
            state="draining" if ledger.closing else state_of(numbers),
            cards=[_member(engine) for engine in numbers.engines],
            sources=sources | {"server": numbers.counts},
            over=ledger.closing and not ledger.live,
        )

    async def _sequences(self) -> SequenceStatuses:
        return await query_sequences(self._api, QUERY_TIMEOUT_S) if self._host.ledger.live else {}

    def requests(self, viewer: Viewer, most: int) -> tuple[list[RequestView], int]:
        mine = [record for record in self._host.ledger.live.values() if viewer.sees(record.tenant)]
        shown = []
        for record in islice(mine, most):
            request = in_flight(record, self._seen)
            worker = next((str(choice.worker) for choice in request.choices if choice.worker is not None), None)
            phase = phase_of(request.phase, request.output_tokens)
            shown.append(
                RequestView(
                    record.label,
                    record.tenant,
                    record.kind,
                    phase,
                    round(request.age_s, 2),
                    request.output_tokens,
                    worker,
                    first_token_s=None if record.first_token_s is None else round(record.first_token_s, 3),
                )
            )
        return shown, len(mine)

    def ended(self, viewer: Viewer, most: int) -> list[EndedView]:
        ledger = self._host.ledger
        past = islice(ledger.latest(), MOST_SEARCHED)
        mine = (each for each in past if viewer.sees(each.usage.tenant) and each.usage.kind not in UNLISTED)
        return [_ended(each.usage, ledger.clock() - each.arrived_s) for each in islice(mine, most)]


def _ended(usage: UsageRecord, age_s: float) -> EndedView:
    return EndedView(
        usage.request_id,
        usage.tenant,
        usage.kind,
        ago_s=round(age_s - usage.elapsed_s, 2),
        took_s=round(usage.elapsed_s, 3),
        end=usage.cause,
        tokens=usage.output_tokens,
    )


def phase_of(phase: str, output_tokens: int) -> str:
    if output_tokens and phase not in ("preempted", "finished"):  # `phase` is from an earlier query of the engines
        return "decode"
    if phase in ("running", "unknown"):  # unknown: the sequence began after the query
        return "prefill"
    return PHASES.get(phase, phase)


async def query_server(host: ServerContext) -> Numbers:
    views = await query_engines(host.replicas, QUERY_TIMEOUT_S)
    metrics = host.ledger.metrics
    counts = Counts(
        requests=sum(metrics.requests.values()),
        aborts=dict(metrics.aborts),
        first_token=tuple(metrics.first_token.counts),
        between_tokens=tuple(metrics.between_tokens.counts),
    )
    return Numbers(engines=[_numbers(view) for view in views], counts=counts)


def _numbers(view: EngineView) -> EngineNumbers:
    if view.info is None or view.pong is None:
        return EngineNumbers(engine=view.index, state="down" if view.info is None else "wedged")
    info, status = view.info, view.pong.status
    return EngineNumbers(
        engine=view.index,
        state=status.state,
        detail=f"{info.device} {info.dtype}",
        version=status.version,
        running=status.running,
        waiting=status.waiting,
        total=info.num_blocks,
        held=status.held_blocks,
        leased=status.leased_blocks,
        cached=status.cached_blocks,
        counts=Counts(
            tokens=status.output_tokens, prompt_tokens=status.prompt_tokens, cached_tokens=status.cached_tokens
        ),
    )


def _member(engine: EngineNumbers) -> MemberView:
    return MemberView(
        id=str(engine.engine),
        name=f"engine {engine.engine}",
        detail=engine.detail,
        state=engine.state,
        version=engine.version,
        running=engine.running,
        waiting=engine.waiting,
        total=engine.total,
        held=engine.held,
        leased=engine.leased,
        cached=engine.cached,
    )


# ------------------------------------------------------------------------------------------------------------ handlers


async def show_numbers(request: Request) -> Response:
    return Response(msgspec.json.encode(await query_server(host_of(request))), media_type="application/json")


async def watch(request: Request) -> Response:
    feed: Feed = request.app.state.feed
    return watched(request, feed)
