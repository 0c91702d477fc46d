"""openai against a running server: `smoke_openai.py URL`."""

from __future__ import annotations

import sys
from typing import Literal

import openai
from constrained import BIAS, BRIEF
from pydantic import BaseModel

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 1}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rains: bool


TOOL = openai.pydantic_function_tool(Weather, name="weather")


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="tenant-key", max_retries=0)
    ask = ASK | {"max_completion_tokens": 12}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    parsed = client.chat.completions.parse(**ASK, response_format=Weather, logit_bias=BIAS)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    called = client.chat.completions.parse(**ASK, tools=[TOOL], tool_choice="required", logit_bias=BIAS)
    (call,) = called.choices[0].message.tool_calls[:1]
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.responses.stream(model="tiny", input="Hello", extra_body=BRIEF) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert stream.get_final_response().output_text == "".join(deltas)
    print("openai: whole, streamed, parsed, called a tool and responded as they should")


main(sys.argv[1])
