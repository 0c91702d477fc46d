"""Converts a body of the responses API to the equivalent chat body."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.api.generate.prompts import text_of
from headgate.contract.sampling import RESPONSES_TO_CHAT
from headgate.contract.schema import (
    ChatRequest,
    FunctionCall,
    Generation,
    InputItem,
    Message,
    Object,
    ResponsesRequest,
    ToolCall,
)
from headgate.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
# They belong to tools and inputs that are not supported, so a response without them is complete.
NEVER_THERE = (
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    for i, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, *NEVER_THERE):
            raise RequestError(
                f"{name!r:.100} cannot be included (a response has its text, reasoning as text, calls and {LOGPROBS}); "
                "leave it out",
                param=f"include[{i}]",
                code="unsupported_parameter",
            )
    same = {name: getattr(body, name) for name in Generation.__struct_fields__}
    sampling = {name: getattr(body, field) for field, name in RESPONSES_TO_CHAT.items()}
    return ChatRequest(
        **same | sampling,
        messages=_messages(body),
        logprobs=LOGPROBS in (body.include or ()) or body.top_logprobs is not None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format) if body.text and body.text.format else None,
    )


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for i, item in enumerate(body.input):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[Message], item: InputItem, where: str) -> None:
    match item.type:
        case "message":
            if item.role is None:
                raise RequestError(f"{where} has no role", param=f"{where}.role")
            messages.append(Message(role=item.role, content=text_of(item.content, f"{where}.content")))
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            output = text_of(item.output, f"{where}.output")
            messages.append(Message(role="tool", content=output, tool_call_id=_given(item.call_id, where, "call_id")))
        case "reasoning":
            pass  # templates have no field for it


def _add_call(messages: list[Message], item: InputItem, where: str) -> None:
    """Add a call to the last message if that is the assistant's: calls made together belong to one message."""
    function = FunctionCall(name=_given(item.name, where, "name"), arguments=item.arguments or "{}")
    call = ToolCall(id=_given(item.call_id, where, "call_id"), function=function)
    if messages and messages[-1].role == "assistant":
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _given(value: str | None, where: str, name: str) -> str:
    if value is None:
        raise RequestError(f"{where} has no {name}", param=f"{where}.{name}")
    return value


def _tool(tool: Object, where: str) -> Object:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where} is of type {tool.get('type')!r}; only functions can be called",
            param=f"{where}.type",
            code="unsupported_tool",
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | Object | None) -> str | Object | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(format: Object) -> Object:
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": _without(format, ("type",))}


def _without(value: Object, names: Sequence[str]) -> Object:
    return {name: item for name, item in value.items() if name not in names}
