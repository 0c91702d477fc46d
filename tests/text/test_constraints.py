from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from headgate.contract.sampling import SamplingParams
from headgate.errors import RequestError
from headgate.text.constraints import checked, choice, json_object, json_schema, regex


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema({"type": "object"}),
        json_schema(True),
        json_object(),
        regex("a/b\\d+"),
        choice(["yes", 'no\n"really"', "é", ""]),
        '{"grammars": [{"json_schema": {"type": "integer"}}]}',
    ],
)
def test_every_constraint_is_a_grammar_that_requests_accept(grammar):
    assert SamplingParams(grammar=checked(grammar)).grammar == grammar


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "wat"}, "Invalid type: wat"),
        ({"$ref": "#/$defs/nowhere"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "not fetch"),
        ({"$ref": "#"}, "nothing can match it"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"minimum": float("nan")}, "not JSON"),
        ({"const": {1, 2}}, "not JSON"),
        ([1, 2], "an object or a boolean"),
        (False, "cannot be enforced"),
        ({"enum": ["a" * 2**18]}, "the maximum is 262144"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_a_reason(schema, complaint):
    with pytest.raises(RequestError, match=complaint) as refused:
        json_schema(schema, param="here")
    assert refused.value.param == "here" and "start:" not in refused.value.message


def test_an_invalid_pattern_is_refused():
    with pytest.raises(RequestError, match="unclosed group"):
        regex("a(")
    with pytest.raises(RequestError, match="the list of choices is empty"):
        choice([])


def deep(levels: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {key: schema}
    return schema


def twice(levels: int) -> dict[str, Any]:
    """Return a schema that doubles in size at every level, with one line per level."""
    halves = {
        f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}, "y": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/a0", "$defs": halves | {f"a{levels}": {"type": "string"}}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema(deep(100_000, "items")),
        lambda: json_schema(deep(500, "items")),
        lambda: json_schema(twice(60)),
        lambda: json_schema({"allOf": [{"anyOf": [{"pattern": f"a{i}{j}"} for j in range(12)]} for i in range(12)]}),
        lambda: json_schema({"anyOf": [{"properties": {f"k{j}": {} for j in range(60)}}] * 60}),
        lambda: json_schema({"type": "string", "maxLength": 10**9}),
        lambda: json_schema({"type": "array", "items": {"type": "string"}, "maxItems": 10**9}),
        lambda: json_schema({"enum": [f"value {i}" for i in range(10_000)]}),
        lambda: regex("((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
        lambda: regex("(a|b)*a(a|b){5000}"),
        lambda: checked("start: " + "(" * 5000 + '"a"' + ")" * 5000),
        lambda: checked("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(90)) + 'a90: "x"\n'),
    ],
)
def test_every_grammar_is_accepted_or_refused_in_bounded_time(make):
    started_s = time.thread_time()
    with suppress(RequestError):
        make()
    assert time.thread_time() - started_s < 2
