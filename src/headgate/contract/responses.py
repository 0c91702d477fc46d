"""Answers of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headgate.contract.answers import PromptDetails, TokenLogprob, VersionSpan
from headgate.contract.schema import Object


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


OutputItem = MessageItem | CallItem | ReasoningItem


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Incomplete(msgspec.Struct, frozen=True):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    temperature: float | None
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_p: float | None
    truncation: str = "disabled"
    store: bool = False
    metadata: Any
    usage: ResponseUsage | None = None
    # Extensions: `cause` is set at the end, the others on request.
    cause: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
