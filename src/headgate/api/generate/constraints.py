"""What a request body demands of the shape of its answer, as a grammar for the engine.

`response_format` and `tool_choice` end here in one string, `SamplingParams.grammar`, or none. Anything that cannot be
enforced is refused now, before admission, with the name of the field.

With `tool_choice: auto` the model may call or not, and a call is read from what it says. Beside a `response_format` its
calls must be well-formed, for the answer is one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headgate.errors import RequestError
from headgate.text.constraints import checked, schema_rule
from headgate.text.tools import Tool, ToolFormat, call_rules

MAX_TOOLS = 128
MAX_NAME_CHARS = 64

Object = Mapping[str, Any]


def constraint_for(
    *,
    response_format: Object | None = None,
    tools: Sequence[Object] | None = None,
    tool_choice: str | Object | None = None,
    parallel_tool_calls: bool = True,
    format: ToolFormat = ToolFormat.HERMES,
) -> str | None:
    """The grammar of the answer for `SamplingParams.grammar`, or None where anything may be said.

    The arguments are the fields of a chat body as plain JSON values; those of the responses API, which are flatter, are
    taken too. Raises a RequestError that names the field. May take a tenth of a second for a large schema: call it where it
    does not block the event loop.
    """
    answer, declared = answer_rule(response_format), read_tools(tools)
    choice, callable_tools = choose_tools(declared, tool_choice)
    match choice:
        case "required":
            rules = call_rules(format, callable_tools, parallel=parallel_tool_calls)
            return checked(f"start: calls\n{rules}", param="tools")
        case "auto" if answer and callable_tools:
            rules = call_rules(format, callable_tools, parallel=parallel_tool_calls)
            return checked(f"start: answer | calls\nanswer: {answer}\n{rules}", param="response_format")
    return checked(f"start: {answer}", param="response_format") if answer else None


def answer_rule(response_format: Object | None) -> str | None:
    """What `response_format` asks of an answer, as the right-hand side of a rule; None if nothing."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return schema_rule({"type": "object"}, param="response_format")
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema_rule(schema, param="response_format.json_schema.schema")
        case {"type": "json_schema", "schema": schema}:
            return schema_rule(schema, param="response_format.schema")
        case {"type": "json_schema"}:
            raise RequestError("a json_schema needs a schema", param="response_format.json_schema.schema")
    raise RequestError("type must be text, json_object or json_schema", param="response_format.type")


def read_tools(tools: Sequence[Object] | None) -> list[Tool]:
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools; at most {MAX_TOOLS} are taken", param="tools")
    return [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def read_tool(tool: Object, param: str) -> Tool:
    if tool.get("type") != "function":
        raise RequestError("only tools of type function are known", param=f"{param}.type")
    function, param = (tool["function"], f"{param}.function") if "function" in tool else (tool, param)
    if not isinstance(function, Mapping):
        raise RequestError("a function is an object", param=param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise RequestError(f"a name has between 1 and {MAX_NAME_CHARS} characters", param=f"{param}.name")
    if not isinstance(parameters, Mapping | None):
        raise RequestError("parameters are a JSON schema", param=f"{param}.parameters")
    nothing = {"properties": {}, "additionalProperties": False}
    return Tool(name, dict(parameters or nothing), f"{param}.parameters")


def choose_tools(tools: list[Tool], choice: str | Object | None) -> tuple[str, list[Tool]]:
    """Whether calls are required, may come (auto) or not (none), and of which tools."""
    match choice:
        case None | "auto" | "none":
            return choice or "auto", tools
        case "required" if tools:
            return "required", tools
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            if named := [tool for tool in tools if tool.name == name]:
                return "required", named
            raise RequestError(f"no tool is called {name!r}", param="tool_choice")
        case "required":
            raise RequestError("a call is required, but there are no tools", param="tool_choice")
    raise RequestError("tool_choice must be auto, none, required or name a function", param="tool_choice")
