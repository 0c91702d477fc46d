"""Reasoning and tool calls in the answers of chat and responses."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate.engine.client import Chunk
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import CHAT_TEMPLATE, tiny_model
from headgate.text.parsers.reader import AnswerParsers
from headgate.text.template import load_template
from headgate.text.tokenizer import load_tokenizer
from tests.api.scripted import Client, ScriptedEngines, scripted_app

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKED = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nFirst this.\n</think>\n\nThen that."
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("parts") / "tiny")


def ask(
    model: Path,
    text: str,
    body: dict[str, Any],
    path: str = CHAT,
    *,
    end: tuple[FinishReason, Cause] = ("stop", "eos"),
    reasoning: str = "qwen3",
    tools: str = "hermes",
    prompts: list[str] | None = None,
) -> Client:
    """The answer of a model that generates `text`, one token at a time."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special=False)
    ids += [256] if end[1] == "eos" else []

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if prompts is not None:
            prompts.append(tokenizer.decode(request.prompt, skip_special=False))
        for token in ids[len(request.generated) : -1]:
            yield Chunk([token], [0])
        yield Chunk(ids[-1:], [0], ended=Ended(0, *end, len(request.prompt), 0, len(ids), Timings(0, 0, 0, 0)))

    async def main() -> Client:
        parsers = AnswerParsers.choose(reasoning, tools, None)
        client = Client(scripted_app(model, ScriptedEngines(script), parsers=parsers), path, body)
        await asyncio.wait_for(client.call(), 60)
        return client

    client = asyncio.run(main())
    assert client.status == 200, client.body
    return client


def choice(client: Client) -> dict[str, Any]:
    (only,) = json.loads(client.body)["choices"]
    return only


def events(client: Client) -> list[dict[str, Any]]:
    lines = client.body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_reasoning_is_separate_under_both_of_its_names(model: Path):
    message = choice(ask(model, THOUGHT, ASKED))["message"]
    assert message["reasoning_content"] == message["reasoning"] == "First this."
    assert message["content"] == "Then that."


def test_the_deltas_of_a_stream_add_up_to_the_whole_answer(model: Path):
    chunks = [event["choices"][0] for event in events(ask(model, THOUGHT, ASKED | {"stream": True}))]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "First this."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "First this."
    assert "".join(delta.get("content", "") for delta in deltas) == "Then that."
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert all(delta for delta in deltas[:-1]) and chunks[-1]["finish_reason"] == "stop"


def test_reasoning_stays_in_the_text_without_a_parser(model: Path):
    message = choice(ask(model, THOUGHT, ASKED, reasoning="none"))["message"]
    assert message["content"] == THOUGHT and "reasoning" not in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "end", "cut"),
    [
        ("<think>\nFirst", ("abort", "api_abort"), "reasoning"),
        ("<think>\nFirst", ("length", "max_tokens"), "reasoning"),
        (CALL[:50], ("abort", "deadline"), "tool_call"),
        (CALL, ("length", "max_tokens"), None),
        (THOUGHT, ("abort", "api_abort"), None),
        (CALL[:50], ("stop", "eos"), None),
    ],
)
def test_an_end_says_what_it_cut(
    model: Path, text: str, end: tuple[FinishReason, Cause], cut: str | None, stream: bool
):
    client = ask(model, text, ASKED | {"tools": [TOOL], "stream": stream}, end=end)
    last = events(client)[-1]["choices"][0] if stream else choice(client)
    assert last.get("cut") == cut
    assert last["finish_reason"] == (end[0] if end[0] != "stop" else "tool_calls")


def test_calls_follow_reasoning(model: Path):
    answer = choice(ask(model, f"<think>\nLook up.\n</think>\n\n{CALL}", ASKED | {"tools": [TOOL]}))
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "the sky"}
    assert answer["message"]["reasoning"] == "Look up." and answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"


def test_a_prompt_that_opens_reasoning_begins_the_answer_with_it(model: Path, tmp_path: Path):
    thinking = tiny_model(tmp_path / "thinking")
    opening = "{% if add_generation_prompt and enable_thinking is not defined %}<think>\n{% endif %}"
    _write_template(thinking, CHAT_TEMPLATE + opening)
    prompts: list[str] = []
    message = choice(ask(thinking, "Sure.\n</think>\n\nYes.", ASKED, prompts=prompts))["message"]
    assert prompts[0].endswith("<think>\n")
    assert (message["reasoning"], message["content"]) == ("Sure.", "Yes.")
    off = ASKED | {"chat_template_kwargs": {"enable_thinking": False}}
    message = choice(ask(thinking, "Yes.", off))["message"]
    assert message["content"] == "Yes." and "reasoning" not in message


def test_an_answer_that_a_grammar_constrains_has_no_reasoning(model: Path):
    body = ASKED | {"response_format": {"type": "json_object"}}
    assert choice(ask(model, '{"a": 1}', body))["message"]["content"] == '{"a": 1}'


def test_an_answer_resumed_from_ids_goes_on_where_the_client_was(model: Path):
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = tokenizer.encode(THOUGHT[:14], add_special=False)
    body = ASKED | {"generated_token_ids": ids, "delivered_chars": 14}
    message = choice(ask(model, THOUGHT, body))["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT[14:19], "Then that.")


def test_reasoning_is_an_item_of_a_response(model: Path):
    body = {"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]}  # type: ignore[dict-item]
    text = f"{THOUGHT} {CALL}"
    whole = json.loads(ask(model, text, body, RESPONSES).body)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "First this."}]
    streamed = events(ask(model, text, body | {"stream": True}, RESPONSES))
    kinds = [event["type"] for event in streamed]
    thought = "".join(event["delta"] for event in streamed if event["type"] == "response.reasoning_text.delta")
    assert thought == "First this." and kinds.count("response.reasoning_text.done") == 1
    said = [
        [(item["type"], item.get("content")) for item in items]
        for items in (whole["output"], streamed[-1]["response"]["output"])
    ]
    assert said[0] == said[1]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))


def test_a_response_cut_in_reasoning_has_an_incomplete_item(model: Path):
    whole = json.loads(ask(model, "<think>\nFirst", {"input": "hi"}, RESPONSES, end=("abort", "api_abort")).body)
    (item,) = whole["output"]
    assert (item["type"], item["status"], whole["status"]) == ("reasoning", "incomplete", "incomplete")


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASKED), (RESPONSES, {"input": "hi"})])
def test_a_template_that_ignores_tools_is_reported(
    model: Path, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    tool = TOOL if path == CHAT else {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with caplog.at_level(logging.WARNING):
        client = ask(model, "Hm.", body | {"tools": [tool]}, path)
    assert client.headers["x-headgate-warning"] == "the chat template of this model ignores tools"
    assert "ignores tools" in caplog.text
    assert "x-headgate-warning" not in ask(model, "Hm.", body, path).headers
    assert (
        "x-headgate-warning" not in ask(model, "Hm.", body | {"tools": [tool], "tool_choice": "none"}, path).headers
    )


def test_a_template_that_shows_tools_is_not_reported(tmp_path: Path):
    shown = tiny_model(tmp_path / "shown")
    _write_template(shown, "{% if tools %}{{ tools }}{% endif %}" + CHAT_TEMPLATE)
    assert "x-headgate-warning" not in ask(shown, "Hm.", ASKED | {"tools": [TOOL]}).headers


def test_reasoning_that_a_client_sends_back_reaches_the_template(tmp_path: Path):
    thinking = tiny_model(tmp_path / "back")
    _write_template(thinking, "{% for message in messages %}[{{ message.reasoning_content }}]{% endfor %}")
    template = load_template(thinking)
    assert template is not None
    for name in ("reasoning", "reasoning_content"):
        prompts: list[str] = []
        messages = [{"role": "assistant", "content": "a", name: "so"}, *ASKED["messages"]]
        ask(thinking, "Hm.", {"messages": messages}, prompts=prompts)
        assert prompts[0].startswith("[so]")


def _write_template(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
