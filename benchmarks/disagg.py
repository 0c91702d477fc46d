"""Two servers that each do everything, against one for prompts and one for answers: `python benchmarks/disagg.py`.

Each server has a core of its own, with its engine. A small random model, so that a machine without a GPU can do it; what
`headgate bench disagg` reports of either fleet is printed, and written as JSON with --json FILE.
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
from pathlib import Path

import msgspec

from headgate.bench.disagg import Report, Trial, run, table
from headgate.testing.tiny import tiny_model

READY_S = 120.0
FLEETS = {"mixed": ("mixed", "mixed"), "split": ("prefill", "decode")}
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def process(*command: object, core: int | None = None) -> Iterator[str]:
    """A command of ours that listens, and is stopped at the end; its address."""
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


def measure(model: Path, roles: tuple[str, ...], options: argparse.Namespace) -> Report:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(roles):
        raise SystemExit(f"this needs a core for each of {len(roles)} servers, and here are {len(cores)}")
    with ExitStack() as stack:
        urls = [
            stack.enter_context(process("serve", model, "--kv-blocks", 2048, core=core)) + f"={role}"
            for core, role in zip(cores, roles, strict=False)
        ]
        router = stack.enter_context(process("route", *urls))
        trial = Trial(
            url=router,
            streams=options.streams,
            max_tokens=options.max_tokens,
            prompts=options.prompts,
            prompt_words=options.prompt_words,
            interval_s=options.interval,
        )
        return run(trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-words", type=int, default=200)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", **SHAPE)
        for name, roles in FLEETS.items():
            report = measure(model, roles, options)
            print(f"{' and '.join(roles)}: {table(report)}\n", flush=True)
            told[name] = msgspec.to_builtins(report)
    if options.json:
        machine = {"machine": platform.platform(), "cores": len(os.sched_getaffinity(0)), "shape": SHAPE}
        options.json.write_text(json.dumps(machine | told, indent=1) + "\n")


if __name__ == "__main__":
    main()
