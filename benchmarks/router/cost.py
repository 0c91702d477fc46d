"""Measures the cost of routing: CPU time of router processes per request and per streamed chunk, and their memory.

    python benchmarks/router/cost.py --sglang-router PATH --vllm-router PATH --nginx PATH [--rounds 3]

Every router gets the same clients (`load.py`) and mock workers (`mock.py`), which for Headgate write the journal that
it resumes answers from. Routers run on a core of their own, one at a time, and are restarted for each round; clients
and workers share another core. CPU time is that of all threads according to the kernel, minus the idle cost of the
router. Results are medians over the rounds in microseconds; a table goes to standard error, JSON to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from load import closing, connect, long_requests, run_through, short_requests, stream_request
from processes import Peer, Running, mock_workers, running, until_ready

WORKERS = 4
IDLE_S = 2.0
OPEN_STREAMS = 1000
OPEN_PACE_MS = 1000
PACE_MS = 20


class Meter:
    """The CPU time of a router, minus its idle cost."""

    def __init__(self, router: Running) -> None:
        self._router = router
        self._idle_rate = 0.0  # ns of CPU per second

    async def rest(self) -> None:
        began_s, spent = time.monotonic(), self._router.cpu_ns()
        await asyncio.sleep(IDLE_S)
        self._idle_rate = (self._router.cpu_ns() - spent) / (time.monotonic() - began_s)

    async def us(self, work: Awaitable[int]) -> tuple[float, int]:
        """The cost of `work` in microseconds, and its result."""
        began_s, spent = time.monotonic(), self._router.cpu_ns()
        result = await work
        elapsed_s = time.monotonic() - began_s
        return (self._router.cpu_ns() - spent - self._idle_rate * elapsed_s) / 1000, result


async def per_request(meter: Meter, port: int, connections: int, requests: list[bytes]) -> float:
    warm, measured = requests[: 2 * connections], requests[2 * connections :]
    with closing(await connect(port, connections)) as open_ones:
        await run_through(open_ones, warm)
        spent_us, _ = await meter.us(run_through(open_ones, measured))
    return spent_us / len(measured)


async def per_chunk(meter: Meter, port: int, streams: int, chunks: int, pace_ms: int) -> float:
    with closing(await connect(port, streams)) as open_ones:
        await run_through(open_ones, short_requests(2 * streams, streams))
        requests = [stream_request(number, chunks, pace_ms) for number in range(streams)]
        spent_us, events = await meter.us(run_through(open_ones, requests))
    expected = streams * (chunks + 1)
    if events != expected:
        raise RuntimeError(f"{events} of {expected} events arrived")
    return spent_us / events


async def memory_mb(router: Running, streams: int) -> float:
    """Memory with that many answers in flight, each with a few chunks so far."""
    with closing(await connect(router.port, streams)) as open_ones:
        answers = asyncio.gather(
            *(one.ask(stream_request(number, 8, OPEN_PACE_MS)) for number, one in enumerate(open_ones)),
            return_exceptions=True,
        )
        async with asyncio.timeout(60):
            for one in open_ones:
                await one.first.wait()
        await asyncio.sleep(2.5 * OPEN_PACE_MS / 1000)
        used_mb = router.rss_mb()
        bodies = await answers
        if not all(isinstance(body, bytes) and body.count(b"data: {") == 9 for body in bodies):
            raise RuntimeError("not every one of the open streams was answered")
    return used_mb


async def measure(router: Running, scale: float, round_: int) -> dict[str, float]:
    """One round of all measurements, on a newly started router."""
    await until_ready(router)
    port, meter, figures = router.port, Meter(router), dict[str, float]()
    figures["rss_mb_1000_streams"] = await memory_mb(router, OPEN_STREAMS)
    await meter.rest()
    count = int(8000 * scale)
    figures["request_us_32"] = await per_request(meter, port, 32, short_requests(count, round_))
    figures["request_us_256"] = await per_request(meter, port, 256, short_requests(count, 100 + round_))
    figures["request_us_16k"] = await per_request(meter, port, 32, long_requests(int(2000 * scale), round_))
    for streams in (64, 256):
        chunks = int(64_000 * scale) // streams
        figures[f"chunk_us_flood_{streams}"] = await per_chunk(meter, port, streams, chunks, 0)
    for streams in (64, 256):
        figures[f"chunk_us_paced_{streams}"] = await per_chunk(meter, port, streams, int(150 * scale), PACE_MS)
    return figures


async def measure_all(peers: list[Peer], rounds: int, scale: float) -> dict[str, list[dict[str, float]]]:
    figures: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    ours, theirs = (0, 1) if (os.cpu_count() or 1) > 1 else (None, None)
    if ours is not None:
        os.sched_setaffinity(0, {ours})
    with mock_workers(WORKERS, ours) as urls:
        for round_ in range(rounds):
            for peer in peers:
                with running(peer, urls[peer.workers], theirs) as router:
                    figures[peer.name].append(await measure(router, scale, round_))
                print(
                    f"round {round_ + 1}, {peer.name}: {_line(figures[peer.name][-1])}", file=sys.stderr, flush=True
                )
    return figures


def _line(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


# ---------------------------------------------------------------------------------------------------------- the report

COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("per request, 32 / 256 connections", ("request_us_32", "request_us_256")),
    ("16k-character prompt", ("request_us_16k",)),
    ("per chunk, flood 64 / 256", ("chunk_us_flood_64", "chunk_us_flood_256")),
    ("paced 64 / 256", ("chunk_us_paced_64", "chunk_us_paced_256")),
    ("RSS at 1,000 streams", ("rss_mb_1000_streams",)),
)


def table(medians: dict[str, dict[str, float]]) -> str:
    lines = ["| router | " + " | ".join(title for title, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for router, figures in medians.items():
        cells = [" / ".join(_shown(name, figures[name]) for name in names) for _, names in COLUMNS]
        lines.append("| " + " | ".join([router, *cells]) + " |")
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    if name.startswith("rss"):
        return f"{value:.0f} MB"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def summary(figures: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        router: {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
        for router, rounds in figures.items()
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def given(options: argparse.Namespace) -> list[Peer]:
    """The routers to measure; reports those that were not given."""
    peers = []
    for name in ("headgate", "sglang-router", "vllm-router", "nginx"):
        executable = getattr(options, name.replace("-", "_"))
        if executable is None:
            print(f"{name} was not given, and is not measured (--{name} PATH)", file=sys.stderr)
        elif shutil.which(executable) is None:
            sys.exit(f"{name}: there is no executable {executable!r}")
        else:
            peers.append(Peer(name, executable, name))
    return peers + [Peer(name, path, "headgate") for name, _, path in (also.rpartition("=") for also in options.also)]


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--headgate", default=str(Path(sys.executable).with_name("headgate")), metavar="PATH")
    for name in ("sglang-router", "vllm-router", "nginx"):
        parser.add_argument(f"--{name}", metavar="PATH", help="executable; left out if not given")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PATH", help="another build of Headgate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peers(parser)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="amount of work (default: %(default)s)")
    options = parser.parse_args()
    peers = given(options)
    gc.disable()  # in the clients, which must not be delayed
    run: Callable[..., Any] = asyncio.Runner(loop_factory=uvloop.new_event_loop).run
    figures = run(measure_all(peers, options.rounds, options.scale))
    medians = summary(figures)
    print(table(medians), file=sys.stderr)
    print(json.dumps({"cpu": cpu_name(), "rounds": options.rounds, "medians": medians, "all": figures}, indent=1))


if __name__ == "__main__":
    main()
