"""Compares engines on a GGUF file: weights kept in blocks, converted at load, and llama.cpp. Prints JSON.

    python benchmarks/blocks.py MODEL.gguf --peer llama_cpp=PYTHON [--rounds 5] [--threads 1]

Every engine runs in a process of its own with the same number of threads and takes its turn in each round; figures are
medians. With one thread, the CPU time of an engine is hardly affected by other processes on a shared machine, so it is
reported beside the wall time. The time of a step is the difference between a long and a short answer.

Peak memory is that of a process that has answered one short request. llama.cpp clears its whole KV cache at start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.offline import Engine, Work, cpu_name, start

PROMPT, SHORT, LONG = 32, 4, 36
BATCHES = (1, 8)
CLOCKS = {"cpu": "cpu_seconds", "wall": "seconds"}


def measure(engines: list[Engine], rounds: int) -> list[dict[str, Any]]:
    taken = []
    for number in range(rounds):
        for engine in engines:
            rng = random.Random(number)
            entry: dict[str, Any] = {"engine": engine.name}
            for batch in BATCHES:
                prompts = [tokens(rng, PROMPT) for _ in range(batch)]
                short, long = (engine.run(Work(prompts, count)) for count in (SHORT, LONG))
                entry[f"step of {batch}, ms"] = {
                    name: 1e3 * (long[key] - short[key]) / (LONG - SHORT) for name, key in CLOCKS.items()
                }
            first = engine.run(Work([tokens(rng, 1024)], 1))
            entry["first token after 1024, s"] = {name: first[key] for name, key in CLOCKS.items()}
            mixed = engine.run(Work([tokens(rng, rng.randint(128, 512)) for _ in range(32)], 128))
            entry["32 mixed, tokens/s"] = {name: mixed["tokens"] / mixed[key] for name, key in CLOCKS.items()}
            taken.append(entry)
            print(f"round {number}: {entry}", file=sys.stderr)
    return taken


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


def medians(taken: list[dict[str, Any]]) -> dict[str, Any]:
    engines = dict.fromkeys(entry["engine"] for entry in taken)
    return {
        question: {
            name: {
                clock: statistics.median(entry[question][clock] for entry in taken if entry["engine"] == name)
                for clock in CLOCKS
            }
            for name in engines
        }
        for question in taken[0]
        if question != "engine"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    kinds = [("headgate", sys.executable, "headgate", "auto"), ("headgate", sys.executable, "converted", "bfloat16")]
    kinds += [(*peer.split("=", 1), peer.split("=", 1)[0], "auto") for peer in options.peer]
    engines = []
    for adapter, python, name, dtype in kinds:
        engine = start(adapter, python, options.model, options.threads, dtype)
        engine.name = name
        engines.append(engine)
    memory = {engine.name: engine.run(Work([list(range(1000, 1016))], 8))["peak_rss_mb"] for engine in engines}
    taken = measure(engines, options.rounds)
    result = {
        "medians": medians(taken),
        "peak_rss_mb": memory,
        "engines": {engine.name: engine.info for engine in engines},
        "model": options.model.name,
        "cpu": cpu_name(),
        "threads": options.threads,
        "cores": os.cpu_count(),
        "rounds": taken,
    }
    print(json.dumps(result, indent=2))
    for engine in engines:
        os.killpg(engine.process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
