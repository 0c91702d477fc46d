"""Request bodies of the vLLM-compatible API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headgate.contract.compatible import takes_compatible
from headgate.contract.control import Label, SharedSource, TrainerGroup
from headgate.contract.sampling import TokenId
from headgate.contract.schema import ResumeState, StreamOptions
from headgate.errors import RequestError
from headgate.protocol.command import PauseMode


class InitTransfer(msgspec.Struct, kw_only=True):
    init_info: dict[str, Any]


class UpdateTransfer(msgspec.Struct, kw_only=True):
    update_info: dict[str, Any]


class FinishTransfer(msgspec.Struct, kw_only=True):
    weight_version: Label | None = None


class VllmTrainerGroup(TrainerGroup, kw_only=True):
    transport: Literal["headgate"]


class Parameters(msgspec.Struct, kw_only=True):
    """What vLLM's trainers send. With a process group the list of tensors is informative: the transfer repeats and
    verifies it."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    path: str | None = None
    shared: SharedSource | None = None
    version: int | None = None  # above the current one; None: the next
    weight_version: Label | None = None


MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "drain", "keep": "freeze"}


def mode_of(query: Mapping[str, str]) -> PauseMode:
    """The mode of a pause or a sleep."""
    # Older versions of vLLM have this flag and no modes.
    older = "wait" if flag(query, "wait_for_inflight_requests", default=False) else "abort"
    mode = query.get("mode", older)
    if mode not in MODES:
        raise RequestError(f"mode must be abort, wait or keep, not {mode!r}", param="mode")
    return MODES[mode]


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
    resume: ResumeState | None = None  # our extension, as in every generation body
