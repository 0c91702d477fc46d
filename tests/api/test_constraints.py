from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from headgate.api.generate.constraints import constraint_for, constraint_of
from headgate.contract.decoding import convert
from headgate.contract.schema import CompletionRequest
from headgate.errors import RequestError
from headgate.text import constraints
from headgate.text.constraints import json_object, json_schema
from headgate.text.grammar_check import _any_bytes, complaint_about
from headgate.text.parsers.json_calls import GRANITE, HERMES, LLAMA, MISTRAL
from tests.text.test_json_calls import parse_calls

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Århus", 'the "moon"']}},
}


def tool(name: str, parameters: object = None) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", WEATHER), tool("now")]
SCHEMAS = {"weather": WEATHER, "now": {"maxProperties": 0}}


def say(grammar: str, rng: random.Random) -> str:
    """A text that `grammar` allows, chosen byte by byte."""
    matcher = LLMatcher(_any_bytes(), grammar)
    said = bytearray()
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(257) if mask >> token & 1]
        token = rng.choice(allowed)
        assert matcher.consume_token(token)
        if token == 256:
            break
        said.append(token)
    return said.decode()


def allows(grammar: str | None, text: str) -> bool:
    matcher = LLMatcher(_any_bytes(), grammar or "start: /(?s:.*)/", log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
        {"tools": []},
    ],
)
def test_without_constraints_there_is_no_grammar(body):
    assert constraint_for(**body) is None


def test_a_response_format_becomes_the_grammar_of_its_schema():
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    assert constraint_for(response_format=named) == json_schema(PERSON)
    assert constraint_for(response_format={"type": "json_schema", "name": "person", "schema": PERSON}) == json_schema(
        PERSON
    )
    assert constraint_for(response_format={"type": "json_object"}) == json_object()
    assert constraint_for(response_format=named, tools=TOOLS, tool_choice="none") == json_schema(PERSON)


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL, GRANITE])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_can_always_be_parsed_and_matches_its_schema(format, parallel):
    grammar = constraint_for(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, markup=format)
    rng, counts = random.Random(0), set()
    for _ in range(40):
        content, calls = parse_calls(say(grammar, rng), format, names=SCHEMAS, seed="r")
        assert content == "" and calls
        counts.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert (counts == {1}) == (not parallel or format is LLAMA)


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL, GRANITE])
def test_a_named_function_is_called_once(format):
    named = {"type": "function", "function": {"name": "now"}}
    grammar, rng = constraint_for(tools=TOOLS, tool_choice=named, markup=format), random.Random(0)
    calls = [parse_calls(say(grammar, rng), format, names=SCHEMAS, seed="r")[1] for _ in range(40)]
    assert {len(each) for each in calls} == {1}


@pytest.mark.parametrize("name", [{"function": {"name": "now"}}, {"name": "now"}])
def test_a_named_function_is_the_only_one_that_can_be_called(name):
    grammar = constraint_for(tools=TOOLS, tool_choice={"type": "function", **name}, parallel_tool_calls=False)
    said = say(grammar, random.Random(0))
    assert "".join(said.split()) == '<tool_call>{"name":"now","arguments":{}}</tool_call>'


def test_with_a_response_format_and_tools_the_model_may_answer_or_call():
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    grammar = constraint_for(response_format=schema, tools=TOOLS)
    assert allows(grammar, '{"age": 7}')
    assert allows(grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not allows(grammar, "Hello")
    assert not allows(constraint_for(response_format=schema, tools=TOOLS, tool_choice="required"), '{"age": 7}')


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "text, json_object, json_schema or structural_tag",
        ),
        ({"response_format": {}}, "response_format.type", "text, json_object, json_schema or structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "needs a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
            "response_format.json_schema.schema",
            "an object or a boolean",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
            "response_format",
            "Invalid type: wat",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "only tools of type function"),
        ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function", "is an object"),
        ({"tools": [*TOOLS, tool("")]}, "tools[2].function.name", "between 1 and 64"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "between 1 and 64"),
        ({"tools": [tool("x", 5)]}, "tools[0].function.parameters", "JSON schema"),
        ({"tools": [tool("x", {"a": {1}})], "tool_choice": "required"}, "tools[0].function.parameters", "not JSON"),
        ({"tools": [tool("x", {"type": "wat"})], "tool_choice": "required"}, "tools", "Invalid type: wat"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "there is no tool",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "auto, none, required"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused_by_name(body, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        constraint_for(**body)
    assert refused.value.param == param


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def completion(**fields: Any) -> CompletionRequest:
    return convert({"prompt": "x", **fields}, CompletionRequest, "body")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"regex": "ab"}, "ab"),
        ({"guided_regex": "ab"}, "ab"),
        ({"structured_outputs": {"regex": "ab"}}, "ab"),
        ({"guided_decoding": {"regex": "ab", "backend": "xgrammar"}}, "ab"),
        ({"ebnf": 'root ::= "ab"'}, "ab"),
        ({"guided_grammar": 'start: "ab"'}, "ab"),
        ({"structured_outputs": {"grammar": 'root ::= "ab"', "disable_fallback": True}}, "ab"),
        ({"guided_choice": ["ab"], "guided_decoding_backend": "outlines"}, "ab"),
        ({"structural_tag": TAG}, "ab"),
        ({"structural_tag": json.dumps(TAG)}, "ab"),
        ({"response_format": TAG}, "ab"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "ab"),
        ({"json_schema": json.dumps(PERSON)}, '{"age": 7}'),
        ({"guided_json": PERSON, "guided_whitespace_pattern": "_"}, '{_"age":_7_}'),
        ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, '{"age": 7}'),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": "_"}}, '{_"a":_[_]_}'),
        ({"regex": "ab", "response_format": {"type": "text"}}, "ab"),
    ],
)
def test_a_constraint_has_the_names_of_other_systems(fields, said, monkeypatch):
    monkeypatch.setattr(constraints, "tried", complaint_about)
    constraint = constraint_of(completion(**fields))
    assert constraint is not None and allows(constraint.grammar(), said)
    assert not allows(constraint.grammar(), "else")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex and ebnf exclude each other"),
        ({"regex": "a", "response_format": SCHEMA_FORMAT}, "regex", "response_format and regex exclude each other"),
        ({"response_format": TAG, "guided_json": {}}, "guided_json", "response_format and guided_json exclude"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "structured_outputs.regex and structured_outputs.choice exclude each other",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_decoding": {"json_object": True}},
            "guided_decoding",
            "structured_outputs.regex and guided_decoding.json_object",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs",
            "whitespace_pattern and disable_any_whitespace exclude each other",
        ),
    ],
)
def test_constraints_exclude_each_other(fields, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        constraint_of(completion(**fields))
    assert refused.value.param == param


def test_a_constraint_in_a_string_must_be_a_json_object():
    with pytest.raises(RequestError, match="guided_json is not a JSON object") as refused:
        constraint_of(completion(guided_json="[")).grammar()
    assert refused.value.param == "guided_json"


def test_a_response_format_alone_is_left_to_the_grammar_of_answers_and_calls():
    assert constraint_of(completion(response_format=SCHEMA_FORMAT)) is None
    assert constraint_of(completion()) is None
