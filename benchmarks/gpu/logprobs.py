"""Measures what log-probabilities cost on a GPU: `python -m benchmarks.gpu.logprobs [--shape 0.6b] [--top-p 0.9]`.

Decodes batches of 1, 8, 64 and 256 with the whole engine (scheduler, executor, runner) in this process and random
weights. Requests differ only in their log-probabilities: none, and `logprobs` 0 in each mode. The kinds alternate within
every round, so that drift of the device affects all of them. Prints one JSON line per batch with the medians in
milliseconds per step, and the cost of each mode in percent of the decode speed without log-probabilities: the median
over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.checkpoint import SHAPES
from benchmarks.gpu.bench import DECODE_BATCHES, PROMPT, Clients, open_random, params, random_prompts
from msgspec import structs

import headgate.device.tensor_parallel.parallelism as parallelism
from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.engine.build import build_engine
from headgate.testing.tiny import tiny_config

NONE = "none"
KINDS: dict[str, dict[str, Any]] = {
    NONE: {},
    "raw": {"logprobs": 0, "logprobs_mode": "raw"},
    "scaled": {"logprobs": 0, "logprobs_mode": "scaled"},
    "processed": {"logprobs": 0, "logprobs_mode": "processed"},
}


def decode_ms(clients: Clients, asked: list[SamplingParams], rng: random.Random) -> float:
    """Milliseconds per step, from the time when all have their first token until all have their last."""
    clients.run(random_prompts(rng, [PROMPT] * len(asked)), asked)
    steps = (asked[0].max_tokens or 0) - 1
    return (max(clients.ended_s.values()) - max(clients.first_s.values())) / steps * 1000


def measure(clients: Clients, rounds: int, tokens: int, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    for batch in DECODE_BATCHES:
        plain = [structs.replace(params(tokens, i), **more) for i in range(batch)]
        asked = {kind: [structs.replace(each, **fields) for each in plain] for kind, fields in KINDS.items()}
        for each in asked.values():
            decode_ms(clients, each, rng)  # warm-up: kernels are compiled at the first step of their kind
        runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round in range(rounds):
            # Every kind is first, second and so on equally often.
            order = [*KINDS][round % len(KINDS) :] + [*KINDS][: round % len(KINDS)]
            for kind in order:
                runs[kind].append(decode_ms(clients, asked[kind], rng))
        yield {
            "batch": batch,
            "ms": {kind: round_to(median(each)) for kind, each in runs.items()},
            "cost_percent": {
                kind: round_to(100 * (median(a / b for a, b in zip(each, runs[NONE], strict=True)) - 1), 2)
                for kind, each in runs.items()
                if kind != NONE
            },
            "runs": {kind: [round_to(each) for each in every] for kind, every in runs.items()},
        }


def round_to(value: float, digits: int = 4) -> float:
    return round(value, digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=["0.6b", "8b"], default="0.6b")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="a folder for the results as one JSON file")
    arguments = parser.parse_args()
    parallelism.open_source = open_random  # type: ignore[assignment]
    clients, results = Clients(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config("qwen3", "bfloat16") | SHAPES[f"qwen3-{arguments.shape}"]
        Path(folder, "config.json").write_text(json.dumps(config))
        settings = EngineConfig(device="cuda", max_context=2304, memory_fraction=0.9, kv_listen=None)
        clients.engine = build_engine(Path(folder), settings, clients.hear)
    about = {"shape": arguments.shape, "top_p": arguments.top_p}
    for result in measure(clients, arguments.rounds, arguments.tokens, {"top_p": arguments.top_p}):
        results.append(about | result)
        print(json.dumps(results[-1]), flush=True)
    clients.engine.close()
    if arguments.out:
        device = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
        path = arguments.out / f"{device}-{time.strftime('%Y-%m-%d')}-logprobs-{arguments.shape}.json"
        about = {"device": device, "torch": torch.__version__}
        path.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
