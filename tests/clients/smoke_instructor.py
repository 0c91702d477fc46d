"""instructor against a running server, with tools and with JSON schemas: `smoke_instructor.py URL`."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
from constrained import BIAS
from openai import OpenAI
from pydantic import BaseModel

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "logit_bias": BIAS}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rains: bool


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="tenant-key", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = instructor.from_openai(client, mode=mode).create(**ASK, response_model=Weather, max_retries=0)
        assert isinstance(answer, Weather)
    parts = list(instructor.from_openai(client).create_partial(**ASK, response_model=Weather, max_retries=0))
    assert parts[-1].city in ("Paris", "Rome")
    print("instructor: structured with tools and schemas, and streamed")


main(sys.argv[1])
