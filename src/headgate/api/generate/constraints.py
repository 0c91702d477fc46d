"""Converts the constraints in a request body (`response_format`, `tool_choice`) to one grammar, `SamplingParams.grammar`.

A constraint that cannot be enforced is refused before the request reaches an engine, with the name of the field.

With `tool_choice: auto` the model decides whether to call a tool, and calls are parsed from its text. If there is also a
`response_format`, the grammar enforces well-formed calls, because the answer is either one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headgate.api.state import LONG_TEXT, Api
from headgate.contract.decoding import decode
from headgate.contract.schema import Sampled, StructuredOutputs
from headgate.errors import RequestError
from headgate.text.constraints import checked, choice, json_object, json_schema, regex, schema_rule
from headgate.text.parsers.json_calls import HERMES, Markup
from headgate.text.tools import Tool, call_rules

MAX_TOOLS = 128
MAX_NAME_CHARS = 64

Object = Mapping[str, Any]


async def answer_grammar(api: Api, body: Sampled, share: str) -> str | None:
    """The grammar of an answer without tools."""
    if body.structured_outputs is None:
        return await response_format_grammar(api, body.response_format, share)
    if body.response_format is not None:
        raise RequestError("give either response_format or structured_outputs", param="structured_outputs")
    return await api.off_loop(share, LONG_TEXT, partial(structured_grammar, body.structured_outputs))


def structured_grammar(asked: StructuredOutputs) -> str | None:
    """The grammar for vLLM's `structured_outputs`."""
    param = "structured_outputs"
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)]
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other; give one of them", param=param)
    if asked.regex is not None:
        return regex(asked.regex, param=f"{param}.regex")
    if asked.choice is not None:
        return choice(asked.choice, param=f"{param}.choice")
    if asked.json is not None:
        schema = decode(asked.json.encode(), dict[str, Any]) if isinstance(asked.json, str) else asked.json
        return json_schema(schema, param=f"{param}.json")
    return json_object() if asked.json_object else None


async def response_format_grammar(api: Api, response_format: Object | None, share: str) -> str | None:
    """The grammar for a `response_format`, if there is one. Runs in a thread: even a short schema may take long."""
    if response_format is None:
        return None
    return await api.off_loop(share, LONG_TEXT, partial(constraint_for, response_format=response_format))


def constraint_for(
    *,
    response_format: Object | None = None,
    tools: Sequence[Object] | None = None,
    tool_choice: str | Object | None = None,
    parallel_tool_calls: bool = True,
    markup: Markup = HERMES,
) -> str | None:
    """The grammar of the answer for `SamplingParams.grammar`, or None if the answer is unconstrained.

    The arguments are the fields of a chat body as JSON values; the flatter form of the responses API is accepted too.
    Raises a RequestError that names the field. A large schema may take a tenth of a second: do not call this on the event
    loop.
    """
    answer, declared = answer_rule(response_format), read_tools(tools)
    chosen, callable_tools = choose_tools(declared, tool_choice)
    match chosen:
        case "required":
            # If `tool_choice` names a function, the answer is one call of it, as in OpenAI's API.
            several = parallel_tool_calls and not isinstance(tool_choice, Mapping)
            rules = call_rules(markup, callable_tools, parallel=several)
            return checked(f"start: calls\n{rules}", param="tools")
        case "auto" if answer and callable_tools:
            rules = call_rules(markup, callable_tools, parallel=parallel_tool_calls)
            return checked(f"start: answer | calls\nanswer: {answer}\n{rules}", param="response_format")
    return checked(f"start: {answer}", param="response_format") if answer else None


def answer_rule(response_format: Object | None) -> str | None:
    """The right-hand side of a grammar rule for `response_format`; None if it does not constrain the answer."""
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
        raise RequestError(f"{len(tools)} tools; at most {MAX_TOOLS} are accepted", param="tools")
    return [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def read_tool(tool: Object, param: str) -> Tool:
    if tool.get("type") != "function":
        raise RequestError("only tools of type function are supported", param=f"{param}.type")
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
    """Whether calls are required, optional (auto) or excluded (none), and the tools that may be called."""
    match choice:
        case None | "auto" | "none":
            return choice or "auto", tools
        case "required" if tools:
            return "required", tools
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            if named := [tool for tool in tools if tool.name == name]:
                return "required", named
            raise RequestError(f"there is no tool named {name!r}", param="tool_choice")
        case "required":
            raise RequestError("a call is required, but there are no tools", param="tool_choice")
    raise RequestError("tool_choice must be auto, none, required or name a function", param="tool_choice")
