from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from headgate.text.closed_schemas import closed
from headgate.text.constraints import json_schema
from headgate.text.grammar_check import _any_bytes

A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
SHUT = {"additionalProperties": False}


def allows(schema: Any, value: Any) -> bool:
    matcher = LLMatcher(_any_bytes(), json_schema({"type": "object"} | schema), log_level=0)
    return matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting()


def test_an_object_that_lists_its_properties_has_no_others():
    assert allows(A, {"a": 1}) and not allows(A, {"a": 1, "b": 2})
    assert not allows({"properties": {}}, {"a": 1})


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^b$": {}}},
    ],
)
def test_an_object_that_is_declared_open_has_others(more: dict[str, Any]):
    assert allows({"properties": {"a": {"type": "integer"}}} | more, {"a": 1, "b": 2})


def test_an_object_that_lists_nothing_has_any_properties():
    assert allows({}, {"a": 1, "b": {"c": 2}})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [A, B]}, {"a": 1, "b": 2}),
        (A | {"anyOf": [B]}, {"a": 1, "b": 2}),
        (B | {"$ref": "#/$defs/a", "$defs": {"a": A}}, {"b": 2, "a": 1}),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, {"a": 1, "b": 2}),
        ({"allOf": [{"$ref": "#/$defs/c"}, B], "$defs": {"a": A, "c": {"$ref": "#/$defs/a"}}}, {"a": 1, "b": 2}),
        ({"allOf": [{"properties": {"o": A}}, {"properties": {"o": B}}]}, {"o": {"a": 1, "b": 2}}),
        ({"properties": {"a": {}}, "required": ["b"]}, {"a": 1, "b": 2}),
    ],
)
def test_schemas_that_are_combined_stay_open(schema: dict[str, Any], value: Any):
    assert allows(schema, value)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [A, B]}, {"anyOf": [A | SHUT, B | SHUT]}),
        ({"allOf": [A]}, {"allOf": [A | SHUT]}),
        ({"items": A, "prefixItems": [B, True]}, {"items": A | SHUT, "prefixItems": [B | SHUT, True]}),
        ({"additionalProperties": A}, {"additionalProperties": A | SHUT}),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": A, "b": B}},
            {"$ref": "#/$defs/a", "$defs": {"a": A | SHUT, "b": B | SHUT}},
        ),
        ({"allOf": [{"$ref": "#/items"}, B], "items": A}, {"allOf": [{"$ref": "#/items"}, B], "items": A}),
        ({"enum": [A], "const": {"properties": {}}}, {"enum": [A], "const": {"properties": {}}}),
        ({"properties": {"properties": A}}, {"properties": {"properties": A | SHUT}} | SHUT),
        ({"properties": 7, "items": [A]}, {"properties": 7, "items": [A | SHUT]}),
    ],
)
def test_objects_are_closed_wherever_a_schema_is(schema: dict[str, Any], expected: dict[str, Any]):
    assert closed(schema) == expected
