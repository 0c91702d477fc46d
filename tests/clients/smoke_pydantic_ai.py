"""pydantic-ai against a running server, with the APIs of OpenAI and Anthropic: `smoke_pydantic_ai.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from constrained import BIAS
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rains: bool


async def main(url: str) -> None:
    openai = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="tenant-key"))
    anthropic = AnthropicModel("tiny", provider=AnthropicProvider(base_url=url, api_key="tenant-key"))
    for model, settings in ((openai, {"logit_bias": BIAS}), (anthropic, {"max_tokens": 300})):
        # The output is a forced call of a tool. A call that is cut is asked for again.
        result = await Agent(model, output_type=Weather, retries=5).run("Does it rain?", model_settings=settings)
        assert isinstance(result.output, Weather) and result.usage.output_tokens > 0
        async with Agent(model).run_stream("Hello", model_settings={"max_tokens": 12}) as stream:
            text = "".join([delta async for delta in stream.stream_text(delta=True)])
        assert text == await stream.get_output()
    print("pydantic-ai: structured and streamed, with both APIs")


asyncio.run(main(sys.argv[1]))
