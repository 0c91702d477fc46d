"""Compares the cost of routers on a host with noisy other load.

    python benchmarks/router/turns.py --sglang-router PATH --vllm-router PATH --nginx PATH [--rounds 12]

The same work as `cost.py`, without memory. All routers run at the same time on one core and take short turns at each
piece of work, so that other load affects all of them alike. Reports for each figure its median, and the median over
the rounds of its ratio to each peer's figure in the same round. A table goes to standard error, JSON to standard
output.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import uvloop
from cost import PACE_MS, WORKERS, Meter, add_peers, cpu_name, given, per_chunk, per_request
from load import long_requests, short_requests
from processes import Peer, mock_workers, running, until_ready

Figures = dict[str, dict[str, list[float]]]  # by name and router, one for each round
Turn = Callable[[Meter, int, int], Awaitable[float]]

TURNS: dict[str, Turn] = {
    "request_us_32": lambda meter, port, round_: per_request(meter, port, 32, short_requests(2000, round_)),
    "request_us_256": lambda meter, port, round_: per_request(meter, port, 256, short_requests(2000, 1000 + round_)),
    "request_us_16k": lambda meter, port, round_: per_request(meter, port, 32, long_requests(600, round_)),
    "chunk_us_flood_64": lambda meter, port, _: per_chunk(meter, port, 64, 300, 0),
    "chunk_us_flood_256": lambda meter, port, _: per_chunk(meter, port, 256, 75, 0),
    "chunk_us_paced_64": lambda meter, port, _: per_chunk(meter, port, 64, 75, PACE_MS),
    "chunk_us_paced_256": lambda meter, port, _: per_chunk(meter, port, 256, 75, PACE_MS),
}


async def measure(peers: list[Peer], rounds: int) -> Figures:
    figures: Figures = {name: {peer.name: [] for peer in peers} for name in TURNS}
    ours, theirs = (0, 1) if (os.cpu_count() or 1) > 1 else (None, None)
    if ours is not None:
        os.sched_setaffinity(0, {ours})
    with mock_workers(WORKERS, ours) as urls, ExitStack() as stack:
        routers = {peer.name: stack.enter_context(running(peer, urls[peer.workers], theirs)) for peer in peers}
        meters = {name: Meter(router) for name, router in routers.items()}
        for name, router in routers.items():
            await until_ready(router)
            await meters[name].rest()
        for round_ in range(-1, rounds):  # the first round is a warm-up
            for figure, turn in TURNS.items():
                for name, router in routers.items():
                    us = await turn(meters[name], router.port, round_ + 1)
                    if round_ >= 0:
                        figures[figure][name].append(us)
            print(f"round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
    return figures


def ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def summary(figures: Figures) -> dict[str, Any]:
    """For each figure its medians, and the ratios of the first router to the others."""
    return {
        figure: {
            "medians": {name: round(statistics.median(values), 2) for name, values in by_router.items()},
            "ratios": {name: ratio(next(iter(by_router.values())), values) for name, values in by_router.items()},
        }
        for figure, by_router in figures.items()
    }


def table(report: dict[str, Any]) -> str:
    lines = []
    for figure, each in report.items():
        cells = [f"{name} {value:.1f} ({each['ratios'][name]:.2f})" for name, value in each["medians"].items()]
        lines.append(f"{figure:20} " + ", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peers(parser)
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    options = parser.parse_args()
    peers = given(options)
    gc.disable()  # in the clients, which must not be delayed
    run: Callable[..., Any] = asyncio.Runner(loop_factory=uvloop.new_event_loop).run
    figures = run(measure(peers, options.rounds))
    report = summary(figures)
    print(table(report), file=sys.stderr)
    print(json.dumps({"cpu": cpu_name(), "rounds": options.rounds, "figures": report, "all": figures}, indent=1))


if __name__ == "__main__":
    main()
