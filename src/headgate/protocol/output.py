"""What an engine tells its clients: tokens as they come, and one terminal output per request."""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.plan import Logprobs
from headgate.protocol.request import Ticket

FinishReason = Literal["stop", "length", "abort", "pd_reschedule"]
Cause = Literal[
    "eos",
    "stop_token",
    "stop_string",
    "max_tokens",
    "api_abort",
    "client_disconnect",
    "client_stalled",  # its client read nothing for too long
    "pause",
    "deadline",
    "shutdown",
    "preempted",
    "transfer_failed",
    "exported",  # another engine has fetched its KV
    "capacity",  # there was no room for it in time
    "engine_lost",
    "weights",
    "grammar",  # the answer could not be kept within its grammar, or only at too high a cost
]


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """When things happened, in seconds of the engine's own clock; None if they never did."""

    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The terminal output: the last thing said about a request, said exactly once."""

    id: int
    finish_reason: FinishReason
    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    timings: Timings


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The request was never accepted, and why; the fields of a RequestError."""

    id: int
    status: int
    code: str
    message: str
    param: str | None = None


class Outputs(msgspec.Struct, array_like=True):
    """All that one step (or one command) has to say to one client. Filled by the scheduler, then sent whole."""

    version: int = 0  # weights that made the tokens
    ids: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, Logprobs] = {}  # by index into `tokens`
    prompt_logprobs: dict[int, tuple[Logprobs, ...]] = {}  # by request id, in the order of the prompt
    ended: list[Ended] = []
    refused: list[Refused] = []
    tickets: dict[int, Ticket] = {}  # by request id, as soon as other engines may fetch its KV

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.tokens):
            raise ValueError("each token has one id")

    def __bool__(self) -> bool:
        return bool(self.ids or self.ended or self.prompt_logprobs or self.refused or self.tickets)
