"""Request bodies of the vLLM-compatible API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from headgate.contract.abort import MOST_NAMES, AbortRequest, Id
from headgate.contract.compatible import takes_compatible
from headgate.contract.control import Label, SharedSource, TrainerGroup
from headgate.contract.decoding import convert, decode
from headgate.contract.sampling import TokenId
from headgate.contract.schema import ResumeState, StreamOptions
from headgate.contract.tickets import KvTransferParams
from headgate.errors import RequestError
from headgate.pickled import decode_base64
from headgate.protocol.command import TAGS, Backend, JoinGroup, PauseMode, Tag, TensorSpec


class QueryParams(Protocol):
    """The parameters of a query, each of which may occur more than once."""

    def get(self, key: str, default: str) -> str: ...

    def getlist(self, key: str) -> list[str]: ...


class InitTransfer(msgspec.Struct, kw_only=True):
    init_info: dict[str, Any]


class UpdateTransfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's trainers send `update_info`, prime-rl sends `weight_dir`."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | None = None  # a checkpoint on this host

    @property
    def info(self) -> dict[str, Any]:
        """The update in vLLM's form, whichever form was sent."""
        if (self.update_info is None) == (self.weight_dir is None):
            raise RequestError("say where the weights are with either update_info or weight_dir", param="update_info")
        return {"path": self.weight_dir} if self.update_info is None else self.update_info


class NewVersion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    new_version: Label
    # In SGLang the default is true. vLLM does not have the field and aborts nothing.
    abort_all_requests: bool = False


class AbortIds(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    request_ids: Annotated[list[Id], Meta(max_length=MOST_NAMES)] | None = None  # None: all requests


def abort_ids(body: bytes) -> AbortRequest:
    """An abort of vLLM's API in the form of ours. vLLM takes an empty list for all requests; here it is refused."""
    ids = decode(body, AbortIds).request_ids
    if ids is None:
        return AbortRequest(abort_all=True)
    if not ids:
        raise RequestError("an empty list does not mean all; leave it out to abort all", param="request_ids")
    return AbortRequest(req_ids=ids)


class StartTransfer(msgspec.Struct, kw_only=True):
    is_checkpoint_format: bool = True


class RemoteCall(msgspec.Struct, kw_only=True):
    """A method of vLLM's workers; those that SkyRL calls are implemented."""

    method: str
    kwargs: dict[str, Any] = {}


class WakeTags(msgspec.Struct, kw_only=True):
    """What SkyRL's `skyrl_wake_for_weight_sync` wakes."""

    tags: list[Tag]


class FinishTransfer(msgspec.Struct, kw_only=True):
    weight_version: Label | None = None


class VllmTrainerGroup(TrainerGroup, kw_only=True):
    transport: Literal["headgate"]


BufferBytes = Annotated[int, Meta(ge=1)]


class VllmNcclGroup(TrainerGroup, kw_only=True):
    """vLLM's own process group, from a store or an NCCL id. Before vLLM 0.28, `packed` was in each update."""

    master_address: str = ""
    master_port: int | str = 0
    backend: Backend = "nccl"
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: BufferBytes = 2**30

    def joined(self, name: str) -> JoinGroup:
        if self.nccl_unique_id_b64 is None:
            return msgspec.structs.replace(super().joined(name), rendezvous="vllm")
        try:
            unique_id = decode_base64(self.nccl_unique_id_b64)
            place = (name, "", 0, self.world_size, self.rank_offset)
            return JoinGroup(*place, "nccl", self.timeout, "vllm", unique_id)
        except ValueError as error:
            raise RequestError(str(error), param="init_info", code="invalid_value") from None


class Parameters(msgspec.Struct, kw_only=True):
    """What vLLM's trainers send. With our own transfer the list of tensors is informative: the transfer repeats and
    verifies it."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    path: str | None = None
    weight_dir: str | None = None  # the same under prime-rl's name
    shared: SharedSource | None = None
    version: int | None = None  # above the current one; None: the next
    weight_version: Label | None = None
    packed: bool | None = None  # None: as the group was set up
    packed_buffer_size_bytes: BufferBytes | None = None
    ipc_handles_pickled: str | None = None
    ipc_handles: Any = None
    # Our extension: SHA-256 in hex, of a file by its name, otherwise by tensor name.
    verify_checksum: dict[str, str] | None = None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            message = "names, dtype_names and shapes must have the same length"
            raise RequestError(message, param="update_info.names")
        return tuple(map(TensorSpec, self.names, self.dtype_names, map(tuple, self.shapes)))

    @property
    def file(self) -> str | None:
        return self.path or self.weight_dir


MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "drain", "keep": "freeze"}
# How much memory a sleep releases. vLLM's level 1 keeps a copy of the weights in host memory and level 2 does not. Here
# both release all memory, and waking reloads the weights from their files.
LEVELS: dict[str, tuple[Tag, ...]] = {"0": (), "1": TAGS, "2": TAGS}


def mode_of(query: Mapping[str, str]) -> PauseMode:
    """Return our pause mode for the mode that a call of vLLM's `/pause` or `/sleep` names. A sleep pauses first."""
    # Older versions of vLLM have this flag and no modes.
    older = "wait" if flag(query, "wait_for_inflight_requests", default=False) else "abort"
    mode = query.get("mode", older)
    if mode not in MODES:
        raise RequestError(f"mode must be abort, wait or keep, not {mode!r}", param="mode")
    return MODES[mode]


def sleep_tags(query: QueryParams) -> tuple[Tag, ...]:
    """The memory that a sleep releases: the tags, or all memory of the level. Level 0 only pauses."""
    level = query.get("level", "1")
    if level not in LEVELS:
        raise RequestError(f"level must be 0, 1 or 2, not {level!r}", param="level")
    tags = _tags(query)
    return tuple(tag for tag in LEVELS[level] if not tags or tag in tags)


def wake_tags(query: QueryParams) -> tuple[Tag, ...]:
    return _tags(query) or TAGS


def _tags(query: QueryParams) -> tuple[Tag, ...]:
    names = [name for value in query.getlist("tags") for name in value.split(",") if name]
    tags: tuple[Tag, ...] = convert(names, tuple[Tag, ...], "tags")
    return tags


ConfigFormat = Literal["text", "json"]


def config_format(query: Mapping[str, str]) -> ConfigFormat:
    """The form of `vllm_config` in `/server_info`."""
    given: ConfigFormat = convert(query.get("config_format", "text"), ConfigFormat, "config_format")
    return given


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = query.get(name)
    return default if value is None else value.lower() in ("true", "1", "yes", "on")


@takes_compatible("vllm")
class TokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids in, token ids out."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # also the ids of the prompt
    priority: int | None = None
    cache_salt: str | None = None
    return_routed_experts: bool | None = None  # our extension; None: if the server keeps them
    kv_transfer_params: KvTransferParams | None = None
    resume: ResumeState | None = None  # our extension, as in every generation body
