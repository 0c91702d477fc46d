"""Answers in the documented format of each model family, divided into reasoning, content and calls.

The answers are written for these tests in the formats of the models' cards and chat templates.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from headgate.config import REASONING_PARSERS, TOOL_PARSERS
from headgate.text.parsers.deepseek_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from headgate.text.parsers.events import CallDelta, Content, Event, Reasoning, merged
from headgate.text.parsers.families import REASONING, TOOLS
from headgate.text.parsers.reader import AnswerParsers, AnswerReader

TOOLBOX = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F", None]},
            "where": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        },
    },
    "add": {"type": "object", "properties": {}},
}
PARIS = {"city": "Paris", "days": 3}


@dataclass(frozen=True)
class Case:
    reasoning: str
    tools: str
    text: str
    thought: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    opened: bool = False  # by the prompt
    part: str | None = None  # where the answer was cut


HARMONY_CALL = (
    "<|channel|>analysis<|message|>The user wants the weather.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I will look it up.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 3}<|call|>'
)
CASES = {
    "qwen3": Case(
        "qwen3", "hermes", "<think>\nTwo and two.\n\nSo four.\n</think>\n\n4.", "Two and two.\n\nSo four.", "4."
    ),
    "qwen3 with a call": Case(
        "qwen3",
        "hermes",
        '<think>\nI need the weather.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 3}}\n</tool_call>',
        "I need the weather.",
        calls=(("get_weather", PARIS),),
    ),
    "qwen3 without thinking": Case("qwen3", "hermes", "Hello <think>!", content="Hello <think>!"),
    "qwen3 with an empty thought": Case("qwen3", "hermes", "<think>\n\n</think>\n\nHi", content="Hi"),
    "qwen3 cut in reasoning": Case("qwen3", "hermes", "<think>\nLet me", "Let me", part="reasoning"),
    "qwen3 cut in the closing tag": Case("qwen3", "hermes", "<think>a\n</thi", "a\n</thi", part="reasoning"),
    "qwen3 cut in a call": Case(
        "qwen3", "hermes", '<tool_call>\n{"name": "add", "arguments": {"a', calls=(("add", '{"a'),), part="tool_call"
    ),
    "deepseek r1, opened by the prompt": Case(
        "deepseek_r1",
        "none",
        "\nOkay, so.\n</think>\n\nThe answer is **4**.",
        "Okay, so.",
        "The answer is **4**.",
        opened=True,
    ),
    "deepseek r1, opened twice": Case("deepseek_r1", "none", "<think>\nOkay.</think>4", "Okay.", "4", opened=True),
    "deepseek v3": Case(
        "deepseek_r1",
        "deepseek_v3",
        f"<think>\nCall both.\n</think>\n\nOne moment.{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n"
        f'{{"city": "Paris",\n "days": 3}}\n```{CALL_END}\n{CALL_BEGIN}function{SEPARATOR}add\n```json\n{{}}\n```{CALL_END}'
        f"{CALLS_END}",
        "Call both.",
        "One moment.",
        (("get_weather", PARIS), ("add", {})),
    ),
    "deepseek v3.1": Case(
        "deepseek_r1",
        "deepseek_v3",
        f'Sure.{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{{"city": "Paris", "days": 3}}{CALL_END}'
        f"{CALL_BEGIN}add{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
        content="Sure.",
        calls=(("get_weather", PARIS), ("add", {})),
    ),
    "deepseek, no call": Case("none", "deepseek_v3", f"{CALLS_BEGIN}oh", content=f"{CALLS_BEGIN}oh"),
    "gpt-oss": Case(
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        "Simple sum.",
        "2 + 2 = 4.",
    ),
    "gpt-oss with a call": Case(
        "gpt_oss",
        "gpt_oss",
        HARMONY_CALL,
        "The user wants the weather.",
        "I will look it up.",
        (("get_weather", PARIS),),
    ),
    "gpt-oss, recipient before the channel": Case(
        "gpt_oss",
        "gpt_oss",
        " to=functions.add<|channel|>commentary json<|message|>{}",
        calls=(("add", "{}"),),
        part="tool_call",
    ),
    "gpt-oss, two thoughts": Case(
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.",
        "One.\nTwo.",
        part="reasoning",
    ),
    "gpt-oss, end left out": Case(
        "gpt_oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>One.<|start|>assistant<|channel|>final<|message|>1",
        "One.",
        "1",
    ),
    "gpt-oss without channels": Case("gpt_oss", "gpt_oss", "Just < text", content="Just < text"),
    "glm-4.5": Case(
        "glm45",
        "glm45",
        "\n<think>Paris it is.</think>\nI will check.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add\n</tool_call>",
        "Paris it is.",
        "I will check.",
        (("get_weather", PARIS), ("add", {})),
    ),
    "glm, on one line": Case(
        "none",
        "glm45",
        "<tool_call>get_weather <arg_key>unit</arg_key> <arg_value>C</arg_value> </tool_call>",
        calls=(("get_weather", {"unit": "C"}),),
    ),
    "glm, no call": Case("none", "glm45", "a <tool_call>{}", content="a <tool_call>{}"),
    "ernie 4.5": Case(
        "ernie45", "hermes", "Easy.\n</think>\n\n<response>\nFour.\n</response>\n", "Easy.", "Four.", opened=True
    ),
    "ernie 4.5 without response tags": Case(
        "ernie45", "hermes", "Easy.\n</think>\nFour.", "Easy.", "Four.", opened=True
    ),
    "ernie 4.5 with a call": Case(
        "ernie45",
        "hermes",
        'Look.\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n',
        "Look.",
        calls=(("add", {}),),
        opened=True,
    ),
    "magistral": Case("mistral", "mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    "qwen3-coder": Case(
        "none",
        "qwen3_coder",
        "I will look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=unit>\nNone\n</parameter>\n<parameter=where>\n5 rue "X"\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        content="I will look.",
        calls=(("get_weather", PARIS | {"unit": None, "where": '5 rue "X"'}), ("add", {})),
    ),
    "qwen3-coder, several lines": Case(
        "none",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n<b>\n\n</param\n</parameter>\n</function>",
        calls=(("get_weather", {"city": "<b>\n\n</param"}),),
    ),
    "qwen3-coder cut in a string": Case(
        "none",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        calls=(("get_weather", '{"city": "Par'),),
        part="tool_call",
    ),
    "qwen3-coder cut in a number": Case(
        "none",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
        calls=(("get_weather", '{"days": 1'),),
        part="tool_call",
    ),
    "qwen3-coder, no call": Case("none", "qwen3_coder", "<tool_call>\n<f>", content="<tool_call>\n<f>"),
    "qwen3-coder, broken in the middle": Case(
        "none", "qwen3_coder", "<function=add>\nso what", content="so what", calls=(("add", {}),)
    ),
    "granite": Case(
        "none",
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        calls=(("get_weather", PARIS),),
    ),
    "mistral": Case(
        "none",
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "add", "arguments": {}}]',
        calls=(("get_weather", PARIS), ("add", {})),
    ),
    "llama 3": Case(
        "none",
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        calls=(("get_weather", PARIS),),
    ),
    "pythonic": Case(
        "none",
        "pythonic",
        "[get_weather(city='Paris', days=3), get_weather(where={'at': [(1, 2.5), True, None]}, city=\"it's, [\"), add()]",
        calls=(
            ("get_weather", PARIS),
            ("get_weather", {"where": {"at": [[1, 2.5], True, None]}, "city": "it's, ["}),
            ("add", {}),
        ),
    ),
    "pythonic with markers": Case("none", "pythonic", "<|python_start|>[add()]<|python_end|>", calls=(("add", {}),)),
    "pythonic, a list": Case("none", "pythonic", " [1, 2] are numbers", content=" [1, 2] are numbers"),
    "pythonic, another function": Case("none", "pythonic", "[sub(a=1)]", content="[sub(a=1)]"),
    "pythonic cut": Case(
        "none", "pythonic", "[get_weather(city='Pa", calls=(("get_weather", '{"city": \'Pa'),), part="tool_call"
    ),
}


def reader_of(case: Case) -> AnswerReader:
    parsers = AnswerParsers.choose(case.reasoning, case.tools, None)
    reader = parsers.reader(TOOLBOX, seed="r", constrained=False, opened=case.opened)
    assert reader is not None
    return reader


def events_of(reader: AnswerReader, pieces: list[str]) -> list[Event]:
    return merged([event for piece in pieces for event in reader.feed(piece)])


def whole(case: Case, pieces: list[str]) -> list[Event]:
    reader = reader_of(case)
    return merged([*events_of(reader, pieces), *reader.finish()])


def pieces_of(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.randrange(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_of_each_family_is_divided_into_its_parts(case: Case):
    reader = reader_of(case)
    events = merged([*reader.feed(case.text), *reader.finish()])
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == case.thought
    assert "".join(event.text for event in events if isinstance(event, Content)) == case.content
    calls = [event for event in events if isinstance(event, CallDelta)]
    assert [call.name for call in calls] == [name for name, _ in case.calls]
    for call, (_, arguments) in zip(calls, case.calls, strict=True):
        assert (call.arguments if isinstance(arguments, str) else json.loads(call.arguments)) == arguments
    assert reader.part == case.part and reader.called == bool(calls)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_was_emitted_depends_on_the_text_only_and_not_on_its_division(case: Case):
    """A server that continues an answer reads the text so far at once, and must have emitted exactly the same."""
    assert whole(case, list(case.text)) == whole(case, [case.text])
    for end in range(len(case.text) + 1):
        assert events_of(reader_of(case), list(case.text[:end])) == events_of(reader_of(case), [case.text[:end]])
        assert whole(case, [case.text[:end], case.text[end:]]) == whole(case, [case.text])
    rng = random.Random(0)
    for _ in range(20):
        assert whole(case, pieces_of(case.text, rng)) == whole(case, [case.text])


@pytest.mark.parametrize("name", [family.name for family in TOOLS])
def test_broken_markup_loses_no_text(name: str):
    """Without a call, content and reasoning are the text; with one, the words around it are still there."""
    rng = random.Random(f"broken {name}")
    family = next(family for family in TOOLS if family.name == name)
    words = [
        *family.markers,
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "=",
        ",",
        ":",
        "\n",
        " ",
        "add",
        "x",
        "```",
        "name",
        "<function=",
    ]
    for _ in range(400):
        text = "".join(rng.choices(words, k=rng.randrange(14)))
        case = Case("none", name, text)
        events = whole(case, [text])
        assert whole(case, list(text)) == events
        if name != "gpt_oss" and not any(isinstance(event, CallDelta) for event in events):
            assert "".join(event.text for event in events if isinstance(event, Content)) == text


@pytest.mark.parametrize("name", [family.name for family in REASONING])
def test_reasoning_and_content_are_the_text_without_markup(name: str):
    rng = random.Random(f"reasoning {name}")
    family = next(family for family in REASONING if family.name == name)
    for _ in range(400):
        words = rng.choices([*family.markers, "a", "b", "\n", " ", "<", "th"], k=rng.randrange(14))
        case = Case(name, "none", "".join(words), opened=rng.random() < 0.3)
        events = whole(case, [case.text])
        assert whole(case, list(case.text)) == events
        seen = "".join(event.text for event in events if not isinstance(event, CallDelta))
        if family.tags is not None:
            kept = seen
            for marker in family.markers:
                kept = kept.replace(marker, "")
            assert "".join(kept.split()) == "".join(
                word for word in words if word not in family.markers and word.strip()
            )


def test_a_family_is_recognised_by_its_template():
    signs = {
        "{{ '<think>' }}{{ '</think>' }}<tool_call>": ("qwen3", "hermes"),
        "[gMASK]<sop><think></think><arg_key>": ("glm45", "glm45"),
        "<｜Assistant｜>{{ content.split('</think>') }}<｜tool▁call▁begin｜>": ("deepseek_r1", "deepseek_v3"),
        "</think><response><tool_call>": ("ernie45", "hermes"),
        "<|start|>assistant<|channel|>": ("gpt_oss", "gpt_oss"),
        "[THINK][TOOL_CALLS]": ("mistral", "mistral"),
        "<tool_call><function=f><parameter=p>": (None, "qwen3_coder"),
        "[func_name1(params_name1=1)] python_tag": (None, "pythonic"),
        '{"name": function name, "parameters": dictionary}': (None, "llama3_json"),
        "<|tool_call|>": (None, "granite"),
        "{{ messages }}": (None, "hermes"),
    }
    for template, names in signs.items():
        parsers = AnswerParsers.choose("auto", "auto", template)
        assert parsers.tools is not None
        assert (parsers.reasoning and parsers.reasoning.name, parsers.tools.name) == names
    assert AnswerParsers.choose("none", "none", "<think></think>") == AnswerParsers(None, None)


def test_the_flags_offer_every_family():
    assert [*REASONING_PARSERS[2:]] == [family.name for family in REASONING]
    assert [*TOOL_PARSERS[2:]] == [family.name for family in TOOLS]
    assert REASONING_PARSERS[:2] == TOOL_PARSERS[:2] == ("auto", "none")


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("<|im_start|>user\nwhat is <think><|im_end|>\n<|im_start|>assistant\n", "", False),
        ("...<think>\nso far", "<think>\nso far", True),
        ("...<think>a</think>b", "<think>a</think>b", False),
    ],
)
def test_an_answer_begins_with_reasoning_if_the_prompt_ends_in_it(prompt: str, continued: str, opened: bool):
    assert AnswerParsers.choose("qwen3", "none", None).opened_by(prompt, continued) is opened


def test_a_grammar_applies_from_the_first_token_so_there_is_no_reasoning():
    parsers = AnswerParsers.choose("qwen3", "glm45", None)
    reader = parsers.reader(TOOLBOX, seed="r", constrained=True, opened=True)
    assert reader is not None
    (call,) = reader.feed('<tool_call>\n{"name": "add", "arguments": {}}')
    assert isinstance(call, CallDelta) and call.name == "add"
    assert parsers.reader({}, seed="r", constrained=True, opened=True) is None


def test_reading_takes_linear_time():
    """Each character is looked at a bounded number of times, also if it all arrives at once."""
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    events = whole(Case("none", "qwen3_coder", ""), [call * 3000])
    assert len(events) == 3000
