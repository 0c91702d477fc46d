"""OpenAI's official client library."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.api.live import MODEL, LiveServer

MESSAGES = [{"role": "user", "content": "Say something."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_whole_and_streamed(client: openai.OpenAI):
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20, seed=1)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=20,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_completions_whole_and_streamed(client: openai.OpenAI):
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=20, seed=1, logprobs=1)
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=20, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.choices[0].logprobs.text_offset[0] == 0


def test_responses_whole_and_streamed(client: openai.OpenAI):
    asked = {"model": MODEL, "input": "Say something.", "max_output_tokens": 20}
    whole = client.responses.create(**asked, extra_body={"seed": 1})
    events = list(client.responses.create(**asked, stream=True, extra_body={"seed": 1}))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_a_structured_response_can_be_awaited(client: openai.OpenAI):
    format = {"type": "json_schema", "name": "look", "schema": TOOL["function"]["parameters"], "strict": True}
    with client.responses.stream(model=MODEL, input="Look.", text={"format": format}) as stream:
        answer = stream.get_final_response()
    assert json.loads(answer.output_text)["at"] in ("sky", "sea")


def test_a_function_call_in_a_response(client: openai.OpenAI):
    tool = {"type": "function"} | TOOL["function"]
    asked = {"model": MODEL, "input": "Look.", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False, extra_body={"seed": 1}) as stream:
        streamed = stream.get_final_response()
    whole = client.responses.create(**asked, parallel_tool_calls=False, extra_body={"seed": 1})
    assert streamed.output[0].type == "function_call" and streamed.output[0].name == "look"
    assert json.loads(whole.output[0].arguments) == json.loads(streamed.output[0].arguments)


def test_structured_output(client: openai.OpenAI):
    schema = TOOL["function"]["parameters"]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "look", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content)["at"] in ("sky", "sea")


def test_tool_calls_whole_and_streamed(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    choice = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0].function
    assert call.name == "look" and json.loads(call.arguments)["at"] in ("sky", "sea")
    chunks = list(client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.arguments
    assert pieces[0].function.name == "look" and pieces[0].id


def test_errors_have_their_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_a_stream_that_was_cut_raises_for_strict_clients(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        max_tokens=450,
        extra_headers={"X-OpenAI-Strict": "true"},
        extra_body={"deadline_ms": 20, "ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="cut short"):
        list(stream)


@pytest.mark.parametrize("header", [{}, {"X-Headgate-Journal": "1700000000"}])
def test_the_client_ignores_a_journal_between_the_events(client: openai.OpenAI, header: dict[str, str]):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, seed=1, n=2, stream=True, extra_headers=header
    )
    said = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, seed=1, n=2)
    assert said == {choice.index: choice.message.content for choice in whole.choices}
