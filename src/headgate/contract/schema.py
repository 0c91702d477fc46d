"""The bodies that clients send, as types. Decoding is checking: a wrong type is refused with the path to it.

A field that we do not know is refused by its name. The ones in `Harmless` are accepted and have no effect, because
common clients send them; everything else with a name here does what its name says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headgate.contract.decoding import convert
from headgate.contract.tickets import KvTicket, Version
from headgate.errors import RequestError
from headgate.protocol.output import Cause, FinishReason

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[!-~]+$(?!\n)")]
TagText = Annotated[str, Meta(min_length=1, max_length=128)]
Tags = Annotated[dict[TagText, Annotated[str, Meta(max_length=128)]], Meta(min_length=1, max_length=16)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=32)] | None
Object = dict[str, Any]


class Harmless(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Accepted and ignored."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class ResumedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What another server has said of a choice, as its journal tells."""

    index: Size
    token_ids: list[TokenId] = []
    versions: list[tuple[Version, Count]] = []  # of the weights, and of how many of the ids in a row
    delivered_chars: Size = 0
    finish: tuple[FinishReason, Cause, Size, Size, Size] | None = None  # then prompt, cached and output tokens


class Resume(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    choices: list[ResumedChoice]


class Generation(Harmless, kw_only=True, forbid_unknown_fields=True):
    """What chat, completions and responses have in common. None means the default."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    # ours, in every kind of request
    request_id: Name | None = None
    tags: Tags | None = None
    generated_token_ids: list[TokenId] | None = None
    delivered_chars: Size | None = None
    resume: Resume | None = None  # with a journal only
    export_kv: bool | None = None  # compute the prompt for another server, and answer with a ticket
    kv_ticket: KvTicket | None = None  # such a ticket, of another server
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Size | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class Sampled(Generation, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions share beyond `Generation`."""

    n: Count | None = None
    max_tokens: Count | None = None
    stop: Stop = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream_options: StreamOptions | None = None
    response_format: Object | None = None


# ---------------------------------------------------------------------------------------------------------------- chat


class Part(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None  # clients that add up stream deltas leave it in


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what clients leave in an assistant message that they send back
    refusal: Any = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None


class ChatRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# --------------------------------------------------------------------------------------------------------- completions

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]  # text, texts, token ids, or lists of them; see `prompts_of`
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None  # refused by name


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One entry per prompt, whichever of the four shapes they came in."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty; give text or token ids", param="prompt")
    if isinstance(prompt[0], int):
        return [convert(prompt, TokenIds, "prompt")]
    prompts: list[str | list[int]] = convert(prompt, list[str | TokenIds], "prompt")
    return prompts


# ----------------------------------------------------------------------------------------------------------- responses


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a function call that the model made, or what came of it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Object | None = None
    verbosity: Any = None  # ignored


class ResponsesRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stop: Stop = None
    text: TextOptions | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    reasoning: Any = None  # ignored
    max_tool_calls: Any = None  # ignored
    previous_response_id: Any = None  # refused by name
    conversation: Any = None  # refused by name
    prompt: Any = None  # refused by name


# ------------------------------------------------------------------------------------------------------------ tokenize


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


# ------------------------------------------------------------------------------------------------------------ decoding
