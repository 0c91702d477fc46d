"""The messages between a client and an engine: tagged, positional structs, one per frame.

A command is a struct in `protocol/command.py`; its handler is a case in `Control._begin` (`engine/control.py`). A
peer with another `PROTOCOL` is refused in the handshake, before any other message is read.
"""

from __future__ import annotations

import msgspec

from headgate.protocol.command import Command, PauseMode, Result, State, Tag
from headgate.protocol.output import Cause, Outputs
from headgate.protocol.plan import RoutedShape
from headgate.protocol.request import GenerateRequest

PROTOCOL = 2

# The high bits of a request id are the number of its client, so that a reused label never refers to another client's
# request.
CLIENT_SHIFT = 40


def client_of(id: int) -> int:
    return id >> CLIENT_SHIFT


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a client; `client` is the high part of all request ids that it will use."""

    protocol: int
    client: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    requests: list[GenerateRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ids that are no longer live are skipped; each live request gets its terminal output."""

    ids: list[int]
    cause: Cause


class Suspend(msgspec.Struct, frozen=True, array_like=True, tag="suspend"):
    """Stop computing tokens for these ids, or continue. Ids that are no longer live are skipped."""

    ids: list[int]
    suspended: bool


class CommandCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A command, answered by a `CommandAnswer` with the same number."""

    client: int
    number: int
    command: Command


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered outside the step loop, so that a long step or a pause is not mistaken for a dead engine."""

    number: int


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of an engine that never change."""

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
    transfers_kv: bool = True  # it can fetch KV from other engines, and they from it
    routed: RoutedShape | None = None  # how it reports the experts of tokens; None: it does not keep them
    groups: int = 1  # of layers: each takes a block for `block_size` tokens; see `protocol.groups`
    hidden: int = 0  # numbers in the vector of a prompt

    @property
    def kv_tokens(self) -> int:
        """How many tokens all layers have room for. Attention windows need less, so sequences may have more in all."""
        return self.num_blocks * self.block_size // self.groups


class TransferCounts(msgspec.Struct, frozen=True, array_like=True):
    """KV that has moved between this engine and others."""

    received_bytes: int = 0
    sent_bytes: int = 0
    fetch_s: float = 0.0  # total duration of all fetches
    failures: dict[str, int] = {}  # failed fetches by cause


class EngineStatus(msgspec.Struct, frozen=True, array_like=True):
    """The state and counters of an engine, as of the last iteration of its step loop."""

    turn_s: float  # the engine's clock at that iteration
    busy: bool  # a step was on the device
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
    mode: PauseMode | None = None  # the mode of the pause, if there is one
    rejecting: bool = False  # new requests are refused
    abort_messages: int = 0  # `Abort` messages received, regardless of the number of ids in each
    output_tokens: int = 0  # tokens generated, delivered or not
    horizon_s: float = 0.0  # the engine's clock: blocks last used before this time have left the prefix cache
    leases: int = 0  # leases under which other engines may fetch KV
    leased_blocks: int = 0
    leases_expired: int = 0
    transfers: int = 0  # prompts whose KV came from another engine
    transfers_lost: int = 0  # prompts that were computed here because their transfer failed
    rescheduled: int = 0
    moved: TransferCounts = TransferCounts()
    fetches: int = 0  # prompts whose KV is being fetched


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    protocol: int
    info: EngineInfo


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    number: int
    quiet_s: float  # since the last iteration of the step loop
    status: EngineStatus


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    outputs: Outputs


class CommandAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    result: Result


Message = Submit | Abort | Suspend | CommandCall  # for the step loop
FromClient = Hello | Submit | Abort | Suspend | CommandCall | Ping
FromEngine = Welcome | Pong | StepOutputs | CommandAnswer
