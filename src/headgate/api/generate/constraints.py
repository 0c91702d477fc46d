"""Converts the constraints in a request body to one grammar, `SamplingParams.grammar`.

OpenAI has `response_format` and `tool_choice`. vLLM and SGLang have more fields for the same; a `Constraint` is the value
of one of them. A request has one constraint: several are refused by name.

A constraint that cannot be enforced is refused before the request reaches an engine, with the name of the field.

With `tool_choice: auto` the model decides whether to call a tool, and calls are parsed from its text. If there is also a
`response_format`, the grammar enforces well-formed calls, because the answer is either one or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from headgate.api.generate.structural_tags import structural_tag
from headgate.api.state import LONG_TEXT, Api
from headgate.contract.decoding import decode
from headgate.contract.schema import Sampled, StructuredOutputs
from headgate.errors import RequestError
from headgate.text.constraints import (
    USUAL_BLANKS,
    Blanks,
    checked,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
    schema_rule,
)
from headgate.text.parsers.json_calls import HERMES, Markup
from headgate.text.tools import Tool, call_rules

MAX_TOOLS = 128
MAX_NAME_CHARS = 64

Object = Mapping[str, Any]


Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

# The fields of a body, and what they hold.
KINDS: Mapping[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
    "structured_outputs_regex": "regex",
}
NESTED: Sequence[Kind] = get_args(Kind)  # the fields of `structured_outputs`


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must match, and the field that says so."""

    kind: Kind
    value: Any
    param: str
    blanks: Blanks = USUAL_BLANKS

    @property
    def field(self) -> str:
        """The field of the body."""
        return self.param.partition(".")[0]

    def grammar(self) -> str:
        match self.kind:
            case "json":
                return json_schema(self._object(), param=self.param, blanks=self.blanks)
            case "json_object":
                return json_object(param=self.param, blanks=self.blanks)
            case "regex":
                return regex(self.value, param=self.param)
            case "choice":
                return choice(self.value, param=self.param)
            case "grammar":
                return grammar(self.value, param=self.param)
            case "structural_tag":
                return structural_tag(self._object(), param=self.param)

    def _object(self) -> dict[str, Any]:
        """The value, which clients may send as JSON in a string."""
        if not isinstance(self.value, str):
            return dict(self.value)
        try:
            return decode(self.value.encode(), dict[str, Any])
        except RequestError as error:
            raise RequestError(f"{self.param} is not a JSON object: {error}", param=self.param) from None


def constraint_of(body: Sampled, **more: Any) -> Constraint | None:
    """The constraint of an answer, except for a `response_format` of OpenAI's API. `more`: fields of other bodies.

    Raises a RequestError if there are several.
    """
    found = list(_constraints(body, more))
    names = [each.param for each in found]
    if _type_of(body.response_format) not in ("text", "structural_tag"):
        names.insert(0, "response_format")
    if found and len(names) > 1:
        raise RequestError(f"{' and '.join(names)} exclude each other; give one of them", param=found[-1].field)
    return found[0] if found else None


def _type_of(response_format: Object | None) -> Any:
    return "text" if response_format is None else response_format.get("type")


def _constraints(body: Sampled, more: Mapping[str, Any]) -> Iterator[Constraint]:
    if _type_of(body.response_format) == "structural_tag":
        yield Constraint("structural_tag", body.response_format, "response_format")
    for param, nested in (("structured_outputs", body.structured_outputs), ("guided_decoding", body.guided_decoding)):
        if nested is not None:
            yield from _nested_constraints(nested, param)
    blanks = Blanks(body.guided_whitespace_pattern)
    for name, kind in KINDS.items():
        value = more[name] if name in more else getattr(body, name, None)
        if value is not None:
            yield Constraint(kind, value, name, blanks)


def _nested_constraints(asked: StructuredOutputs, param: str) -> Iterator[Constraint]:
    blanks = Blanks(asked.whitespace_pattern, none=bool(asked.disable_any_whitespace))
    if asked.whitespace_pattern is not None and asked.disable_any_whitespace:
        raise RequestError("whitespace_pattern and disable_any_whitespace exclude each other", param=param)
    for kind in NESTED:
        if (value := getattr(asked, kind)) not in (None, False):
            yield Constraint(kind, value, f"{param}.{kind}", blanks)


async def answer_grammar(api: Api, body: Sampled, share: str, **more: Any) -> str | None:
    """The grammar of an answer without tools. `more`: constraints in fields of other bodies."""
    if (constraint := constraint_of(body, **more)) is not None:
        compiled: Callable[[], str | None] = constraint.grammar
    elif body.response_format is not None:
        compiled = partial(constraint_for, response_format=body.response_format)
    else:
        return None
    return await api.off_loop(share, LONG_TEXT, compiled)  # in a thread: even a short constraint may take long


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
    types = "text, json_object, json_schema or structural_tag"
    raise RequestError(f"type must be {types}", param="response_format.type")


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
