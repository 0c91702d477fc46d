"""Bodies and answers of POST /v1/messages (Anthropic's Messages API), and the events of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headgate.contract.answers import VersionSpan
from headgate.contract.compatible import takes_compatible
from headgate.contract.errors import Problem, problem_of, status_of
from headgate.contract.event_json import encode
from headgate.contract.sampling import accepts
from headgate.contract.schema import Generation, Object, Part

# -------------------------------------------------------------------------------------------------------------- bodies


class ContentBlock(msgspec.Struct, kw_only=True):
    """A text, a tool call by the model, the result of a call, or reasoning; `type` says which."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    is_error: Any = None  # ignored: templates have no field for it, and the text of the result tells the model
    thinking: str | None = None


class MessageParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the client carries out. Tools of other types are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Object | None = None
    cache_control: Any = None  # ignored
    strict: Any = None  # ignored
    eager_input_streaming: Any = None  # ignored: input is always streamed as it is generated
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # not enforced; `max_tokens` is
    display: Literal["summarized"] | None = None  # reasoning is returned as it is


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Object | None = None
    effort: Any = None  # ignored


@takes_compatible("messages")
@accepts("messages")
class MessagesRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[Part] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `MessagesRequest` on which the prompt depends."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Part] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Any = None


# ------------------------------------------------------------------------------------------------------------- answers


class TextContent(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingContent(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Object = {}
    partial_json: str | UnsetType = UNSET  # the input as it was generated, if it is not a JSON object


Content = TextContent | ThinkingContent | ToolUse


class MessageUsage(msgspec.Struct, frozen=True):
    input_tokens: int  # without the cached ones
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    stop_reason: str | None = None
    stop_sequence: str | None = None
    cause: str | UnsetType = UNSET  # an extension: why the answer ended
    usage: MessageUsage
    content: Sequence[Content] = ()
    # Extensions, on request.
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    completion_token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET
    error: Problem | UnsetType = UNSET  # why the answer was cut short, for clients that do not accept `abort`


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


# -------------------------------------------------------------------------------------------------------------- events


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What `message_delta` changes in the message of `message_start`."""

    stop_reason: str
    stop_sequence: str | None = None
    cause: str
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    completion_token_ids: Sequence[int] | UnsetType = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def message_start(message: MessageObject) -> bytes:
    return event("message_start", message=message)


def message_delta(end: MessageEnd, usage: MessageUsage) -> bytes:
    return event("message_delta", delta=end, usage=usage)


def stop_reason_of(finish_reason: str, cause: str, *, called: bool, strict: bool) -> str:
    """Anthropic's API has no value for an answer that was cut short; `strict` replaces ours by `max_tokens`."""
    match finish_reason:
        case "stop" if called:
            return "tool_use"
        case "stop":
            return "stop_sequence" if cause == "stop_string" else "end_turn"
        case "length":
            return "max_tokens"
    return "max_tokens" if strict else "abort"


# -------------------------------------------------------------------------------------------------------------- errors

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error in Anthropic's format. `param` and `code` are extensions."""

    error: Problem
    request_id: str

    @classmethod
    def of(cls, error: BaseException, request_id: str) -> MessageErrorBody:
        problem, status = problem_of(error, request_id), status_of(error)
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return cls(msgspec.structs.replace(problem, type=kind), request_id)

    @staticmethod
    def event(body: bytes) -> bytes:
        """The event that reports an error in a stream."""
        return b"event: error\ndata: %b\n\n" % body
