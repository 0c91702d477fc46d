"""Datasets of prompts, and conversations that continue with the server's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headgate import cli
from headgate.bench.dataset import (
    MultiTurn,
    RandomPrompts,
    Shape,
    SharedPrefix,
    Trace,
    conversations,
    parse_dataset,
)
from headgate.bench.load import AsRecorded, ClosedLoop, Load, measure
from headgate.errors import RequestError
from tests.bench.test_bench import Scripted, listening

SHAPE = Shape(requests=10, prompt_words=5, max_tokens=3, seed=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def trace(folder: Path, *lines: dict) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("random", RandomPrompts()),
        ("shared-prefix", SharedPrefix()),
        ("shared-prefix:3", SharedPrefix(3)),
        ("shared-prefix:3:100", SharedPrefix(3, 100)),
        ("multi-turn:6", MultiTurn(6)),
        ("trace:a/b.jsonl", Trace(Path("a/b.jsonl"))),
    ],
)
def test_a_dataset_is_one_word_on_the_command_line(text, dataset):
    assert parse_dataset(text) == dataset


@pytest.mark.parametrize(
    "text", ["", "other", "random:3", "shared-prefix:0", "shared-prefix:1:2:3", "multi-turn:x", "trace"]
)
def test_an_invalid_dataset_is_refused_in_one_sentence(text, capsys):
    assert cli.main(["bench", "serve", "http://127.0.0.1:9", "--dataset", text], {}) == cli.WRONG_USE
    errors = capsys.readouterr().err
    assert "trace:FILE" in errors and errors.count("\n") == 1


def test_prompts_of_a_group_share_their_prefix_and_nothing_else():
    prompts = [talk.turns[0].prompt.split() for talk in conversations(SharedPrefix(groups=2, words=50), SHAPE)]
    assert len(prompts) == 10 and all(len(words) == 55 for words in prompts)
    assert len({tuple(words[:50]) for words in prompts}) == 2
    assert prompts[0][:50] == prompts[2][:50] != prompts[1][:50]
    assert len({tuple(words[50:]) for words in prompts}) == 10


def test_conversations_have_as_many_turns_as_requested():
    assert [len(talk.turns) for talk in conversations(MultiTurn(4), SHAPE)] == [4, 4, 2]


def test_a_trace_defines_arrival_times_prompts_and_lengths(tmp_path):
    path = trace(
        tmp_path,
        {"timestamp": 101.5, "prompt_length": 7, "output_length": 2},
        {"timestamp": 100, "prompt": "hello", "output_length": 9},
    )
    first, second = conversations(Trace(path), SHAPE)
    assert (first.at_s, first.turns[0].prompt, first.turns[0].max_tokens) == (0, "hello", 9)
    assert (second.at_s, len(second.turns[0].prompt.split()), second.turns[0].max_tokens) == (1.5, 7, 2)


@pytest.mark.parametrize(
    ("lines", "about"),
    [
        ([], "is empty"),
        ([{"timestamp": 1, "output_length": 1}], "trace.jsonl:1: give a prompt"),
        ([{"timestamp": 1, "prompt": "x", "output_length": 0}], "output_length must be at least 1"),
        ([{"timestamp": 1, "prompt": "x", "output_length": 1}, {"prompt": "x"}], "trace.jsonl:2: Object missing"),
    ],
)
def test_an_invalid_line_of_a_trace_is_named(lines, about, tmp_path):
    with pytest.raises(RequestError, match=about):
        conversations(Trace(trace(tmp_path, *lines)), SHAPE)


def test_only_a_trace_is_sent_as_recorded(tmp_path):
    with pytest.raises(RequestError, match="only a trace"):
        Load(url="x", pace=AsRecorded())
    with pytest.raises(RequestError, match="cannot be read"):
        conversations(Trace(tmp_path / "none"), SHAPE)


@pytest.mark.anyio
async def test_a_conversation_continues_with_the_answers():
    script = Scripted(2, 3, 1)
    async with listening(script) as url:
        await measure(Load(url=url, pace=ClosedLoop(1), requests=3, dataset=MultiTurn(3)))
    last = script.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert [last[1]["content"], last[3]["content"]] == ["xx", "xxx"]
    assert last[:1] == script.bodies[0]["messages"]


@pytest.mark.anyio
async def test_a_completion_continues_after_its_answer():
    script = Scripted(2, 3)
    async with listening(script) as url:
        await measure(Load(url=url, api="completions", pace=ClosedLoop(1), requests=2, dataset=MultiTurn(2)))
    first, second = (body["prompt"] for body in script.bodies)
    assert second.startswith(first + "xx\n")


@pytest.mark.anyio
async def test_a_conversation_ends_when_an_answer_fails():
    script = Scripted(429, 2, 2)
    async with listening(script) as url:
        result = await measure(Load(url=url, pace=ClosedLoop(1), requests=4, dataset=MultiTurn(2)))
    assert len(result.samples) == 3 and len(result.completed) == 2


@pytest.mark.anyio
async def test_a_trace_is_sent_at_its_own_pace(tmp_path):
    path = trace(
        tmp_path,
        {"timestamp": 5.0, "prompt": "a", "output_length": 2},
        {"timestamp": 5.2, "prompt": "b", "output_length": 4},
    )
    script = Scripted(2, 4)
    async with listening(script) as url:
        result = await measure(Load(url=url, pace=AsRecorded(), requests=9, dataset=Trace(path)))
    assert [body["max_tokens"] for body in script.bodies] == [2, 4]
    first, second = sorted(sample.start_s for sample in result.samples)  # since the start of the run
    assert first >= 0 and 0.19 < second < 60
