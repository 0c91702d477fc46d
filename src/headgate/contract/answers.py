"""Answers to generation requests: chat, completions, tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from headgate.contract.errors import Problem


class BaseChoice(msgspec.Struct, kw_only=True):
    """What the choices of both APIs have in common; from `cause` on, what OpenAI's have not."""

    index: int
    finish_reason: str | None
    cause: str | UnsetType = UNSET  # why it ended, when it has
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET  # made by this answer, or by this part of it
    generated_token_ids: list[int] | UnsetType = UNSET  # all, of a choice that must go on elsewhere
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class VersionSpan(msgspec.Struct, frozen=True):
    """`tokens` tokens in a row, all made by weights of the same version."""

    version: int
    tokens: int


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class MessageCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class CallPiece(msgspec.Struct, kw_only=True):
    """A delta of one call; only its first has an id, a type and a name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(BaseChoice, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    error: Problem | UnsetType = UNSET  # why the answer was cut short, for those who asked for strict values


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: Sequence[CallPiece] | UnsetType = UNSET


class ChunkChoice(BaseChoice, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChoice(BaseChoice, kw_only=True):
    """A whole answer, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None


class TextCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    error: Problem | UnsetType = UNSET  # why the answer was cut short, for those who asked for strict values


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str
