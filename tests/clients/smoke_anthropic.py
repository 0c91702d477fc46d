"""anthropic against a running server: `smoke_anthropic.py URL`."""

from __future__ import annotations

import sys

import anthropic

ASK = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}]}
SEED = {"extra_body": {"seed": 1}}  # an extension: streams and whole answers are then equal
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="tenant-key", max_retries=0)
    same_whether_streamed(client)
    calls_a_tool(client)
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"])
    assert counted.input_tokens > 0
    refuses(client)
    print("anthropic: whole, streamed, called a tool, counted and refused as they should be")


def same_whether_streamed(client: anthropic.Anthropic) -> None:
    ask = ASK | SEED | {"max_tokens": 12, "system": [{"type": "text", "text": "Be brief."}]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert (whole.type, whole.stop_reason) == ("message", streamed.stop_reason)
    assert "".join(block.text for block in streamed.content) == "".join(block.text for block in whole.content)
    assert 0 < streamed.usage.output_tokens == whole.usage.output_tokens <= 12
    assert streamed.usage.cache_read_input_tokens + streamed.usage.input_tokens > 0


def calls_a_tool(client: anthropic.Anthropic) -> None:
    ask = ASK | {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}} | SEED
    with client.messages.stream(**ask) as stream:
        answer = stream.get_final_message()
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert call.name == "weather" and call.input["city"] in ("Paris", "Rome"), call
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**ASK | {"max_tokens": 4, "messages": ASK["messages"] + turns, "tools": [WEATHER]})
    assert after.role == "assistant"


def refuses(client: anthropic.Anthropic) -> None:
    refusals = []
    for wrong in ({"model": "other"}, {"max_tokens": 10**4}):
        try:
            client.messages.create(**ASK | wrong)
        except anthropic.APIStatusError as refusal:
            refusals.append(refusal)
    assert [type(each) for each in refusals] == [anthropic.NotFoundError, anthropic.BadRequestError]
    assert [each.body["error"]["type"] for each in refusals] == ["not_found_error", "invalid_request_error"]


main(sys.argv[1])
