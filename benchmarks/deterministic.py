"""Measures the cost of `deterministic=True`: the same 16 requests with and without it, alternating, on every backend.

python benchmarks/deterministic.py MODEL [--rounds 3] [--max-tokens 16]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from headgate import LLM, SamplingParams
from headgate.layers.choice import available_backends


def tokens_per_second(llm: LLM, seed: int, max_tokens: int) -> float:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(16, 64))] for _ in range(16)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), progress=False)
    return len(prompts) * max_tokens / (time.perf_counter() - start)


def compare(model: str, backend: str, rounds: int, max_tokens: int) -> dict[str, float]:
    options = {"backend": backend, "dtype": "bfloat16", "max_context": 512, "max_running": 16}
    with LLM(model, **options) as plain, LLM(model, **options, deterministic=True) as exact:
        pairs = [[tokens_per_second(llm, seed, max_tokens) for llm in (plain, exact)] for seed in range(rounds)]
    plain_rate, exact_rate = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(exact / plain for plain, exact in pairs)
    return {"plain_tokens_per_s": plain_rate, "deterministic_tokens_per_s": exact_rate, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    backends = [name for name in available_backends() if name != "triton"]
    results = {name: compare(options.model, name, options.rounds, options.max_tokens) for name in backends}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
