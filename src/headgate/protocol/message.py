"""What passes between a client and an engine: tagged, positional messages, one per frame.

Control is values: a new verb is a new struct here and a handler in the loop. A peer that speaks another `PROTOCOL` is
refused in the handshake, before anything else is read.
"""

from __future__ import annotations

import msgspec

from headgate.protocol.command import Command, PauseMode, Result, State, Tag
from headgate.protocol.output import Cause, Outputs
from headgate.protocol.request import GenerateRequest

PROTOCOL = 2

# The high bits of a request id name the client it belongs to, so that a reused label never reaches another's request.
CLIENT_SHIFT = 40


def client_of(id: int) -> int:
    return id >> CLIENT_SHIFT


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a client; `client` is the owner part of all ids that it will use."""

    protocol: int
    client: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    requests: list[GenerateRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ids that are no longer live are skipped; each live one gets its terminal output."""

    ids: list[int]
    cause: Cause


class Suspend(msgspec.Struct, frozen=True, array_like=True, tag="suspend"):
    """Compute no tokens for these ids, or go on. Ids that are no longer live are skipped."""

    ids: list[int]
    suspended: bool


class CommandCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A command, answered by an `CommandAnswer` of the same number."""

    client: int
    number: int
    command: Command


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered beside the step loop, so that a long step or a pause does not look like death."""

    number: int


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What an engine is, for as long as it lives."""

    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    max_running: int
    device: str
    backend: str
    dtype: str
    ranks: int = 1  # processes that compute the model together


class TransferCounts(msgspec.Struct, frozen=True, array_like=True):
    """KV that has moved between this engine and others."""

    received_bytes: int = 0
    sent_bytes: int = 0
    fetch_s: float = 0.0  # all fetches together
    failures: dict[str, int] = {}  # fetches that came to nothing, by cause


class EngineStatus(msgspec.Struct, frozen=True, array_like=True):
    """What an engine is doing, as of its last turn."""

    turn_s: float  # the engine's clock at that turn
    busy: bool  # a step was on the device then
    version: int = 0
    running: int = 0
    waiting: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    state: State = "running"
    asleep: tuple[Tag, ...] = ()
    mode: PauseMode | None = None  # of the pause, if there is one
    rejecting: bool = False  # new requests are refused
    abort_messages: int = 0  # heard so far, however many ids each had
    output_tokens: int = 0  # told so far, whoever heard them
    horizon_s: float = 0.0  # the engine's clock: what was last used before this has left the prefix cache
    leases: int = 0  # under which others may fetch KV from us
    leased_blocks: int = 0
    leases_expired: int = 0
    transfers: int = 0  # prompts whose KV came from elsewhere
    transfers_lost: int = 0  # and that were computed here after all
    rescheduled: int = 0
    moved: TransferCounts = TransferCounts()
    fetches: int = 0  # prompts whose KV is on its way to us


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    protocol: int
    info: EngineInfo


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    number: int
    quiet_s: float  # since the last turn of the step loop
    status: EngineStatus


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    outputs: Outputs


class CommandAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    result: Result


Message = Submit | Abort | Suspend | CommandCall  # for the step loop
FromClient = Hello | Submit | Abort | Suspend | CommandCall | Ping
FromEngine = Welcome | Pong | StepOutputs | CommandAnswer
