"""Commands to an engine, other than requests to generate, and their results.

A command is answered when its postcondition holds or when its timeout has passed; in the second case the result lists what
is not done.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.protocol.output import Cause

PauseMode = Literal["abort", "drain", "freeze"]
State = Literal["running", "pausing", "paused", "updating", "quarantined"]  # updating: weights or memory change
Tag = Literal["weights", "kv_cache"]  # the memory that a sleep can release

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

Backend = Literal["gloo", "nccl"]  # the communication library of a process group
Rendezvous = Literal["torch", "vllm"]  # how the ranks of a trainer's group find each other

NCCL_ID_BYTES = 128

DEFAULT_TIMEOUT_S = 30.0


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End these sequences (None: all live ones) and answer when everything they owned has been released."""

    ids: list[int] | None
    cause: Cause
    timeout_s: float = DEFAULT_TIMEOUT_S


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """abort: end all sequences. drain: finish those that have started. freeze: stop computing and keep all of them."""

    mode: PauseMode = "abort"
    queue: bool = False  # let new requests wait instead of refusing them
    timeout_s: float = DEFAULT_TIMEOUT_S


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    pass


class FileSource(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """Weights that the engine can read: a folder, a `.safetensors` or a GGUF file, on disk or in shared memory."""

    path: str
    checksum: dict[str, str] | None = None  # SHA-256 in hex by file name; verified before the first byte is written


class BroadcastSource(msgspec.Struct, frozen=True, array_like=True, tag="group"):
    """Weights that a trainer (rank 0) broadcasts; see `headgate.weights.send_weights`."""

    init_method: str  # tcp://HOST:PORT, where the trainer listens
    world_size: int  # the trainer and all engines
    rank: int = 1  # of this engine; for several engines behind one address, of the first one
    timeout_s: float = 300.0  # from joining the group to the last tensor
    backend: Backend = "gloo"  # nccl: from device memory to device memory, with one GPU per rank

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
    """CUDA memory of another process on this host; the fields are those of torch's `UntypedStorage._share_cuda_`."""

    device: int  # as numbered by the process that shares the memory
    handle: bytes
    size: int  # bytes
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous tensor and its position in a shared storage."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int  # index into `SharedMemorySource.storages`
    start: int  # offset in bytes


class SharedMemorySource(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """Weights in the GPU memory of a trainer on this host; see `headgate.weights.share`."""

    gpu: str  # UUID, because the two processes may number their devices differently; "" if it is not known
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]


class StagedSource(msgspec.Struct, frozen=True, array_like=True, tag="staged"):
    """The parts that `CollectWeights` has collected."""


Source = FileSource | BroadcastSource | SharedMemorySource | StagedSource


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class GroupPart(msgspec.Struct, frozen=True, array_like=True, tag="group_part"):
    """Tensors that a trainer broadcasts to a group that this engine has joined."""

    group: str
    tensors: tuple[TensorSpec, ...]
    packed_bytes: int | None = None  # None: a broadcast per tensor. n: buffers that end where their sum passes n


class SharedOnGpus(msgspec.Struct, frozen=True, array_like=True, tag="shared_on_gpus"):
    """The same tensors in the memory of several GPUs. An engine reads those on its own."""

    sources: tuple[SharedMemorySource, ...]


Part = GroupPart | SharedMemorySource | SharedOnGpus


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag="join_group"):
    """Join a trainer's process group, and stay in it. The trainer is rank 0 and hosts the store.

    `rendezvous`: `torch` for a group that `torch.distributed` builds under `name` (SGLang's trainers). `vllm` for vLLM's
    StatelessProcessGroup with a PyNcclCommunicator: the trainer's store holds an NCCL id, and each rank begins with a
    sum over one number. With `nccl_id`, the id came with the call, and there is no store. With gloo, the ranks find the
    same id and form a gloo group under it.

    Tensors that the trainer broadcasts then are parts: `CollectWeights(GroupPart(name, tensors))`, with one broadcast per
    tensor or, with `packed_bytes`, one per buffer. `UpdateWeights(StagedSource())` makes them visible.
    """

    name: str
    host: str
    port: int
    world_size: int
    rank: int  # of this engine; for several engines behind one address, of the first one
    backend: Backend = "nccl"
    timeout_s: float = 300.0
    rendezvous: Rendezvous = "torch"
    nccl_id: bytes | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not an engine's rank in a group of {self.world_size}; 0 is the trainer"
            )
        if not self.timeout_s > 0:
            raise ValueError("timeout must be above 0")
        if self.nccl_id is not None and (len(self.nccl_id), self.rendezvous) != (NCCL_ID_BYTES, "vllm"):
            raise ValueError(f"an NCCL id has {NCCL_ID_BYTES} bytes, not {len(self.nccl_id)}")


class LeaveGroup(msgspec.Struct, frozen=True, array_like=True, tag="leave_group"):
    name: str


class CollectWeights(msgspec.Struct, frozen=True, array_like=True, tag="collect"):
    """Receive a part of an update beside the weights that serve. `UpdateWeights(StagedSource())` makes all parts visible.

    Parts that are neither used nor followed by another part within `idle_s` are dropped.
    """

    part: Part
    anew: bool = False  # a tensor that has arrived before begins another update
    timeout_s: float = 300.0
    idle_s: float = 600.0


class DiscardWeights(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Drop the collected parts."""

    reason: str = ""


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Load new weights into a paused engine. `recompute`: drop all old KV; otherwise running sequences keep theirs.

    With `base`, the source contains only the tensors changed since that version; the others stay as they are.
    """

    source: Source
    version: int | None = None  # None: the current version plus one
    recompute: bool = True
    base: int | None = None
    checksum: dict[str, str] | None = None  # SHA-256 in hex by tensor name; verified before the first write


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """Release memory of a paused engine. Sequences that a freeze holds keep their tokens and recompute their KV later."""

    tags: tuple[Tag, ...] = TAGS


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """Allocate the memory again. Weights are read from their last source, or must be sent again if it is unavailable."""

    tags: tuple[Tag, ...] = TAGS


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Drop the cached blocks that no sequence or lease holds."""


class ListSequences(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """List the live sequences, as one consistent snapshot."""


class ChecksumWeights(msgspec.Struct, frozen=True, array_like=True, tag="checksum"):
    """Compute checksums of the weights in service, after all steps launched before."""


Command = (
    Stop
    | Pause
    | Resume
    | UpdateWeights
    | Flush
    | ListSequences
    | Sleep
    | Wake
    | JoinGroup
    | LeaveGroup
    | CollectWeights
    | DiscardWeights
    | ChecksumWeights
)


class EngineState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """The state of an engine after a pause, a resume or an update."""

    state: State
    mode: PauseMode | None = None  # of the pause, if there is one
    rejecting: bool = False  # new requests are refused
    version: int = 0
    ended: dict[int, int] = {}  # number of tokens by id, for the sequences that this command ended
    forced: list[int] = []  # ids in `ended` that were ended because the timeout had passed
    held: list[int] = []  # ids that still own blocks or other resources
    elapsed_s: float = 0.0
    asleep: tuple[Tag, ...] = ()  # memory that is released


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    blocks: int


class Collected(msgspec.Struct, frozen=True, array_like=True, tag="collected"):
    """The parts of an update that an engine holds."""

    tensors: int = 0
    missing: int = 0
    first_missing: str = ""
    on: str = ""  # the device whose memory holds them


class WeightChecksums(msgspec.Struct, frozen=True, array_like=True, tag="checksums"):
    version: int
    sha256: dict[str, str]  # in hex, by checkpoint name; parts of a fused matrix have the checksum of the matrix


class SequenceStatus(msgspec.Struct, frozen=True, array_like=True):
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
    """The command cannot be carried out now. Nothing has changed unless the message says otherwise."""

    status: int
    code: str
    message: str


Result = EngineState | Flushed | SequenceList | Denied | Collected | WeightChecksums
