"""Control as values: what may be asked of an engine besides generating, and what it answers.

A command is answered when its postcondition holds, or when its time is up, and then the answer says what is missing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.output import Cause

PauseMode = Literal["abort", "drain", "freeze"]
State = Literal["running", "pausing", "paused", "updating", "quarantined"]

DEFAULT_TIMEOUT_S = 30.0


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End these sequences (None: all that are live) and answer when everything they owned has come home."""

    ids: list[int] | None
    cause: Cause
    timeout_s: float = DEFAULT_TIMEOUT_S


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """abort: end everything. drain: finish what has started. freeze: hold everything as it is."""

    mode: PauseMode = "abort"
    queue: bool = False  # let new requests wait instead of refusing them
    timeout_s: float = DEFAULT_TIMEOUT_S


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    pass


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Load new weights into a paused engine. `recompute` throws old KV away; otherwise running answers keep theirs."""

    path: str
    version: int | None = None  # None: one more than now
    recompute: bool = True


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Forget the cached blocks that nobody holds."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Tell what is in flight, as of one moment."""


Command = Stop | Pause | Resume | UpdateWeights | Flush | Look


class StateTold(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Where an engine stands: what a pause, a resume or an update has led to."""

    state: State
    mode: PauseMode | None = None  # of the pause, if there is one
    rejecting: bool = False  # new requests are refused
    version: int = 0
    ended: dict[int, int] = {}  # ids that this command ended, and how many tokens each had
    forced: list[int] = []  # of those, the ones that ran out of time
    held: list[int] = []  # ids that still own something
    elapsed_s: float = 0.0


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    blocks: int


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A sequence in flight."""

    id: int
    phase: str
    prompt_tokens: int
    output_tokens: int
    blocks: int
    age_s: float
    priority: int


class Sighted(msgspec.Struct, frozen=True, array_like=True, tag="sighted"):
    sequences: list[Seen]


class Denied(msgspec.Struct, frozen=True, array_like=True, tag="denied"):
    """The command cannot be carried out now, and nothing has changed, or as the message says."""

    status: int
    code: str
    message: str


Result = StateTold | Flushed | Sighted | Denied
