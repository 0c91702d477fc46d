"""Measures the goodput of a server and of a router under several times their capacity.

    python benchmarks/overload.py [--json FILE]

First the capacity is measured, with as many clients as answers are computed at once. Then requests arrive as a
Poisson process at 1, 2, 5 and 10 times that rate, whether or not earlier ones were answered. Goodput is the number of
complete answers per second; all other requests must be refused quickly. The loads take turns in several rounds, and
medians are reported, because the speed of a shared machine varies. Answers per second of the servers' CPU time are
reported too; they do not depend on other load. The model is small and random, but large enough that the client is not
the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from disagg import process

from headgate.bench.client import TimedRequest
from headgate.bench.load import ClosedLoop, Load, OpenLoop, measure
from headgate.testing.tiny import tiny_model

TIMES = (1, 2, 5, 10)
TARGET = 0.9  # share of the best goodput that must remain under overload
RUNNING, QUEUE = 4, 8  # concurrent answers and queued requests, per server
TOKENS, WORDS = 48, 16
WARM_UP = 0.25  # share of each measurement that is not counted
TURNOVERS = 4  # at least so many requests per slot in a measurement
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


@contextmanager
def one_server(model: Path) -> Iterator[str]:
    options = ("--device", "cpu", "--max-running", RUNNING, "--max-queue", QUEUE, "--kv-blocks", 256)
    with process("serve", model, *options) as url:
        yield url


@contextmanager
def routed(model: Path) -> Iterator[str]:
    """Two servers behind a router that admits as much as they can compute, and queues as much as they would."""
    with ExitStack() as stack:
        urls = [stack.enter_context(one_server(model)) for _ in range(2)]
        limits = ("--max-in-flight", 2 * RUNNING, "--max-queue", 2 * QUEUE)
        yield stack.enter_context(process("route", *urls, *limits))


TARGETS = {"server": (one_server, RUNNING, RUNNING + QUEUE), "router": (routed, 2 * RUNNING, 2 * (RUNNING + QUEUE))}


def cpu_s() -> float:
    """CPU time that our child processes have used so far."""
    return sum(_used_s(pid) for pid in _descendants(os.getpid()))


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [each for child in children for each in _descendants(child)]


@dataclass
class Figures:
    """Results of one load over all rounds."""

    offered: list[float] = field(default_factory=list)  # requests per second
    goodput: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)  # answers per second of the servers' CPU time
    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, samples: Sequence[TimedRequest], seconds: float, used_s: float) -> None:
        begun_s = seconds * WARM_UP
        window_s = seconds - begun_s
        done = [sample for sample in samples if sample.error is None]
        self.offered.append(len(samples) / seconds)
        self.goodput.append(sum(begun_s <= s.start_s + s.total_s < seconds for s in done) / window_s)
        self.per_cpu_s.append(len(done) / used_s)
        self.accepted_s += [sample.total_s for sample in done]
        self.refused_s += [sample.total_s for sample in samples if (sample.error or "").startswith("429")]
        self.errors.update(sample.error for sample in samples if sample.error is not None)

    def summary(self, peak: float, bound_s: float) -> dict[str, object]:
        return {
            "offered_per_s": round(median(self.offered), 2),
            "goodput_per_s": round(median(self.goodput), 2),
            "of_peak": round(median(self.goodput) / peak, 3),
            "answers_per_cpu_s": round(median(self.per_cpu_s), 2),
            "accepted_ms": spread_ms(self.accepted_s),
            "refused_ms": spread_ms(self.refused_s),
            "accepted_p99_within_bound": bool(np.percentile(self.accepted_s, 99) <= bound_s),
            "errors": dict(self.errors),
        }


def spread_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    p50, p99 = np.percentile(np.asarray(values_s) * 1000, (50, 99))
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "count": len(values_s)}


def load_of(url: str, pace: OpenLoop | ClosedLoop, requests: int, seed: int) -> Load:
    return Load(
        url=url,
        pace=pace,
        api="completions",
        requests=max(1, requests),
        prompt_words=WORDS,
        max_tokens=TOKENS,
        ignore_eos=True,
        seed=seed,
    )


async def capacity_of(url: str, clients: int, seconds: float, seed: int) -> float:
    """Answers per second with all slots in use and no queue."""
    per_s = 0.0
    for requests in (2 * clients, 8 * clients, None):  # warm-up, estimate, measurement
        count = requests or max(4 * clients, int(per_s * seconds))
        result = await measure(load_of(url, ClosedLoop(clients), count, seed))
        per_s = len(result.completed) / result.elapsed_s
    return per_s


async def overload(url: str, clients: int, places: int, rounds: int, seconds: float) -> dict[str, object]:
    capacity = await capacity_of(url, clients, seconds, seed=1)
    print(f"capacity: {capacity:.1f} answers/s", file=sys.stderr, flush=True)
    seconds = max(seconds, TURNOVERS * places / capacity)
    figures = {times: Figures() for times in TIMES}
    for number in range(rounds):
        for times in TIMES:
            rate = capacity * times
            before_s = cpu_s()
            result = await measure(load_of(url, OpenLoop(rate), int(rate * seconds), seed=100 * number + times))
            figures[times].add(result.samples, seconds, cpu_s() - before_s)
            goodput = figures[times].goodput[-1]
            print(f"round {number}, {times} times: {goodput:.1f} answers/s", file=sys.stderr, flush=True)
    peak = max(median(each.goodput) for each in figures.values())
    # An admitted request waits for at most all slots; the factor of five allows for a machine of varying speed.
    bound_s = 5 * places / capacity
    loads = {str(times): each.summary(peak, bound_s) for times, each in figures.items()}
    within = all(median(each.goodput) >= TARGET * peak for times, each in figures.items() if times > 1)
    return {
        "capacity_per_s": round(capacity, 2),
        "bound_ms": round(1000 * bound_s),
        "seconds": round(seconds, 1),
        "loads": loads,
        "ok": within,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load in each round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, object] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    report |= {"rounds": options.rounds, "seconds": options.seconds, "tokens": TOKENS}
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        model = tiny_model(Path(folder) / "model", **SHAPE)  # type: ignore[arg-type]
        for name, (started, clients, places) in TARGETS.items():
            with started(model) as url:
                report[name] = asyncio.run(overload(url, clients, places, options.rounds, options.seconds))
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
