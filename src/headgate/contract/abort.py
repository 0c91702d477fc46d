"""POST /v1/abort_requests: request body, answer, and the requests that an id in the body may refer to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract import ids
from headgate.contract.decoding import convert
from headgate.contract.limits import Count, Seconds
from headgate.contract.schema import Tags
from headgate.errors import RequestError
from headgate.protocol.command import DEFAULT_TIMEOUT_S

# Answers contain the request id with one of these prefixes; clients may abort by either form.
PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")

MOST_NAMES = 1 << 14  # per call, because each name is looked up on the event loop
UNREAD = "it has ended and holds no blocks; its client has not read the end"

Id = Annotated[str, Meta(min_length=1)]
AbortCause = Literal["api_abort", "pause", "superseded"]


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `abort_all`, `req_ids` and `tags` selects the requests; `req_ids` beside `abort_all` is ignored."""

    abort_all: bool = False
    req_ids: Annotated[list[Id], Meta(min_length=1, max_length=MOST_NAMES)] | None = None
    tags: Tags | None = None
    wait: bool = True
    timeout: Seconds = DEFAULT_TIMEOUT_S
    # Reported to the aborted clients. Routers send "pause" when they pause workers, "superseded" to an earlier attempt.
    cause: AbortCause = "api_abort"


class AbortedRequest(msgspec.Struct, frozen=True):
    request_id: str
    output_token_count: Count
    tenant: str | UnsetType = UNSET  # for an admin: the tenant of the request, if it is another one


class AbortError(msgspec.Struct, frozen=True):
    request_id: str
    code: str
    message: str


class AbortResult(msgspec.Struct, kw_only=True):
    aborted: list[AbortedRequest] = []
    not_found: list[str] = []
    already_finished: list[str] = []
    errors: list[AbortError] = []
    accepted: list[str] | UnsetType = UNSET  # only without `wait`: the requests that will end


class AbortAnswer(msgspec.Struct):
    request_id: str
    status: str  # "success", or "accepted" while some requests have not ended yet
    result: AbortResult


def abort_of(raw: dict[str, Any]) -> AbortRequest:
    """Validate the body of an abort call."""
    if "stop_all" in raw:
        raise RequestError("stop_all is called abort_all here", param="stop_all", code="unknown_parameter")
    if raw.get("abort_all") is True and "req_ids" in raw:  # as FastDeploy's clients send it: all wins
        convert(raw["req_ids"], list[str] | None, "req_ids")
        raw = {name: value for name, value in raw.items() if name != "req_ids"}
    body: AbortRequest = convert(raw, AbortRequest, "")
    ways = [body.abort_all, body.req_ids is not None, body.tags is not None]
    if sum(ways) != 1:
        raise RequestError(
            "say what to abort with exactly one of abort_all: true, a non-empty list req_ids, and tags",
            param="req_ids",
        )
    return body


def readings(name: str) -> list[tuple[str, int | None]]:
    """The meanings of a name, most likely first: a whole request, or one of its choices (`{id}-{index}`)."""
    base, dash, index = name.rpartition("-")
    readings: list[tuple[str, int | None]] = [(label, None) for label in _labels(name)]
    if dash and index.isdecimal() and len(index) < 10:
        readings += [(label, int(index)) for label in _labels(base)]
    return readings


def _labels(name: str) -> list[str]:
    labels = [name]
    for prefix in PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            labels += [rest, ids.PREFIX + rest]
    return labels
