"""Pause, resume, update, sleep, wake-up and flush: request bodies, answers and default timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract.decoding import convert
from headgate.contract.journal import VERSION_DIGITS
from headgate.contract.limits import Count, Seconds
from headgate.contract.tickets import Version
from headgate.errors import RequestError
from headgate.protocol.command import (
    DEFAULT_TIMEOUT_S,
    TAGS,
    Backend,
    BroadcastSource,
    FileSource,
    JoinGroup,
    PauseMode,
    SharedMemorySource,
    SharedStorage,
    SharedTensor,
    Source,
    Tag,
)

LEAST_VERSION_HEADER = "x-headgate-least-version"  # a server with older weights refuses the request
NEW_VERSION_HEADER = "x-headgate-new-version"  # the number that a router gives the weights of an update
BOOT_HEADER = "x-headgate-boot"  # in answers to control calls: the boot id of the process that answered
UPDATE_TIMEOUT_S = 600.0
DRAIN_S = 30.0  # for the requests of a worker that is updated or removed
LONG_S = 3600.0  # for a drain requested through a compatible API, which has no timeout

Label = Annotated[str, Meta(max_length=1000)]

# A state listed here, if any engine is in it, is reported as the state of the fleet; the first one that occurs wins.
REPORTED_FIRST = ("quarantined", "updating", "pausing")


class ControlBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all control calls accept; an unknown field is refused by name."""

    timeout: Seconds = DEFAULT_TIMEOUT_S


class PauseRequest(ControlBody, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = "abort"
    new_requests: Literal["reject", "queue"] = "reject"
    clear_cache: bool | UnsetType = UNSET  # also drop cached prefixes; not sent if unset, as older workers refuse it


class GroupSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A process group in which the trainer is rank 0; see `headgate.weights.send_weights`."""

    init_method: str
    world_size: int
    rank: int = 1
    timeout: Seconds = 300.0
    backend: Backend = "gloo"


class SharedSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Handles to a trainer's GPU memory on this host; see `headgate.weights.share`. Bytes are base64."""

    gpu: str
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]


class UpdateRequest(ControlBody, kw_only=True, forbid_unknown_fields=True):
    timeout: Seconds = UPDATE_TIMEOUT_S
    path: Annotated[str, Meta(min_length=1)] | None = None  # a folder, a safetensors or a GGUF file on this host
    group: GroupSource | None = None
    shared: SharedSource | None = None
    version: Version | None = None  # above the current one; None: the next
    label: Label | None = None  # the trainer's own name of the version; may repeat
    verify_checksum: dict[str, str] | None = None  # SHA-256 in hex; of a path by file name, otherwise by tensor name
    base: Version | None = None  # the source contains only the tensors changed since this version
    kv: Literal["recompute", "keep"] = "recompute"


class FleetUpdate(UpdateRequest, kw_only=True, forbid_unknown_fields=True):
    """An update of all workers of a router."""

    strategy: Literal["all", "rolling"] = "all"
    drain_timeout: Seconds = (
        DRAIN_S  # rolling: how long a worker's requests may finish before they move to another one
    )


class MemoryRequest(ControlBody, kw_only=True, forbid_unknown_fields=True):
    timeout: Seconds = UPDATE_TIMEOUT_S
    tags: Annotated[tuple[Tag, ...], Meta(min_length=1)] = TAGS


def memory_of(raw: dict[str, Any], query: Mapping[str, str]) -> MemoryRequest:
    """The body of a sleep or wake-up. FastDeploy's clients send `?tags=weight,kv_cache` instead."""
    if (names := query.get("tags")) is not None:
        if "tags" in raw:
            raise RequestError("give tags in the body or in the query, not in both", param="tags")
        raw = raw | {"tags": ["weights" if name == "weight" else name for name in names.split(",")]}
    body: MemoryRequest = convert(raw, MemoryRequest, "")
    return body


RequestName = tuple[str, str]  # tenant and id


class EngineOutcome(msgspec.Struct, kw_only=True):
    engine: Count
    state: str  # the state of the engine, or "down"
    weight_version: Version | UnsetType = UNSET
    elapsed_s: float | UnsetType = UNSET
    held: Count | UnsetType = UNSET  # sequences that still own blocks or other resources
    blocks: Count | UnsetType = UNSET  # dropped by a flush
    error: str | UnsetType = UNSET


class FleetResult(msgspec.Struct, kw_only=True):
    is_paused: bool
    state: str  # running, pausing, paused, updating, quarantined, draining
    mode: str | None = None
    weight_version: Version = 0
    weight_label: str = ""  # of that version: the trainer's label, or the number as text
    asleep: Sequence[str] = ()
    engines: list[EngineOutcome] = []
    # only for a pause
    aborted: Count | UnsetType = UNSET
    finished: Count | UnsetType = UNSET
    forced: list[str] | UnsetType = UNSET  # requests that were ended because the timeout had passed
    elapsed_s: float | UnsetType = UNSET
    # only for a pause by a router, which counts a request once that several workers have ended
    aborted_requests: list[RequestName] | UnsetType = UNSET
    finished_requests: list[RequestName] | UnsetType = UNSET
    # only for an update
    checksum: dict[str, str] | UnsetType = UNSET
    # only for a flush, and for a pause that clears the cache
    blocks: Count | UnsetType = UNSET


class ControlAnswer(msgspec.Struct):
    request_id: str
    status: str
    result: FleetResult


class Refusal(RequestError):
    """An engine or a worker refused the call."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.status = status


def overall(seen: set[str]) -> str:
    """The state of a fleet whose engines are in the states `seen`."""
    for state in REPORTED_FIRST:
        if state in seen:
            return state
    if "running" in seen and "paused" in seen:
        return "pausing"
    return "running" if "running" in seen else min(seen, default="running")


def new_version_of(headers: Mapping[str, str]) -> int | None:
    """The number that a router gives the weights of an update, so that all its workers use the same one."""
    return None if (value := headers.get(NEW_VERSION_HEADER)) is None else version_in(value, NEW_VERSION_HEADER)


def version_in(value: str, header: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= VERSION_DIGITS):
        raise RequestError(f"must be the number of a weight version, not {value!r:.100}", param=header)
    return int(value)


def source_of(body: UpdateRequest) -> Source:
    if sum(source is not None for source in (body.path, body.group, body.shared)) != 1:
        raise RequestError("say where the weights are with one of path, group and shared", param="path")
    if body.path is not None:
        return FileSource(body.path, body.verify_checksum)
    if body.shared is not None:
        return SharedMemorySource(body.shared.gpu, body.shared.storages, body.shared.tensors)
    assert body.group is not None
    return group_of(body.group)


def tensor_checksums(body: UpdateRequest) -> dict[str, str] | None:
    """The checksums by tensor name. Those of files belong to their source."""
    return body.verify_checksum if body.path is None else None


def group_of(group: GroupSource) -> BroadcastSource:
    try:
        return BroadcastSource(group.init_method, group.world_size, group.rank, group.timeout, group.backend)
    except ValueError as error:
        raise RequestError(str(error), param="group", code="invalid_value") from None


class TrainerGroup(msgspec.Struct, kw_only=True):
    """The process group that a trainer forms with the engines, in the fields that vLLM and SGLang use."""

    master_address: str
    master_port: int | str  # some trainers send text
    world_size: int
    rank_offset: int = 1
    backend: Backend = "gloo"
    timeout: float = 300.0

    @property
    def port(self) -> int:
        try:
            port = int(self.master_port)
        except ValueError:
            port = 0
        if not 0 < port < 2**16:
            raise RequestError(f"master_port must be a port, not {self.master_port!r}", param="master_port")
        return port

    def joined(self, name: str) -> JoinGroup:
        """A group that engines join once, for many updates."""
        place = (self.master_address.strip("[]"), self.port, self.world_size, self.rank_offset)
        try:
            return JoinGroup(name, *place, self.backend, self.timeout)
        except ValueError as error:
            raise RequestError(str(error), param="rank_offset", code="invalid_value") from None

    def group(self) -> BroadcastSource:
        host = f"[{self.master_address}]" if ":" in self.master_address else self.master_address
        return group_of(
            GroupSource(
                init_method=f"tcp://{host}:{self.port}",
                world_size=self.world_size,
                rank=self.rank_offset,
                timeout=self.timeout,
                backend=self.backend,
            )
        )
