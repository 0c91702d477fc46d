"""pydantic-ai against a running server: `smoke_pydantic_ai.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from constrained import BIAS
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rains: bool


async def main(url: str) -> None:
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="tenant-key"))
    # The output is a forced call of a tool.
    result = await Agent(model, output_type=Weather).run("Does it rain?", model_settings={"logit_bias": BIAS})
    assert isinstance(result.output, Weather) and result.usage.output_tokens > 0
    async with Agent(model).run_stream("Hello", model_settings={"max_tokens": 12}) as stream:
        text = "".join([delta async for delta in stream.stream_text(delta=True)])
    assert text == await stream.get_output()
    print("pydantic-ai: structured and streamed")


asyncio.run(main(sys.argv[1]))
