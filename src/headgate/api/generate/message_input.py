"""Converts a body of the messages API to the equivalent chat body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from headgate.api.generate.prompts import text_of
from headgate.contract.messages import (
    ContentBlock,
    MessageParam,
    MessagesRequest,
    ThinkingOptions,
    ToolChoice,
    ToolParam,
)
from headgate.contract.sampling import MESSAGES_TO_CHAT
from headgate.contract.schema import ChatRequest, FunctionCall, Generation, Message, Object, Part, ToolCall
from headgate.errors import RequestError

encode = msgspec.json.Encoder().encode

DROPPED: Final = ("redacted_thinking",)  # only the server that wrote it can read it


def as_chat(body: MessagesRequest) -> ChatRequest:
    same = {name: getattr(body, name) for name in Generation.__struct_fields__}
    sampling = {name: getattr(body, field) for field, name in MESSAGES_TO_CHAT.items()}
    messages, choice = _messages(body), body.tool_choice
    _check_thinking(body.thinking, choice)
    return ChatRequest(
        **same | sampling,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=None if choice is None else choice.disable_parallel_tool_use is not True,
        response_format=None if body.output_config is None else body.output_config.format,
        chat_template_kwargs=None if body.thinking is None else _template_variables(body.thinking),
        continue_final_message=messages[-1].role == "assistant" or None,
    )


# ------------------------------------------------------------------------------------------------------------ messages


def _messages(body: MessagesRequest) -> list[Message]:
    turns: list[list[Message]] = []  # consecutive messages of one role
    for message in _single_blocks(body):
        if turns and turns[-1][0].role == message.role != "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    messages = [_together(turn) for turn in turns]
    if not messages:
        raise RequestError("the messages have no content", param="messages")
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        raise RequestError(
            "the last message calls tools; send their results in a message of role user", param="messages"
        )
    return messages


def _single_blocks(body: MessagesRequest) -> Iterator[Message]:
    if body.system:
        yield Message(role="system", content=text_of(body.system, "system"))
    for i, message in enumerate(body.messages):
        yield from _split(message, f"messages[{i}].content")


def _split(message: MessageParam, where: str) -> Iterable[Message]:
    """One chat message per block; `_together` puts them together again. Results have a role of their own."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if not message.content:
        raise RequestError(f"{where} is empty", param=where)
    blocks = [(block, f"{where}[{i}]") for i, block in enumerate(message.content) if block.type not in DROPPED]
    return [CONVERTERS[message.role](block, place) for block, place in blocks]


def _said(block: ContentBlock, where: str) -> Message:
    match block.type:
        case "thinking":
            thought = _given(block.thinking, where, "thinking")
            return Message(role="assistant", content="", reasoning_content=thought)
        case "tool_use":
            call = FunctionCall(name=_given(block.name, where, "name"), arguments=encode(block.input or {}).decode())
            return Message(role="assistant", tool_calls=[ToolCall(id=_given(block.id, where, "id"), function=call)])
    return Message(role="assistant", content=_text(block, where))


def _asked(block: ContentBlock, where: str) -> Message:
    if block.type != "tool_result":
        return Message(role="user", content=_text(block, where))
    output = text_of(block.content, f"{where}.content")
    return Message(role="tool", content=output, tool_call_id=_given(block.tool_use_id, where, "tool_use_id"))


def _instructed(block: ContentBlock, where: str) -> Message:
    return Message(role="system", content=_text(block, where))


CONVERTERS: Final = {"user": _asked, "assistant": _said, "system": _instructed}


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise RequestError(
            f"{where} is of type {block.type!r}, which is not supported here; this model takes text only",
            param=where,
            code="unsupported_content",
        )
    return _given(block.text, where, "text")


def _together(parts: Sequence[Message]) -> Message:
    """One message of all blocks of a turn. Adding them one by one would take quadratic time."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        role=parts[0].role,
        content=_joined([part.content for part in parts]),
        reasoning_content=_joined([part.reasoning_content for part in parts]),
        tool_calls=[call for part in parts for call in part.tool_calls or ()] or None,
    )


def _joined(texts: Iterable[str | list[Part] | None]) -> str | None:
    given = [text for text in texts if isinstance(text, str)]
    return "\n".join(filter(None, given)) if given else None


def _given(value: str | None, where: str, name: str) -> str:
    if value is None:
        raise RequestError(f"{where} has no {name}", param=f"{where}.{name}")
    return value


# ------------------------------------------------------------------------------------------------------------- options


def _tool(tool: ToolParam, where: str) -> Object:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {tool.type!r}; only tools with an input_schema, which the client runs, can be called",
            param=f"{where}.type",
            code="unsupported_tool",
        )
    if tool.input_schema is None:
        raise RequestError(f"{where} has no input_schema", param=f"{where}.input_schema")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice) -> str | Object:
    match choice.type:
        case "tool":
            return {"type": "function", "function": {"name": _given(choice.name, "tool_choice", "name")}}
        case "any":
            return "required"
    return choice.type


def _check_thinking(thinking: ThinkingOptions | None, choice: ToolChoice | None) -> None:
    if thinking is not None and thinking.type == "enabled" and choice is not None and choice.type in ("any", "tool"):
        raise RequestError(
            f"tool_choice {choice.type} makes the answer a call from its first token; thinking needs auto or none",
            param="thinking",
        )


def _template_variables(thinking: ThinkingOptions) -> Object:
    """The variables with which chat templates turn reasoning on and off; each template reads one of them."""
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")
