"""The outputs of an engine to its clients: tokens as they are generated, and one terminal output per request."""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.plan import Logprobs, RoutedExperts
from headgate.protocol.request import Ticket

FinishReason = Literal["stop", "length", "abort", "pd_reschedule"]
Cause = Literal[
    "eos",
    "stop_token",
    "stop_string",
    "max_tokens",
    "api_abort",
    "client_disconnect",
    "client_stalled",  # the client read nothing for too long
    "pause",
    "deadline",
    "shutdown",
    "preempted",
    "transfer_failed",
    "exported",  # another engine has fetched the KV
    "capacity",  # no room became available in time
    "engine_lost",
    "weights",
    "superseded",  # a router has continued the request in another attempt
    "grammar",  # the answer could not follow its grammar, or only at too high a cost
]


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Times of a request's events, in seconds of the engine's clock; None for an event that did not happen."""

    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The terminal output of a request: the last one, sent exactly once."""

    id: int
    finish_reason: FinishReason
    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    timings: Timings


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The request was not accepted; the fields are those of a RequestError."""

    id: int
    status: int
    code: str
    message: str
    param: str | None = None


class Outputs(msgspec.Struct, array_like=True):
    """The outputs of one step or one command to one client. Filled by the scheduler, then sent as one message."""

    version: int = 0  # of the weights that generated the tokens
    ids: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, Logprobs] = {}  # by index into `tokens`
    prompt_logprobs: dict[int, tuple[Logprobs, ...]] = {}  # by request id, in the order of the prompt
    ended: list[Ended] = []
    refused: list[Refused] = []
    tickets: dict[int, Ticket] = {}  # by request id, as soon as other engines may fetch the KV
    routed: dict[int, tuple[RoutedExperts, ...]] = {}  # by request id; positions may repeat, and none is left out
    vectors: dict[int, bytes] = {}  # by request id, with its terminal output; as in `StepResult`

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.tokens):
            raise ValueError("each token has one id")

    def __bool__(self) -> bool:
        return bool(self.ids or self.ended or self.prompt_logprobs or self.refused or self.tickets or self.routed)
