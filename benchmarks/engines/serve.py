"""What all engine adapters share: answer questions on standard input, one JSON line each, with marked lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens for each -> tokens made


def serve(info: dict[str, Any], generate: Generate) -> None:
    say(info)
    for line in sys.stdin:
        question = json.loads(line)
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        tokens = generate(question["prompts"], question["max_tokens"])
        seconds = time.perf_counter() - start
        say({"seconds": seconds, "cpu_seconds": sum(os.times()[:4]) - cpu, "tokens": tokens})


def say(message: dict[str, Any]) -> None:
    print("@@" + json.dumps(message), flush=True)
