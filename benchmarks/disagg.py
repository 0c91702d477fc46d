"""Compares two mixed servers with one prefill and one decode server: `python benchmarks/disagg.py`.

Each server has a core of its own, which its engine shares. The model is small and random, so that no GPU is needed.
The report of `headgate bench disagg` for either fleet under each load is printed, and written as JSON with --json
FILE. On a shared machine, --first (as root) gives the benchmark's processes priority; otherwise the result mostly
reflects other load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headgate.bench.disagg import DisaggTrial, run, table
from headgate.testing.tiny import tiny_model

READY_S = 120.0
FLEETS = {"mixed": ("mixed", "mixed"), "split": ("prefill", "decode")}
LOADS = ("200,1", "200,0.25", "400,1.5", "800,1.5", "200,0.1")  # words per prompt, seconds between prompts
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
COUNTED = {
    "moved": "headgate:kv_transfers_total",  # prompts whose KV was fetched from the prefill server
    "lost": "headgate:kv_transfers_lost_total",  # prompts that the decode server computed after a failed transfer
    "not_asked": "headgate:router_prefills_lost_total",  # likewise, because no prefill server was free
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def process(*command: object, core: int | None = None) -> Iterator[str]:
    """Runs a headgate command that listens, and stops it at the end; yields its address."""
    port = free_port()
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    line = [*pinned, sys.executable, "-m", "headgate.cli", *map(str, command), "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen([*line, "--log-level", "warning"], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", started)
        yield f"http://127.0.0.1:{port}"
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait(20)


def wait_until_ready(url: str, started: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        if started.poll() is not None:
            raise SystemExit(f"{started.args} ended with {started.returncode}")
        with suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"{started.args} is not ready within {READY_S:g} s")


def descendants(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def go_first() -> None:
    """Give our processes priority. Each is a separate session, and Linux divides CPU time among sessions."""
    for pid in descendants(os.getpid()):
        Path(f"/proc/{pid}/autogroup").write_text("-19")


@dataclass(frozen=True)
class Fleet:
    servers: list[str]
    router: str

    def counts(self) -> dict[str, float]:
        pages = [urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode() for url in self.urls]
        lines = [line for page in pages for line in page.splitlines()]
        return {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
            for name, metric in COUNTED.items()
        }

    @property
    def urls(self) -> list[str]:
        return [*self.servers, self.router]


@contextmanager
def running(model: Path, roles: tuple[str, ...]) -> Iterator[Fleet]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(roles):
        raise SystemExit(f"this needs a core for each of {len(roles)} servers, and here are {len(cores)}")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(process("serve", model, "--kv-blocks", 2048, core=core))
            for core, _ in zip(cores, roles, strict=False)
        ]
        workers = [f"{url}={role}" for url, role in zip(servers, roles, strict=True)]
        yield Fleet(servers, stack.enter_context(process("route", *workers)))


def measure(fleet: Fleet, load: str, options: argparse.Namespace) -> dict[str, Any]:
    words, interval_s = load.split(",")
    trial = DisaggTrial(
        url=fleet.router,
        streams=options.streams,
        max_tokens=options.max_tokens,
        prompts=max(1, round(options.seconds / float(interval_s))),
        prompt_words=int(words),
        interval_s=float(interval_s),
    )
    before = fleet.counts()
    report = run(trial)
    counts = {name: round(count - before[name]) for name, count in fleet.counts().items()}
    print(f"{table(report)}\nprompts: {counts}\n", flush=True)
    return msgspec.to_builtins(report) | {"prompts": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=12.0, help="for which prompts arrive")
    parser.add_argument(
        "--load", action="append", metavar="WORDS,SECONDS", help="words per prompt, and seconds between prompts"
    )
    parser.add_argument("--first", action="store_true", help="take the cores before the processes of others")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", **SHAPE)
        for name, roles in FLEETS.items():
            with running(model, roles) as fleet:
                if options.first:
                    go_first()
                print(f"--- {' and '.join(roles)}\n")
                results[name] = [measure(fleet, load, options) for load in options.load or LOADS]
    if options.json:
        machine = {"machine": platform.platform(), "cores": len(os.sched_getaffinity(0)), "shape": SHAPE}
        options.json.write_text(json.dumps(machine | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
