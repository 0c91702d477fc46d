"""Common code of the engine adapters: JSON requests on standard input get marked JSON lines on standard output."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens for each -> tokens generated


def serve(info: dict[str, Any], generate: Generate, seen: Callable[[], dict[str, Any]] = dict) -> None:
    """`seen` returns what else was observed since the last answer."""
    write(info)
    for line in sys.stdin:
        question = json.loads(line)
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        tokens = generate(question["prompts"], question["max_tokens"])
        seconds = time.perf_counter() - start
        used = {"cpu_seconds": sum(os.times()[:4]) - cpu, "peak_rss_mb": peak_rss_mb()}
        write({"seconds": seconds, "tokens": tokens} | used | seen())


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(message: dict[str, Any]) -> None:
    print("@@" + json.dumps(message), flush=True)
