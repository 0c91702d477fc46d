"""JSON schemas, patterns and grammars: any is accepted or refused, in bounded time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from headgate.api.generate.constraints import constraint_for
from headgate.api.generate.structural_tags import structural_tag
from headgate.errors import RequestError
from headgate.text import constraints, trial
from headgate.text.constraints import checked, json_schema, regex
from headgate.text.ebnf import lark_of
from headgate.text.grammar_check import complaint_about
from tests.fuzzing.properties import fuzzed, leaves, odd_text, odd_values, replaced

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120, "multipleOf": 3},
        "list": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["a", 1, None]},
    },
    "required": ["name"],
    "additionalProperties": {"anyOf": [{"const": 1}, {"type": ["string", "null"]}]},
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "allOf": [{"oneOf": [{}]}]}
    },
}
KEYWORDS = st.sampled_from(
    (
        "type",
        "items",
        "properties",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$ref",
        "enum",
        "const",
        "pattern",
        "format",
        "minimum",
        "maxLength",
        "maxItems",
        "prefixItems",
        "if",
        "$defs",
        "required",
    )
)
schemas = st.recursive(
    st.one_of(leaves, st.just({"$ref": "#"}), st.just({"$ref": "#/items"})),
    lambda inner: st.one_of(st.dictionaries(KEYWORDS, inner, max_size=4), st.lists(inner, max_size=3)),
    max_leaves=15,
)


@fuzzed(st.one_of(replaced(SCHEMA), schemas), few=20)
def test_any_schema_is_accepted_or_refused(schema: Any) -> None:
    with suppress(RequestError):
        json_schema(schema)


PIECES = st.sampled_from(
    (
        "a",
        ".",
        "\\d",
        "[a-z]",
        "[^\\w]",
        "(a|b)",
        "^",
        "$",
        "\\b",
        "(?=a)",
        "(?i)",
        "\\p{L}",
        "\\",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "é",
        "\n",
        "/",
    )
)
repeats = st.sampled_from(("", "*", "+", "?", "{0,}", "{3}", "{1,999}", "{99999}", "*?", "{,}"))
patterns = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, repeats),
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
    ),
    max_leaves=10,
)


@fuzzed(st.one_of(patterns, odd_text), few=20)
def test_any_pattern_is_accepted_or_refused(pattern: str) -> None:
    with suppress(RequestError):
        regex(pattern)


RULES = st.sampled_from(
    (
        '"a"',
        "a",
        "b",
        "start",
        "/a+/",
        '%json {"type": "integer"}',
        "a b",
        "(a | b)*",
        "a?",
        "",
        '"',
        "a{1,9}",
        "%llguidance {}",
    )
)


@fuzzed(
    st.lists(st.tuples(st.sampled_from(("start", "a", "b", "A")), st.lists(RULES, max_size=4)), max_size=5), few=20
)
def test_any_grammar_is_accepted_or_refused(rules: list[tuple[str, list[str]]]) -> None:
    with suppress(RequestError):
        checked("\n".join(f"{name}: {' | '.join(sides)}" for name, sides in rules) or "x")


EBNF = st.sampled_from(
    (
        "root",
        "a",
        " ::= ",
        '"x"',
        "[^a-z\\n]",
        "(",
        ")",
        "|",
        "*",
        "{1,3}",
        "\n",
        "#",
        '"',
        "\\",
        "<",
        ".",
        "é",
    )
)


@fuzzed(st.one_of(st.lists(EBNF, max_size=20).map("".join), odd_text).map("root ::= ".__add__), few=20)
def test_any_grammar_in_ebnf_is_converted_or_refused(written: str) -> None:
    with suppress(RequestError):
        complaint_about(lark_of(written, param="ebnf"))


TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": "<b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ""}],
                "stop_after_first": True,
            },
        ],
    },
}


@fuzzed(replaced(TAGS), few=20)
def test_any_structural_tag_is_accepted_or_refused(value: Any) -> None:
    if isinstance(value, dict):
        with pytest.MonkeyPatch.context() as patched, suppress(RequestError):
            patched.setattr(constraints, "tried", complaint_about)  # a process for each would take longer
            structural_tag(value)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]


@fuzzed(st.tuples(replaced(TOOLS), replaced({"type": "function", "function": {"name": "f"}})), few=30)
def test_any_tools_are_accepted_or_refused(drawn: tuple[Any, Any]) -> None:
    tools, choice = drawn
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):  # as the type of the body requires
        with suppress(RequestError):
            constraint_for(tools=tools, tool_choice=choice if isinstance(choice, str | dict) else None)


def nested(levels: int, *keys: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for level in range(levels):
        schema = {keys[level % len(keys)]: schema}
    return schema


def ladder(levels: int, keyword: str) -> dict[str, Any]:
    """A schema in which every level refers to the next one twice."""
    steps = {f"s{i}": {keyword: [{"$ref": f"#/$defs/s{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/s0", "$defs": steps | {f"s{levels}": {"type": "string"}}}


HOSTILE: dict[str, Any] = {
    **{f"nested {levels} deep": nested(levels, "items", "additionalProperties") for levels in (100, 300, 900)},
    **{f"a ladder of {keyword}": ladder(40, keyword) for keyword in ("anyOf", "allOf", "oneOf")},
    "all of many": {
        "allOf": [{"anyOf": [{"required": [f"k{i}"]}, {"properties": {f"k{i}": {}}}]} for i in range(40)]
    },
    "patterns that meet": {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)], "type": "string"},
    "many properties": {
        "properties": {f"k{i}": {"type": "string"} for i in range(3000)},
        "required": [f"k{i}" for i in range(3000)],
    },
    "a large enum": {"enum": [f"{'a' * (i % 50)}{i}" for i in range(9000)]},
    "a long range": {"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 7},
    "endless itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "patterns of properties": {"patternProperties": {"(a+)+" * 20 + str(i): {} for i in range(30)}},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_schemas_take_bounded_time_and_memory_and_do_not_end_the_process() -> None:
    """The schemas are compiled in a separate process, in a thread whose stack is as large as in a server."""
    program = """
        import resource, threading, time
        from tests.fuzzing.test_grammars import HOSTILE, refused
        worst = []
        def main():
            for name, schema in HOSTILE.items():
                began_s = time.thread_time()
                refused(schema)
                worst.append((time.thread_time() - began_s, name))
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
        print(max(worst)[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(worst))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    longest_s, kilobytes, count = done.stdout.split()
    assert float(longest_s) < 10 and int(kilobytes) < 1_500_000 and int(count) == len(HOSTILE)


def test_patterns_that_must_match_together_are_compiled_in_a_separate_process(monkeypatch: pytest.MonkeyPatch):
    """Two more patterns take ten times as long. Only the limits of a separate process can stop that."""
    tried: list[str] = []

    def refuse(grammar: str) -> str:
        tried.append(grammar)
        return trial.TOO_MUCH

    monkeypatch.setattr(constraints, "tried", refuse)
    for schema in (HOSTILE["patterns that meet"], HOSTILE["patterns of properties"]):
        with pytest.raises(RequestError, match="let fewer patterns apply"):
            json_schema(schema)
    assert len(tried) == 2
    assert json_schema({"properties": {"a": {"pattern": "^a+$"}, "b": {"pattern": "^b+$"}}})
    assert len(tried) == 2


@pytest.mark.slow
def test_a_trial_compilation_ends_at_its_timeout_and_reports_errors() -> None:
    assert trial.tried(f"start: %json {json.dumps(HOSTILE['patterns that meet'])}") == trial.TOO_MUCH
    assert trial.tried('start: %json {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}') == ""
    assert "wat" in trial.tried('start: %json {"type": "wat"}')


def refused(schema: Any) -> bool:
    try:
        json_schema(json.loads(json.dumps(schema)))
    except RequestError:
        return True
    return False


@fuzzed(odd_values, few=30)
def test_any_response_format_is_accepted_or_refused(value: Any) -> None:
    if isinstance(value, dict):
        with suppress(RequestError):
            constraint_for(response_format=value)
