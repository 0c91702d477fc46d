"""Streams whose engine is silent, is lost, or splits tokens inside characters and stop strings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from headgate.engine.client import Chunk
from headgate.errors import EngineDead
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from headgate.text.tokenizer import load_tokenizer
from tests.api.scripted import Client, ScriptedEngines, scripted_app

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("scripted") / "tiny")


def asking(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": True} | fields


def end(reason: FinishReason = "length", cause: Cause = "max_tokens", tokens: int = 1) -> Ended:
    return Ended(0, reason, cause, 10, 4, tokens, Timings(0, 0, 0, 0))


def data(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def saying(text: str, model: Path, sizes: tuple[int, ...] = (1,)) -> Any:
    """An engine that generates `text` repeatedly, in chunks of these numbers of tokens."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = tokenizer.encode(text)

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        at = 0
        while at < len(ids):
            for size in sizes:
                await asyncio.sleep(0)
                tokens = ids[at : at + size]
                at += size
                if tokens:
                    yield Chunk(tokens, [0] * len(tokens))
        yield Chunk(ended=end(tokens=len(ids)))

    return script


def run(model: Path, engines: ScriptedEngines, body: dict[str, Any], path: str = CHAT, **settings: Any) -> Client:
    async def main() -> Client:
        client = Client(scripted_app(model, engines, **settings), path, body)
        await asyncio.wait_for(client.call(), 60)
        return client

    return asyncio.run(main())


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (7,), (1, 4, 2)])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_deltas_are_complete_characters_and_end_before_the_stop_string(
    model: Path, path: str, sizes: tuple[int, ...]
):
    text = "Grüße 😀 und 漢字, dann ENDE und mehr"
    body: dict[str, Any] = {"stream": True, "stop": ["ENDE"]}
    body |= {CHAT: asking(), "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}[path]
    engines = ScriptedEngines(saying(text, model, sizes))
    deltas = []
    for event in data(run(model, engines, body, path).body):
        match event:
            case {"choices": [{"delta": {"content": delta}}]} | {"choices": [{"text": delta}]}:
                deltas.append(delta)
            case {"type": "response.output_text.delta", "delta": delta}:
                deltas.append(delta)
    assert "".join(deltas) == "Grüße 😀 und 漢字, dann "
    assert not any("\ufffd" in delta for delta in deltas)
    assert engines.streams[0].ends == ["stop_string"]
    assert engines.open == 0


def test_a_stream_has_keep_alive_comments_while_the_engine_is_silent(model: Path):
    """Guarantee 51."""

    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        while client.body.count(b": keep-alive\n\n") < 3:
            await asyncio.sleep(0.01)
        yield Chunk([70], [0], ended=end())

    client = Client(scripted_app(model, ScriptedEngines(script), keep_alive_s=0.03), CHAT, asking())
    asyncio.run(asyncio.wait_for(client.call(), 60))
    assert client.status == 200
    assert client.body.endswith(b"data: [DONE]\n\n")


def lost_after(tokens: list[int]) -> Any:
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if tokens:
            yield Chunk(tokens, [0] * len(tokens))
        raise EngineDead("it was killed")

    return script


def test_a_stream_whose_engine_is_lost_ends_with_an_error_event(model: Path):
    client = run(model, ScriptedEngines(lost_after([70])), asking())
    assert client.status == 200
    assert data(client.body)[-1]["error"]["code"] == "engine_lost"
    assert b"[DONE]" not in client.body


def test_a_responses_stream_whose_engine_is_lost_ends_with_an_error_event(model: Path):
    client = run(model, ScriptedEngines(lost_after([70])), {"input": "a", "stream": True}, "/v1/responses")
    last = data(client.body)[-1]
    assert (last["type"], last["code"]) == ("error", "engine_lost")


@pytest.mark.parametrize(("stream", "tokens"), [(False, [70]), (True, [])])
def test_an_engine_lost_before_the_first_byte_is_a_503(model: Path, stream: bool, tokens: list[int]):
    client = run(model, ScriptedEngines(lost_after(tokens)), asking(stream=stream))
    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_closes_its_streams(model: Path, stream: bool):
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk([70], [0])
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        engines = ScriptedEngines(script)
        client = Client(scripted_app(model, engines), CHAT, asking(n=3, stream=stream))
        calling = asyncio.create_task(client.call())
        while engines.open < 3:
            await asyncio.sleep(0)
        client.gone.set()
        await asyncio.wait_for(calling, 60)
        assert engines.open == 0
        assert {stream.cause for stream in engines.streams} == {"client_disconnect"}

    asyncio.run(main())


def test_the_token_that_ended_the_answer_is_not_text_but_counts(model: Path):
    async def script(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk([64, 65, 66], [0, 0, 0], ended=end("stop", "stop_token", 3))

    client = run(model, ScriptedEngines(script), asking(stream=False, return_token_ids=True))
    choice = json.loads(client.body)["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert choice["completion_token_ids"] == [64, 65, 66]
    assert (choice["finish_reason"], choice["cause"]) == ("stop", "stop_token")


def test_tokens_that_accumulated_are_sent_as_one_event(model: Path):
    engines = ScriptedEngines(saying("a" * 100, model, (50,)))
    events = data(run(model, engines, asking()).body)
    assert len(events) == 3  # two pieces and the end


def test_a_call_in_the_text_is_returned_as_a_tool_call(model: Path):
    text = 'Let me see. <tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def ended(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        script: AsyncGenerator[Chunk, None] = saying(text, model)(request)
        return stopped(script)

    async def stopped(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        async for chunk in chunks:
            yield chunk if chunk.ended is None else Chunk(ended=end("stop", "eos"))

    whole = json.loads(run(model, ScriptedEngines(ended), asking(stream=False, tools=[tool])).body)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"].strip() == "Let me see."
    function = whole["message"]["tool_calls"][0]["function"]
    assert function["name"] == "look" and json.loads(function["arguments"]) == {"at": "sky"}
    events = data(run(model, ScriptedEngines(ended), asking(tools=[tool])).body)
    pieces = [piece for event in events for piece in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == function["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
