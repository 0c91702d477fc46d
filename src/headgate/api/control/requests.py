"""GET /v1/requests, GET and DELETE /v1/requests/{id}: lists requests in flight; shows or ends one request."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import Ledger, Past, Record
from headgate.api.control.abort import abort, answer, find, find_live, find_past, visible
from headgate.api.engines import ChunkStream
from headgate.api.state import Api, api_of
from headgate.contract.errors import NotFound
from headgate.contract.keys import Caller
from headgate.contract.requests import ChoiceInFlight, InFlight, RequestDetails, RequestList
from headgate.edge.gate import caller_of
from headgate.engine.moving_stream import Place
from headgate.protocol.command import DEFAULT_TIMEOUT_S, ListSequences, SequenceList, SequenceStatus

QUERY_TIMEOUT_S = 2.0


async def list_requests(request: Request) -> Response:
    api, caller = api_of(request), caller_of(request)
    caller.check_may_list()  # before the engines are queried
    seen = await query_sequences(api)
    return _json(RequestList(data=[in_flight(record, seen) for record in visible(api.ledger, caller)]))


async def show_request(request: Request) -> Response:
    api, caller, name = api_of(request), caller_of(request), request.path_params["id"]
    if find_live(api.ledger, caller, name):
        seen = await query_sequences(api)
        if targets := find_live(api.ledger, caller, name):  # still
            record = targets[0].record
            return _json(
                RequestDetails(
                    request_id=record.label,
                    status="in_flight",
                    events=record.events,
                    age_s=round(record.age_s, 6),
                    request=in_flight(record, seen),
                )
            )
    arrived_s, usage = _past(api.ledger, caller, name)
    return _json(
        RequestDetails(
            request_id=usage.request_id,
            status="finished",
            events=list(usage.events),
            age_s=round(api.ledger.clock() - arrived_s, 6),
            usage=usage,
        )
    )


async def delete_request(request: Request) -> Response:
    api, caller, name = api_of(request), caller_of(request), request.path_params["id"]
    found = find(api.ledger, caller, [name])
    if found.not_found:
        raise _unknown(name)
    result = await abort(api, found, DEFAULT_TIMEOUT_S)
    return answer(request, result, done=not result.errors)


def _past(ledger: Ledger, caller: Caller, name: str) -> Past:
    if past := find_past(ledger, caller, name):
        return past
    raise _unknown(name)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no request {name!r}, or it ended long ago", param="id", code="request_not_found")


# --------------------------------------------------------------------------------------------- status in the engines

SequenceStatuses = dict[Place, SequenceStatus]


async def query_sequences(api: Api, timeout_s: float = QUERY_TIMEOUT_S) -> SequenceStatuses:
    """The status of all sequences, without those of engines that do not answer in time."""
    answers = await api.engines.call_all(ListSequences(), timeout_s)
    return {
        Place(index, seen.id): seen
        for index, sequence in answers.items()
        if isinstance(sequence, SequenceList)
        for seen in sequence.sequences
    }


def in_flight(record: Record, seen: SequenceStatuses) -> InFlight:
    choices = [_choice(record, choice, seen) for choice in range(record.choices)]
    phases = [choice.phase for choice in choices]
    return InFlight(
        request_id=record.label,
        tenant=record.tenant,
        kind=record.kind,
        phase=next((phase for phase in phases if phase != "finished"), "finished"),
        age_s=round(record.age_s, 6),
        output_tokens=sum(choice.output_tokens for choice in choices),
        tags=record.tags,
        choices=choices,
    )


def _choice(record: Record, choice: int, seen: SequenceStatuses) -> ChoiceInFlight:
    stream = record.streams.get(choice)
    place = None if stream is None else stream.place
    sequence = None if place is None else seen.get(place)
    return ChoiceInFlight(
        id=f"{record.label}-{choice}",
        phase=_phase(record, choice, stream, place, sequence),
        worker=None if place is None else place.engine,
        prompt_tokens=None if sequence is None else sequence.prompt_tokens,
        output_tokens=record.outputs(choice),
        blocks=0 if sequence is None else sequence.blocks,
    )


def _phase(
    record: Record, choice: int, stream: ChunkStream | None, place: Place | None, seen: SequenceStatus | None
) -> str:
    if record.has_finished(choice):
        return "finished"
    if stream is None:
        return "preparing"
    if place is None:
        return "queued"
    if stream.settled:
        return "sending"
    return "unknown" if seen is None else seen.phase


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
