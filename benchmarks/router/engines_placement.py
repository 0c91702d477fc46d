"""Measures the prefix-cache hits of real engines: conversations through a router, by policy.

    python benchmarks/router/engines_placement.py MODEL [--workers 4] [--policy cache_aware --policy ...]

Starts `headgate up` with that many servers, and for each policy a router in front of them. Every run uses new random
prompts: 64 conversations of four turns with eight long system prompts, chosen evenly or by a Zipf distribution. The
number of cached tokens is that reported by the workers. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from headgate.bench.router import RouterTrial, run
from headgate.config import POLICIES

STOP_S = 30.0
PROGRAM = [sys.executable, "-m", "headgate.cli"]


@contextmanager
def listening(*arguments: str) -> Iterator[str]:
    """Runs a headgate command that listens; yields its address."""
    with subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = (re.search(r"listening\s+(http://\S+)", line) for line in process.stdout)
            yield next(address[1] for address in found if address)
        finally:
            process.terminate()
            process.stdout.read()  # until it closes, so that it does not block on a full pipe
            process.wait(STOP_S)


def workers_of(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/workers", timeout=30) as answer:
        return [worker["url"] for worker in json.load(answer)["workers"]]


def measure(url: str, arguments: argparse.Namespace, *, zipf: bool) -> dict[str, float | None]:
    trial = RouterTrial(
        url=url,
        conversations=arguments.conversations,
        system_prompts=arguments.system_prompts,
        system_words=arguments.system_words,
        turns=4,
        rounds=1,
        concurrency=1,
        think_s=arguments.think,
        zipf=zipf,
    )
    placement = run(trial).placement
    figures = placement.at_home, placement.busiest_over_mean, placement.cached_share
    names = "at_home", "busiest_over_mean", "cached_share"
    return {name: None if value is None else round(value, 3) for name, value in zip(names, figures, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kv-blocks", type=int, default=4096, help="of each server")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--system-prompts", type=int, default=8)
    parser.add_argument("--system-words", type=int, default=300)
    parser.add_argument("--think", type=float, default=5.0, help="seconds before a question, on average")
    arguments = parser.parse_args()
    result: dict[str, dict[str, object]] = {}
    servers = "--mixed", str(arguments.workers), "--kv-blocks", str(arguments.kv_blocks), "--port", "0"
    with listening("up", arguments.model, *servers) as fleet:
        urls = workers_of(fleet)
        for policy in arguments.policy or ("cache_aware", "least_requests", "round_robin"):
            with listening("route", *urls, "--policy", policy, "--port", "0", "--log-level", "warning") as url:
                result[policy] = {name: measure(url, arguments, zipf=name == "zipf") for name in ("uniform", "zipf")}
                print(policy, result[policy], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
