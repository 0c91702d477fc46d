from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.live import LiveServer

PATH = "/v1/responses"


def asking(input: Any = "Tell me.", **fields: Any) -> dict[str, Any]:
    return {"input": input, "max_output_tokens": 30, "seed": 5} | fields


def answer(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def test_a_response_equals_the_answer_of_the_same_chat(server: LiveServer):
    chat = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me."}]}
    same = server.post("/v1/chat/completions", chat | {"max_tokens": 30, "seed": 5}).json()
    whole = answer(server, asking(instructions="Be kind."))
    assert whole["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert whole["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == same["usage"]["completion_tokens"]


def test_events_are_in_order_and_add_up_to_the_complete_answer(server: LiveServer):
    body = asking(ignore_eos=True, return_token_ids=True)
    whole = answer(server, body)
    events = [json.loads(event) for event in server.events(PATH, body)]
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event["delta"] for event in events[4:-4])
    final = events[-1]["response"]
    assert text == events[-4]["text"] == final["output"][0]["content"][0]["text"]
    assert text == whole["output"][0]["content"][0]["text"]
    assert final["completion_token_ids"] == whole["completion_token_ids"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"} and final["cause"] == "max_tokens"


def test_a_conversation_with_tool_calls_is_converted_to_messages(server: LiveServer):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "20"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "20 degrees."}]},
        {"role": "developer", "content": "Short."},
    ]
    assert answer(server, asking(items))["status"] in ("completed", "incomplete")


def test_logprobs_are_returned_when_included(server: LiveServer):
    body = asking(include=["message.output_text.logprobs"], top_logprobs=2, ignore_eos=True)
    logprobs = answer(server, body)["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 30 and all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


def test_values_that_change_nothing_are_accepted(server: LiveServer):
    fields = {"background": False, "store": True, "truncation": "disabled", "prompt": None, "max_tool_calls": 3}
    answer(server, asking(**fields, include=["web_search_call.action.sources"]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, "include[1]"),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_unsupported_values_are_refused_with_the_name_of_the_field(server: LiveServer, fields: Any, param: str):
    response = server.post(PATH, asking(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
