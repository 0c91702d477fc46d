"""POST /v1/abort_requests: end requests, and report the outcome of each.

The requests to end are selected from the ledger in one iteration of the event loop: every live request is in it from its
admission on, whether or not an engine has it. A caller that waits is answered when the engines hold nothing for the
requests and their clients have received the end, or when the timeout has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import PREFILL, Ledger, Past, Record
from headgate.api.engines import ChunkStream
from headgate.api.state import Api, api_of
from headgate.contract.abort import (
    UNREAD,
    AbortAnswer,
    AbortCause,
    AbortedRequest,
    AbortError,
    AbortResult,
    abort_of,
    readings,
)
from headgate.contract.keys import Caller
from headgate.contract.schema import Tags
from headgate.edge.gate import caller_of
from headgate.edge.outflow import LEAST_S, await_readers
from headgate.edge.reading import read_object

log = logging.getLogger(__name__)


UNPLACED = "no engine has it, and it will end before it is sent to one; its prompt is still being tokenised"


def visible(ledger: Ledger, caller: Caller) -> list[Record]:
    """The live requests that `caller` may see; raises if it may not list requests."""
    caller.check_may_list()
    return [record for record in ledger.live.values() if caller.sees(record.tenant)]


def _tenant(caller: Caller) -> str | None:
    """The tenant whose requests the caller names; None: those of all tenants."""
    return None if caller.admin else caller.tenant


@dataclass(frozen=True, slots=True)
class AbortTarget:
    """A live request, or one choice of it, with the name that the caller used."""

    name: str
    record: Record
    choice: int | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection, if the response waits for the client to read."""
        return None if self.record.writer is None else self.record.writer.transport

    @property
    def unfinished(self) -> bool:
        return self.choice is None or not self.record.has_finished(self.choice)


@dataclass(slots=True)
class FoundRequests:
    caller: Caller
    targets: list[AbortTarget] = field(default_factory=list)
    by_name: bool = True
    not_found: list[str] = field(default_factory=list)
    already_finished: list[str] = field(default_factory=list)

    @property
    def listed(self) -> list[AbortTarget]:
        """The targets that the answer lists: a prefill request is listed only if the caller named it."""
        return [target for target in self.targets if self.by_name or target.record.kind != PREFILL]


# ------------------------------------------------------------------------------------------------------------ finding


def find_all(ledger: Ledger, caller: Caller, tags: Tags | None = None) -> FoundRequests:
    """All live requests that the caller may see, or those of them with these tags."""
    wanted = (tags or {}).items()
    mine = [AbortTarget(r.label, r) for r in visible(ledger, caller) if wanted <= r.tags.items()]
    return FoundRequests(caller, mine, by_name=False)


def find(ledger: Ledger, caller: Caller, names: Iterable[str]) -> FoundRequests:
    """Requests and choices by name. Other tenants' requests are not found; an admin's name matches those of all tenants."""
    found = FoundRequests(caller)
    for name in dict.fromkeys(names):
        targets = find_live(ledger, caller, name)
        if unfinished := [target for target in targets if target.unfinished]:
            found.targets += unfinished
        elif targets or find_past(ledger, caller, name):
            found.already_finished.append(name)
        else:
            found.not_found.append(name)
    return found


def find_live(ledger: Ledger, caller: Caller, name: str) -> list[AbortTarget]:
    """At most one; several only for an admin, if tenants use the same name."""
    for label, choice in readings(name):
        records = ledger.named(label, _tenant(caller))
        if found := [AbortTarget(name, r, choice) for r in records if choice is None or choice < r.choices]:
            return found
    return []


def find_past(ledger: Ledger, caller: Caller, name: str) -> Past | None:
    for label, choice in readings(name):
        past = ledger.past(label, _tenant(caller))
        if past and (choice is None or choice < len(past.usage.choices)):
            return past
    return None


# ------------------------------------------------------------------------------------------------------------- ending


def begin(found: FoundRequests, cause: AbortCause) -> dict[ChunkStream, AbortTarget]:
    """Mark the targets as ending. Returns the streams that the caller must end."""
    return {stream: t for t in found.targets for stream in t.record.ask_end(cause, t.choice)}


async def abort(api: Api, found: FoundRequests, timeout_s: float, cause: AbortCause = "api_abort") -> AbortResult:
    """End the targets, and wait until the engines hold nothing for them and their clients have received the end.

    A client that reads nothing is not waited for (`await_readers`): its request is reported as `not_told`.
    """
    clock = asyncio.get_running_loop().time
    places = {place: target for stream, target in begin(found, cause).items() if (place := stream.end_at(cause))}
    deadline_s = clock() + timeout_s
    ends: dict[asyncio.Future[None], asyncio.Transport | None] = {
        asyncio.ensure_future(t.record.ended(t.choice)): t.transport for t in found.targets
    }
    try:
        held = await api.engines.stop_at(places, cause, timeout_s)
        await await_readers(ends, max(deadline_s - clock(), LEAST_S))
    finally:
        for task in ends:
            task.cancel()
    return _result(found, {places[place] for place in held})


def _result(found: FoundRequests, held: set[AbortTarget]) -> AbortResult:
    result = AbortResult(not_found=found.not_found, already_finished=found.already_finished)
    for target in found.listed:
        outcome = target.record.outcome(target.choice)
        if target in held:
            result.errors.append(
                AbortError(target.name, "still_held", "it has ended, and the engine still holds blocks")
            )
        elif target.record.open and outcome is None:
            why = UNREAD if target.record.begun else UNPLACED
            result.errors.append(AbortError(target.name, "not_told", why))
        elif outcome is not None and outcome.finish_reason == "abort" and outcome.cause != "deadline":
            tenant = target.record.tenant if found.caller.is_foreign(target.record.tenant) else UNSET
            result.aborted.append(AbortedRequest(target.name, outcome.output_tokens, tenant))
        elif outcome is not None and outcome.finish_reason == "error":
            result.errors.append(AbortError(target.name, outcome.cause, "it ended with an error of its own"))
        else:
            result.already_finished.append(target.name)
    return result


def accept(found: FoundRequests, cause: AbortCause = "api_abort") -> AbortResult:
    """End the targets without waiting."""
    for stream in begin(found, cause):
        stream.end(cause)
    return AbortResult(
        not_found=found.not_found,
        already_finished=found.already_finished,
        accepted=[target.name for target in found.listed],
    )


# ----------------------------------------------------------------------------------------------------------- handlers


async def abort_requests(request: Request) -> Response:
    body, api, caller = abort_of(await read_object(request)), api_of(request), caller_of(request)
    ids, ledger = body.req_ids, api.ledger
    found = find_all(ledger, caller, body.tags) if ids is None else find(ledger, caller, ids)
    if not body.wait:
        return answer(request, accept(found, body.cause), done=False)
    result = await abort(api, found, body.timeout, body.cause)
    log.info("%s: aborted %d requests", request.state.request_id, len(result.aborted))
    return answer(request, result, done=not result.errors)


def answer(request: Request, result: AbortResult, *, done: bool) -> Response:
    body = AbortAnswer(request.state.request_id, "success" if done else "accepted", result)
    return Response(msgspec.json.encode(body), 200 if done else 202, media_type="application/json")
