"""Request bodies as types. Decoding validates: a value of the wrong type is refused with its path in the body.

An unknown field is refused by name. The fields in `Harmless` are accepted and have no effect, because common clients send
them; every other field declared here has the effect that its name describes. Sampling parameters are declared in
`contract.sampling`, and `accepts` adds those of an API to its body; `takes_compatible` adds the fields of
`contract.compatible`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headgate.contract.compatible import takes_compatible
from headgate.contract.decoding import convert
from headgate.contract.sampling import Count, MostLogprobs, Size, TokenId, accepts
from headgate.contract.tickets import KvTicket, KvTransferParams, Version
from headgate.errors import RequestError
from headgate.protocol.output import Cause, FinishReason

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[!-~]+$(?!\n)")]
TagText = Annotated[str, Meta(min_length=1, max_length=128)]
Tags = Annotated[dict[TagText, Annotated[str, Meta(max_length=128)]], Meta(min_length=1, max_length=16)]
Object = dict[str, Any]


@accepts("chat", "completions", "responses", "messages")
class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that requests set most often; the first fields of a struct are decoded fastest. None: the default."""

    model: str | None = None
    stream: bool | None = None


class Harmless(Common, kw_only=True, forbid_unknown_fields=True):
    """Accepted and ignored."""

    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class ResumedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What another server has generated for a choice, according to its journal."""

    index: Size
    token_ids: list[TokenId] = []
    versions: list[tuple[Version, Count]] = []  # weight version, and the number of consecutive ids it generated
    delivered_chars: Size = 0
    finish: tuple[FinishReason, Cause, Size, Size, Size] | None = None  # the sizes: prompt, cached and output tokens
    end: Cause | None = None  # the choice was asked to end: nothing more is generated, and the client gets the end


class ResumeState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    choices: list[ResumedChoice]


class Generation(Harmless, kw_only=True, forbid_unknown_fields=True):
    """Extensions to the APIs of OpenAI and Anthropic: chat, completions, responses and messages share them."""

    request_id: Name | None = None
    tags: Tags | None = None
    generated_token_ids: list[TokenId] | None = None
    delivered_chars: Size | None = None
    resume: ResumeState | None = None  # with a journal only
    export_kv: bool | None = None  # compute the KV of the prompt for another server, and answer with a ticket
    kv_ticket: KvTicket | None = None  # a ticket that another server issued
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: usage in every chunk, as in vLLM
    include_obfuscation: bool | None = None  # ignored


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraints of an answer; one of them."""

    json: Object | str | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark or EBNF
    json_object: bool | None = None
    structural_tag: Object | str | None = None
    # Of JSON.
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = (
        None  # without effect: objects are closed unless their schema opens them
    )
    # The name of vLLM's library; ignored.
    backend: Any = None
    disable_fallback: Any = None
    _backend: Any = None
    _backend_was_auto: Any = None


@accepts("chat", "completions")
class Sampled(Generation, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and completions share and responses do not have."""

    stream_options: StreamOptions | None = None
    # One of these constrains the answer, see `api.generate.constraints`.
    response_format: Object | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | str | None = None  # these are the names before vLLM 0.12
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding: StructuredOutputs | None = None  # in `sampling_params`
    structural_tag: Object | str | None = None
    json_schema: Object | str | None = None  # this and the next two are SGLang's
    regex: str | None = None
    ebnf: str | None = None
    guided_whitespace_pattern: str | None = None  # of JSON
    guided_decoding_backend: Any = None  # the name of vLLM's library; ignored
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens as `token_id:123`, as in vLLM
    kv_transfer_params: KvTransferParams | None = None  # prefill and decode on different servers, as in vLLM


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
    index: int | None = None  # sent by clients that merge stream deltas; ignored


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under the name that newer clients use
    # Sent by clients that return an assistant message unchanged; ignored.
    refusal: Any = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None


@takes_compatible("chat")
@accepts("chat")
class ChatRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: MostLogprobs | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


# --------------------------------------------------------------------------------------------------------- completions

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


@takes_compatible("completions")
@accepts("completions")
class CompletionRequest(Sampled, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]  # text, texts, token ids, or lists of them; see `prompts_of`
    echo: bool | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None  # refused by name


def prompts_of(prompt: str | list[Any], param: str = "prompt") -> list[str | list[int]]:
    """One entry per prompt, for each of the four accepted shapes."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} is empty; give text or token ids", param=param)
    if isinstance(prompt[0], int):
        return [convert(prompt, TokenIds, param)]
    prompts: list[str | list[int]] = convert(prompt, list[str | TokenIds], param)
    return prompts


# ----------------------------------------------------------------------------------------------------------- responses


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a function call by the model, or the output of such a call."""

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


@takes_compatible("responses")
@accepts("responses")
class ResponsesRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    text: TextOptions | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: MostLogprobs | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    reasoning: Any = None  # ignored
    max_tool_calls: Any = None  # ignored


# ------------------------------------------------------------------------------------------------------------ tokenize


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: give either `prompt` or `messages`, and not both."""

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
