"""openai-agents against a running server: `smoke_agents.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from constrained import BIAS, BRIEF
from openai import AsyncOpenAI
from pydantic import BaseModel

asked: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return "It rains."


class Weather(BaseModel):
    rains: bool


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="tenant-key", max_retries=0)
    chat = OpenAIChatCompletionsModel("tiny", client)
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_args={"logit_bias": BIAS})
    agent = Agent(
        "forecaster", model=chat, tools=[weather], model_settings=forced, tool_use_behavior="stop_on_first_tool"
    )
    result = await Runner.run(agent, "Does it rain?")
    assert result.final_output == "It rains." and asked and asked[0] in ("Paris", "Rome")

    strict = ModelSettings(extra_args={"logit_bias": BIAS})
    structured = await Runner.run(
        Agent("judge", model=chat, output_type=Weather, model_settings=strict), "Does it rain?"
    )
    assert isinstance(structured.final_output, Weather)

    brief = ModelSettings(extra_body=BRIEF)
    streamed = Runner.run_streamed(
        Agent("speaker", model=OpenAIResponsesModel("tiny", client), model_settings=brief), "Hello"
    )
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds and isinstance(streamed.final_output, str)
    print("openai-agents: called a tool, answered in a structure and streamed")


asyncio.run(main(sys.argv[1]))
