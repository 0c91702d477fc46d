"""Request bodies of the SGLang-compatible API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headgate.contract.control import TrainerGroup
from headgate.contract.sampling import MostLogprobs
from headgate.contract.schema import Name, ResumeState
from headgate.protocol.command import Backend, PauseMode


class InitGroup(TrainerGroup, kw_only=True):
    group_name: str = "weight_update_group"
    backend: Backend = "nccl"


class FromDistributed(msgspec.Struct, kw_only=True):
    """The list of tensors is informative: the transfer itself repeats and verifies it."""

    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class FromTensor(msgspec.Struct, kw_only=True):
    serialized_named_tensors: list[Any] = []


class GenerateBody(msgspec.Struct, kw_only=True):
    """SGLang's clients send more fields than these; like SGLang, we ignore those that do not affect the answer."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: Name | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: MostLogprobs | None = None
    return_text_in_logprobs: bool = False
    priority: int | None = None
    resume: ResumeState | None = None  # our extension, as in every generation body


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "freeze", "retract": "freeze"}


class FromDisk(msgspec.Struct, kw_only=True):
    model_path: str
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class MemoryBody(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None
