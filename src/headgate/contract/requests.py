"""GET /v1/requests and GET /v1/requests/{id}: requests in flight, and usage records of those that have ended."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headgate.contract.limits import Count


class ChoiceUsage(msgspec.Struct, frozen=True):
    """The outcome of one choice. A choice that was cut short counts the tokens generated until then."""

    choice: int
    finish_reason: str
    cause: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # tokens of the answer
    engine_tokens: int = 0  # tokens generated here, delivered or not, without the tokens that the choice resumed with


class RequestEvent(msgspec.Struct, frozen=True):
    """An event of a request, or of one of its choices."""

    event: str  # accepted, running, first_token, end_asked, finished
    at_s: float  # since the arrival of the request
    choice: int | None = None


class UsageRecord(msgspec.Struct, frozen=True):
    """The outcome of one accepted request."""

    request_id: str
    tenant: str
    kind: str  # chat, completion, response ...
    finish_reason: str
    cause: str
    arrived: float  # seconds since 1970
    first_token_s: float | None  # since the arrival of the request
    elapsed_s: float
    choices: tuple[ChoiceUsage, ...]
    tags: Mapping[str, str] = {}
    events: tuple[RequestEvent, ...] = ()
    traceparent: str = ""  # the client's trace, if it sent a valid header
    tracestate: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(choice.prompt_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    @property
    def engine_tokens(self) -> int:
        return sum(choice.engine_tokens for choice in self.choices)


class ChoiceInFlight(msgspec.Struct, kw_only=True):
    id: str  # accepted by an abort
    phase: str  # preparing, queued, waiting, loading, running, preempted, sending, finished, unknown
    worker: Count | None  # the engine's number
    prompt_tokens: Count | None
    output_tokens: Count
    blocks: Count = 0


class InFlight(msgspec.Struct, kw_only=True):
    request_id: str
    tenant: str
    kind: str
    phase: str  # phase of the first unfinished choice
    age_s: float
    output_tokens: Count
    tags: Mapping[str, str]
    choices: list[ChoiceInFlight]


class RequestList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[InFlight]


class RequestDetails(msgspec.Struct, kw_only=True):
    """`request` is set while the request is in flight, `usage` once it has ended."""

    request_id: str
    status: str  # in_flight, finished
    events: list[RequestEvent]
    age_s: float  # since the arrival, also after the end
    request: InFlight | None = None
    usage: UsageRecord | None = None
