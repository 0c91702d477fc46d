from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain

import pytest

from headgate.text.parsers.events import CallDelta, Content, Event
from headgate.text.parsers.json_calls import GRANITE, HERMES, LLAMA, MISTRAL, JsonCalls, Markup

NAMES = ("get_weather", "add")
FORMATS = (HERMES, LLAMA, MISTRAL, GRANITE)


@dataclass(frozen=True)
class ParsedCall:
    id: str
    name: str
    arguments: str


def parse_calls(text: str, format: Markup, *, names: Collection[str], seed: str) -> tuple[str, list[ParsedCall]]:
    parser = JsonCalls(format, names=names, seed=seed)
    return added_up([parser.feed(text), parser.finish()])


def added_up(batches: list[list[Event]]) -> tuple[str, list[ParsedCall]]:
    """Return the content and calls that a client gets by adding up deltas."""
    content, calls = "", []
    for event in chain(*batches):
        match event:
            case Content(text):
                content += text
            case CallDelta(index, arguments, id, name):
                if name is not None:
                    assert index == len(calls) and id
                    calls.append(ParsedCall(id, name, ""))
                calls[index] = replace(calls[index], arguments=calls[index].arguments + arguments)
    return content, calls


def parse(text: str, format: Markup = HERMES) -> tuple[str, list[tuple[str, str]]]:
    content, calls = parse_calls(text, format, names=NAMES, seed="r")
    return content, [(call.name, call.arguments) for call in calls]


def stream(pieces: list[str], format: Markup) -> tuple[str, list[ParsedCall]]:
    parser = JsonCalls(format, names=NAMES, seed="r")
    content, calls = added_up([*map(parser.feed, pieces), parser.finish()])
    assert parser.called == bool(calls)
    return content, calls


ONE = '{"name": "get_weather", "arguments": {"city": "Århus \\"}", "days": [1, {"a": null}]}}'
ONE_ARGUMENTS = '{"city": "Århus \\"}", "days": [1, {"a": null}]}'
TWO = '{"name": "add", "arguments": {}}'
WANTED = [("get_weather", ONE_ARGUMENTS), ("add", "{}")]

ANSWERS = [
    # format, answer, content, calls
    (HERMES, "Hello, <b>world</b>!\n", "Hello, <b>world</b>!\n", []),
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", WANTED[:1]),
    (
        HERMES,
        f"Let me see.\n\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n",
        "Let me see.",
        WANTED,
    ),
    (HERMES, f"<tool_call>{ONE}{TWO}</tool_call>", "", WANTED),
    (HERMES, f"<tool_call>{TWO}</tool_call> Done.", " Done.", WANTED[1:]),
    (HERMES, f"<tool_call>\n{ONE}\n", "", WANTED[:1]),
    (HERMES, f"<tool_call>\n{ONE}\n</tool_ca", "", WANTED[:1]),
    (HERMES, TWO, "", WANTED[1:]),
    (HERMES, f"\n {TWO}", "", WANTED[1:]),
    (HERMES, '{"name": "unknown", "arguments": {}} ', '{"name": "unknown", "arguments": {}} ', []),
    (HERMES, '<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", "{}")]),
    (HERMES, '{"colour": "red", "name": "add"}', '{"colour": "red", "name": "add"}', []),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add", "why": {}}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    (HERMES, "<tool_call>oh, never mind", "<tool_call>oh, never mind", []),
    (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (HERMES, '<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    (HERMES, "<tool_call>{[]: 7}</tool_call>", "<tool_call>{[]: 7}</tool_call>", []),
    (HERMES, '<tool_call>{"name": "add"]', '<tool_call>{"name": "add"]', []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "a <tool", "a <tool", []),
    (HERMES, "   ", "   ", []),
    (HERMES, "", "", []),
    (LLAMA, ONE.replace("arguments", "parameters"), "", WANTED[:1]),
    (LLAMA, f"<|python_tag|>{ONE}; {TWO}", "", WANTED),
    (LLAMA, f'{{"type": "function", {TWO[1:]}', "", WANTED[1:]),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, "It is sunny.", "It is sunny.", []),
    (LLAMA, f"{TWO}\nDone.", "Done.", WANTED[1:]),
    (MISTRAL, f"[TOOL_CALLS][{ONE}, {TWO}]", "", WANTED),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}]", "", WANTED[:1]),
    (MISTRAL, f" [{ONE},\n{TWO}]", "", WANTED),
    (MISTRAL, f"Wait.[TOOL_CALLS][{TWO}]", "Wait.", WANTED[1:]),
    (MISTRAL, "[1] is a reference", "[1] is a reference", []),
    (MISTRAL, "[", "[", []),
]


@pytest.mark.parametrize(("format", "answer", "content", "calls"), ANSWERS)
def test_an_answer_is_split_into_content_and_calls(format, answer, content, calls):
    assert parse(answer, format) == (content, calls)


@pytest.mark.parametrize(("format", "answer", "content", "calls"), ANSWERS)
def test_a_stream_adds_up_to_the_same_however_it_is_split(format, answer, content, calls):
    random_cuts = random.Random(0)
    whole = parse_calls(answer, format, names=NAMES, seed="r")
    assert stream(list(answer), format) == whole
    for _ in range(30):
        pieces, rest = [], answer
        while rest:
            size = random_cuts.randrange(1, 9)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert stream(pieces, format) == whole


def test_arguments_are_streamed_as_they_are_generated():
    parser = JsonCalls(HERMES, names=NAMES, seed="r")
    assert parser.feed('<tool_call>\n{"name": "add"') == []
    (head,) = parser.feed(', "arguments": {"a": 1')
    assert isinstance(head, CallDelta) and (head.index, head.name, head.arguments) == (0, "add", '{"a": 1')
    assert parser.feed("2") == [CallDelta(0, "2")]
    assert parser.feed("}}\n</tool_call>") == [CallDelta(0, "}")] and parser.finish() == []


def test_content_streams_at_once_unless_it_may_become_markup():
    parser = JsonCalls(HERMES, names=NAMES, seed="r")
    assert parser.feed("a < b") == [Content("a < b")]
    assert parser.feed(" and <too") == [Content(" and")]
    assert parser.feed("ls>") == [Content(" <tools>")]


def test_calls_of_a_replayed_stream_have_the_same_ids_and_others_have_others():
    text = f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"
    ids = {call.id for seed in ("a", "b", "a") for call in parse_calls(text, HERMES, names=NAMES, seed=seed)[1]}
    assert len(ids) == 4 and all(id.startswith("call_") for id in ids)


def test_text_that_only_looks_like_markup_is_not_lost():
    random_words = random.Random(1)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"name"',
        ":",
        " ",
        "[",
        "]",
        '"',
        "\\",
        "a",
        "[TOOL_CALLS]",
        "\n",
    ]
    for _ in range(500):
        for format in FORMATS:
            text = "".join(random_words.choices(parts, k=random_words.randrange(12)))
            content, calls = parse_calls(text, format, names=NAMES, seed="r")
            assert calls or content == text
            assert stream(list(text), format) == (content, calls)


def test_arguments_are_the_json_that_was_generated():
    (call,) = parse(f"<tool_call>{ONE}</tool_call>")[1]
    assert json.loads(call[1]) == {"city": 'Århus "}', "days": [1, {"a": None}]}
