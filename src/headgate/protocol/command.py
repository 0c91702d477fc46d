"""Control as values: what may be asked of an engine besides generating, and what it answers.

A command is answered when its postcondition holds, or when its time is up, and then the answer says what is missing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.output import Cause

PauseMode = Literal["abort", "drain", "freeze"]
State = Literal["running", "pausing", "paused", "updating", "quarantined"]  # updating: weights or memory move
Tag = Literal["weights", "kv_cache"]  # what can sleep

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

Backend = Literal["gloo", "nccl"]  # by which the bytes of a group travel

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


class FileSource(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """Weights that the engine can read: a folder, a `.safetensors` or a GGUF file, on disk or in shared memory."""

    path: str
    checksum: dict[str, str] | None = None  # SHA-256 in hex by file name; all of them match before a byte is written


class BroadcastSource(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Weights that a trainer (rank 0) broadcasts; see `headgate.weights.send_weights`."""

    init_method: str  # tcp://HOST:PORT, where the trainer listens
    world_size: int  # the trainer and all engines
    rank: int = 1  # of this engine; behind one address, of the first, and the others follow
    timeout_s: float = 300.0  # for all of it, from joining to the last tensor
    backend: Backend = "gloo"  # nccl: from device memory to device memory, one GPU for each rank

    def __post_init__(self) -> None:
        host, _, port = self.init_method.removeprefix("tcp://").rpartition(":")
        if not self.init_method.startswith("tcp://") or not host or not port.isdecimal():
            raise ValueError(f"init_method must be tcp://HOST:PORT, not {self.init_method!r}")
        if not 1 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not one of an engine in a group of {self.world_size}; 0 is the trainer"
            )
        if not self.timeout_s > 0:
            raise ValueError("timeout_s must be above 0")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.init_method.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """A piece of CUDA memory of another process on this host, as `UntypedStorage._share_cuda_` of torch names it."""

    device: int  # of the process that shares it
    handle: bytes
    size: int  # bytes
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in one piece, and where it lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int  # index
    start: int  # bytes into it


class SharedMemorySource(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """Weights in the GPU memory of a trainer on this host; see `headgate.weights.share`."""

    gpu: str  # its UUID: both processes may number their devices differently
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]


Source = FileSource | BroadcastSource | SharedMemorySource


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Load new weights into a paused engine. `recompute` throws old KV away; otherwise running answers keep theirs."""

    source: Source
    version: int | None = None  # None: one more than now
    recompute: bool = True


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Give a paused engine's memory back. Running sequences of a freeze keep their tokens and compute their KV anew."""

    tags: tuple[Tag, ...] = TAGS


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """Take memory again. Weights are read from where they last came from; where they cannot be, send them again."""

    tags: tuple[Tag, ...] = TAGS


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Forget the cached blocks that nobody holds."""


class ListSequences(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Tell what is in flight, as of one moment."""


Command = Stop | Pause | Resume | UpdateWeights | Flush | ListSequences | Sleep | Wake


class EngineState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Where an engine stands: what a pause, a resume or an update has led to."""

    state: State
    mode: PauseMode | None = None  # of the pause, if there is one
    rejecting: bool = False  # new requests are refused
    version: int = 0
    ended: dict[int, int] = {}  # ids that this command ended, and how many tokens each had
    forced: list[int] = []  # of those, the ones that ran out of time
    held: list[int] = []  # ids that still own something
    elapsed_s: float = 0.0
    asleep: tuple[Tag, ...] = ()  # what has given its memory back


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    blocks: int


class SequenceStatus(msgspec.Struct, frozen=True, array_like=True):
    """A sequence in flight."""

    id: int
    phase: str
    prompt_tokens: int
    output_tokens: int
    blocks: int
    age_s: float
    priority: int


class SequenceList(msgspec.Struct, frozen=True, array_like=True, tag="sighted"):
    sequences: list[SequenceStatus]


class Denied(msgspec.Struct, frozen=True, array_like=True, tag="denied"):
    """The command cannot be carried out now, and nothing has changed, or as the message says."""

    status: int
    code: str
    message: str


Result = EngineState | Flushed | SequenceList | Denied
