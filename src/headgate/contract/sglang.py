"""Request bodies of the SGLang-compatible API."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract.compatible import takes_compatible
from headgate.contract.control import Label, TrainerGroup
from headgate.contract.fleet import Joining, Role
from headgate.contract.sampling import MostLogprobs, Size
from headgate.contract.schema import Name, ResumeState
from headgate.errors import RequestError
from headgate.protocol.command import Backend, PauseMode


class InitGroup(TrainerGroup, kw_only=True):
    group_name: str = "weight_update_group"
    backend: Backend = "nccl"


class GroupBody(msgspec.Struct, kw_only=True):
    group_name: str = "weight_update_group"


class BeginUpdate(msgspec.Struct, kw_only=True):
    selector: Literal["target", "all"] = "all"


class FromDistributed(msgspec.Struct, kw_only=True):
    """With our own transfer (the group `headgate`) the list of tensors is informative: the transfer repeats it."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Label | None = None
    load_format: str | None = None
    verify_checksum: dict[str, str] | None = None  # our extension: SHA-256 in hex by tensor name


class FromTensor(msgspec.Struct, kw_only=True):
    serialized_named_tensors: list[str]  # base64, one per GPU
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Label | None = None
    verify_checksum: dict[str, str] | None = None  # our extension: SHA-256 in hex by tensor name


@takes_compatible("sglang")
class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Lists of ids and of sampling parameters have one entry per prompt."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: Name | list[Name] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 2)] | None = None  # -1: no prompt token is scored
    top_logprobs_num: MostLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Size | None = None  # the first token whose experts are returned
    priority: int | None = None
    resume: ResumeState | None = None  # our extension, as in every generation body


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "freeze", "retract": "freeze"}


class CheckBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None  # parts of the names of tensors to leave out
    allow_quant_error: bool = False
    selector: Literal["target", "all"] = "all"  # there is no draft model

    def check(self) -> None:
        if self.action not in CHECKS:
            message = f"{self.action!r:.100} is not supported; use one of {', '.join(CHECKS)}"
            raise RequestError(message, param="action", code="unsupported_parameter")
        if self.allow_quant_error:
            message = "checksums are equal or not; leave out allow_quant_error"
            raise RequestError(message, param="allow_quant_error", code="unsupported_parameter")


CHECKS = ("checksum", "snapshot", "reset_tensors", "compare")


class RankChecksums(msgspec.Struct, kw_only=True):
    checksums: dict[str, str]
    per_gpu_checksum: str
    parallelism_info: dict[str, int]


class Checked(msgspec.Struct, kw_only=True):
    """The answer of a check. Only a checksum has `ranks`: one entry per engine."""

    success: bool = True
    message: str = "Success."
    ranks: list[RankChecksums] | UnsetType = UNSET
    per_engine_checksum: str | UnsetType = UNSET


def combined(ranks: Sequence[RankChecksums]) -> Checked:
    digest = sha256("".join(rank.per_gpu_checksum for rank in ranks).encode()).hexdigest()
    return Checked(ranks=list(ranks), per_engine_checksum=digest)


class FromDisk(msgspec.Struct, kw_only=True):
    model_path: str
    abort_all_requests: bool = False
    weight_version: Label | None = None
    flush_cache: bool = True


class MemoryBody(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None


# By SGLang's `worker_type`.
ROLES: dict[str, Role] = {"regular": "mixed", "prefill": "prefill", "decode": "decode"}


class WorkerSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A worker that is added to SGLang's router. This router finds out models and health by itself."""

    url: str
    worker_type: Literal["regular", "prefill", "decode"] | None = None
    api_key: str | None = None
    priority: int | None = None
    cost: float | None = None
    dp_aware: bool | None = None
    # Without effect here.
    bootstrap_port: int | str | None = None  # the tickets of servers contain the address of their KV
    model_id: str | None = None
    labels: dict[str, str] | None = None
    runtime: str | None = None
    tokenizer_path: str | None = None  # this and the next three configure workers that speak gRPC
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    chat_template: str | None = None
    health_check_timeout_secs: int | None = None
    health_check_interval_secs: int | None = None
    health_success_threshold: int | None = None
    health_failure_threshold: int | None = None
    max_connection_attempts: int | None = None

    def joining(self) -> Joining:
        """The equivalent body of `POST /v1/workers`."""
        for name, default in (("priority", 50), ("cost", 1), ("dp_aware", False)):
            if (given := getattr(self, name)) is not None and given != default:
                message = f"{name} is not supported: workers are chosen by the router's policy; leave it out"
                raise RequestError(message, param=name, code="unsupported_parameter")
        return Joining(url=self.url, role=ROLES[self.worker_type or "regular"], key=self.api_key)
