from __future__ import annotations

import time
from typing import Any

import pytest
from llguidance import LLMatcher

from headgate.api.generate.structural_tags import structural_tag
from headgate.errors import RequestError
from headgate.text import constraints
from headgate.text.grammar_check import _any_bytes, complaint_about


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each grammar takes longer than everything else here."""
    monkeypatch.setattr(constraints, "tried", complaint_about)


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(_any_bytes(), grammar, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def tag(type: str, **format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": type, **format}}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
TAGS = [{"begin": "<a>", "content": INTEGER, "end": "</a>"}, {"begin": "<b>", "content": TEXT, "end": "</b>"}]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
THOUGHT = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "boolean"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


@pytest.mark.parametrize(
    ("asked", "matched", "others"),
    [
        (
            OLDER,
            [
                "",
                "just text",
                "<function=f>3</function>",
                "a <b <function=f>3</function>\n<function=g>true</function> c",
            ],
            ["<function=g>3</function>", "a <function=", "<function=h>3</function>"],
        ),
        (tag(**TRIGGERED), ["", "x < y", "x <a>1</a> y <b>any <a> text</b>"], ["x <a>one</a>", "<a"]),
        (tag(**TRIGGERED, at_least_one=True), ["<a>1</a>", "<a>1</a> x <b>y</b>"], ["", "x <a>1</a>"]),
        (tag(**TRIGGERED, stop_after_first=True), ["", "x", "x <a>1</a>"], ["x <a>1</a> y"]),
        (tag(**TRIGGERED, at_least_one=True, stop_after_first=True), ["<b></b>"], ["", "<a>1</a> "]),
        (tag(**TRIGGERED, excludes=["no"]), ["yes <a>1</a>"], ["no <a>1</a>", "<a>1</a> no"]),
        (
            tag("tags_with_separator", tags=TAGS, separator=", "),
            ["", "<a>1</a>", "<a>1</a>, <b>2</b>, <a>3</a>"],
            ["<a>1</a><a>1</a>", "<a>1</a>, "],
        ),
        (tag("tags_with_separator", tags=TAGS, separator=",", at_least_one=True), ["<a>1</a>"], [""]),
        (tag("tags_with_separator", tags=TAGS, separator=",", stop_after_first=True), [""], ["<a>1</a>,<a>1</a>"]),
        (
            tag("tag", begin="<t>", content=TRIGGERED, end=["</t>", "<end>"]),
            ["<t>x</t>", "<t>x <a>1</a> y<end>"],
            ["<t>x</t> y", "<t>x", "<t><a>x</a></t>"],
        ),
        (
            tag("sequence", elements=[{"type": "any_text", "excludes": ["<a"]}, {"type": "tag", **TAGS[0]}]),
            ["what <a>3</a>", "<a>3</a>"],
            ["<a>3</a> <a>3</a>", "what"],
        ),
        (
            tag(
                "sequence",
                elements=[THOUGHT, {"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "x+"}]}],
            ),
            ["<think>a </thin</think>12", "<think></think>xxx"],
            ["12", "<think></think>12x"],
        ),
        (
            tag("sequence", elements=[{"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, TEXT]),
            ["((x)) and more"],
            ["((x) and more"],
        ),
        (tag("grammar", grammar='start: "{" start "}" | "x"'), ["{{x}}"], ["{x"]),
        (tag("plus", content={"type": "const_string", "value": "ab"}), ["ab", "abab"], ["", "aba"]),
        (tag("star", content=INTEGER), ["", "12"], ["x"]),
        (tag("optional", content={"type": "const_string", "value": "ab"}), ["", "ab"], ["abab"]),
        (tag("const_string", value="hi"), ["hi"], ["h"]),
    ],
)
def test_an_answer_has_the_structure_of_its_tags(asked: dict[str, Any], matched: list[str], others: list[str]):
    grammar = structural_tag(asked)
    assert [text for text in matched if not allows(grammar, text)] == []
    assert [text for text in others if allows(grammar, text)] == []


def deep(levels: int) -> dict[str, Any]:
    format: dict[str, Any] = INTEGER
    for _ in range(levels):
        format = {"type": "optional", "content": format}
    return {"type": "structural_tag", "format": format}


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"type": "structural_tag"}, "here.format", "is missing"),
        (tag("token_dispatch"), "here.format.type", "invalid value 'token_dispatch'"),
        (tag("json_schema", json_schema={}, style="qwen_xml"), "here.format.style", "invalid enum value 'qwen_xml'"),
        (
            tag("tag", begin={"type": "token", "token": 5}, content=TEXT, end=""),
            "here.format.begin",
            "expected `str`",
        ),
        (tag("any_text", until="x"), "here.format.until", "unknown field"),
        (tag(**TRIGGERED | {"triggers": ["<a"]}), "here", "'<b>' begins with none of the triggers"),
        (tag("sequence", elements=[TEXT, INTEGER]), "here", "free text needs an end"),
        (tag("star", content=TEXT), "here", "free text needs an end"),
        (tag("json_schema", json_schema={"type": "wat"}), "here", "Invalid type: wat"),
        (tag("grammar", grammar="root ::= <x>"), "here", "tokens of the model are not supported"),
        (deep(40), "here", "nested more than 32 deep"),
        (deep(5000), "here", "nested too deeply"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(asked: dict[str, Any], param: str, message: str):
    with pytest.raises(RequestError, match=message) as refused:
        structural_tag(asked, param="here")
    assert refused.value.param == param


def nested(levels: int) -> dict[str, Any]:
    """Each level writes the inner one four times: for each of three triggers, and for the first tag."""
    format: dict[str, Any] = {"type": "regex", "pattern": "a"}
    for _ in range(levels):
        tags = [{"begin": "<abc", "content": format, "end": ">"}]
        format = {"type": "triggered_tags", "triggers": ["<", "<a", "<ab"], "tags": tags, "at_least_one": True}
    return {"type": "structural_tag", "format": format}


def with_triggers(count: int) -> dict[str, Any]:
    triggers = [f"<{i:05}" for i in range(count)]
    tags = [{"begin": trigger, "content": INTEGER, "end": ">"} for trigger in triggers]
    return tag("triggered_tags", triggers=triggers, tags=tags)


def with_ends(count: int) -> dict[str, Any]:
    content = {"type": "or", "elements": [{"type": "const_string", "value": "a"}] * count}
    return tag("tag", begin="", content=content, end=[f"</{i:05}>" for i in range(count)])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (nested(14), "the maximum is"),
        (with_triggers(1000), "1000 triggers; at most 128"),
        (with_ends(5000), "the maximum is"),
    ],
)
def test_a_tag_with_a_grammar_that_would_be_too_long_is_refused_before_it_is_written(
    asked: dict[str, Any], message: str
):
    started_s = time.thread_time()
    with pytest.raises(RequestError, match=message):
        structural_tag(asked)
    assert time.thread_time() - started_s < 2
