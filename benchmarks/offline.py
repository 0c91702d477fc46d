"""Compares the engine with other engines: same checkpoint, same prompts, same run.

    python benchmarks/offline.py MODEL --peer vllm=PYTHON --peer openvino=PYTHON [--rounds 3]

Every engine runs in a separate process (a peer under the Python of its own environment), is loaded once, and takes
its turn in each round. Machines are shared and noisy, so the result is the ratio of medians. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).parent / "engines"
VOCABULARY = 100_000


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    max_tokens: int
    twice: bool = False  # run again at once, to measure the prefix cache


def works(seed: int) -> dict[str, Work]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    shared = tokens(1024)
    return {
        "single stream": Work([tokens(128)], 64),
        "32 mixed": Work([tokens(rng.randint(128, 512)) for _ in range(32)], 128),
        "32 sharing 1024": Work([shared + tokens(16) for _ in range(32)], 64, twice=True),
    }


@dataclass
class Engine:
    name: str
    process: subprocess.Popen[str]
    info: dict[str, Any] = field(default_factory=dict)

    def run(self, work: Work) -> dict[str, Any]:
        return self.ask({"prompts": work.prompts, "max_tokens": work.max_tokens})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Engines also log to standard output; answers are the lines that start with our mark."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return dict(json.loads(line[2:]))
        raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")


def start(name: str, python: str, model: Path, threads: int, dtype: str) -> Engine:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(ENGINES / f"with_{name}.py"), str(model), dtype, str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # In a new session, because some engines leave processes behind.
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
    engine = Engine(name, process)
    engine.info = engine.answer()
    print(f"{name} is ready: {engine.info}", file=sys.stderr)
    return engine


def measure(engines: list[Engine], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second, by work and engine, one entry per round."""
    rates: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name, work in works(seed=number).items():
            for engine in engines:
                for label in (f"{name}, cold", f"{name}, warm") if work.twice else (name,):
                    result = engine.run(work)
                    rate = result["tokens"] / result["seconds"]
                    rates.setdefault(label, {}).setdefault(engine.name, []).append(rate)
                    print(f"round {number}: {label}: {engine.name} {rate:.1f} tokens/s", file=sys.stderr)
    return rates


def report(rates: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    medians = {work: {name: statistics.median(each) for name, each in by.items()} for work, by in rates.items()}
    peers = {
        work: max((rate for name, rate in by.items() if name != "headgate"), default=None)
        for work, by in medians.items()
    }
    ratios = {work: medians[work]["headgate"] / best for work, best in peers.items() if best}
    return {"tokens_per_second": medians, "ratio_to_best_peer": ratios, "rounds": rates}


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="vllm=... or openvino=...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    named = [("headgate", sys.executable), *(tuple(peer.split("=", 1)) for peer in options.peer)]
    engines = [start(name, python, options.model, options.threads, options.dtype) for name, python in named]
    result = report(measure(engines, options.rounds))
    result |= {
        "engines": {engine.name: engine.info for engine in engines},
        "cpu": cpu_name(),
        "threads": options.threads,
        "dtype": options.dtype,
    }
    print(json.dumps(result, indent=2))
    for engine in engines:
        os.killpg(engine.process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
