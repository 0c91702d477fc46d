"""Compares servers over HTTP under the same workloads, one at a time, as ratios and as fractions of the floor.

    python -m benchmarks.gpu.serve --shape llama-8b --fp8 both --work 1000,1000,768 --work mixed \\
        --server 'headgate=headgate serve {model} --served-name m --port {port} --fp8 both' \\
        --server 'vllm=python -m vllm.entrypoints.openai.api_server --model {model} --served-model-name m --port {port}'

Any OpenAI-compatible server can be used: its command is started with the folder of a random checkpoint and a port,
and must answer `GET /v1/models`. Clients are separate processes that stream completions of random token ids, so that
no prompt is cached. With several rounds, servers take turns. A workload is IN,OUT,REQUESTS[,AT_ONCE], or `mixed`: 256
requests of 100 to 1,024 tokens each way. The table goes to standard error, JSON to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.checkpoint import SHAPES, add_tokenizer, config_of

BANDWIDTH, FP8_FLOPS, BF16_FLOPS = 4.29e12, 1.5e15, 783e12  # measured on an H200
READY_S, STOP_S, LEAD_S = 400.0, 20.0, 2.0
MODEL = "m"
USAGE = b'"completion_tokens":'
TAIL_BYTES = 4096


class Ask(NamedTuple):
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    asks: tuple[Ask, ...]
    at_once: int

    @classmethod
    def of(cls, text: str) -> Work:
        if text == "mixed":
            rng = random.Random(0)
            asks = tuple(Ask(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256))
            return cls(text, asks, len(asks))
        prompt, output, requests, *more = map(int, text.split(","))
        return cls(text, (Ask(prompt, output),) * requests, more[0] if more else requests)


@dataclass(frozen=True, slots=True)
class Figures:
    tokens_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    failed: int
    client_cpu_s: float


# ------------------------------------------------------------------------------------------------------------- clients


class Sample(NamedTuple):
    began_s: float
    first_s: float
    ended_s: float
    tokens: int
    gaps_s: list[float]


class Stream(asyncio.Protocol):
    """One request: the arrival times of its events, and the number of tokens according to usage."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._times: list[float] = []
        self.sample: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._began_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: " in data:
            self._times.append(time.perf_counter())
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        _, found, rest = self._tail.rpartition(USAGE)
        tokens = int(rest.lstrip()[:12].split(b",")[0].split(b"}")[0]) if found else 0
        times = self._times or [time.perf_counter()]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        self.sample.set_result(Sample(self._began_s, times[0], times[-1], tokens, gaps))


def request_of(ask: Ask, rng: random.Random, model: str) -> bytes:
    prompt = [rng.randint(0, 10_000) for _ in range(ask.prompt)]
    asked = {"model": model, "prompt": prompt, "max_tokens": ask.output, "temperature": 0.6, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + body


def ask_all(port: int, asks: list[Ask], at_once: int, seed: int, start: float) -> tuple[list[Sample], float]:
    """Runs in a separate process; all processes start at the same wall-clock time."""
    rng = random.Random(seed)
    waiting = [request_of(ask, rng, MODEL) for ask in asks]
    samples: list[Sample] = []

    async def lane() -> None:
        while waiting:
            stream = Stream(waiting.pop())
            await asyncio.get_running_loop().create_connection(lambda stream=stream: stream, "127.0.0.1", port)
            samples.append(await stream.sample)

    async def main() -> None:
        await asyncio.sleep(max(0.0, start - time.time()))
        await asyncio.gather(*(lane() for _ in range(at_once)))

    asyncio.run(main())
    return samples, time.process_time()


def measure(port: int, work: Work, seed: int, processes: int) -> Figures:
    processes = min(processes, work.at_once)
    start = time.time() + LEAD_S
    with ProcessPoolExecutor(processes) as pool:
        lanes = [len(range(k, work.at_once, processes)) for k in range(processes)]
        calls = [
            pool.submit(ask_all, port, list(work.asks[k::processes]), lanes[k], 1000 * seed + k, start)
            for k in range(processes)
        ]
        results = [call.result() for call in calls]
    samples = [sample for told, _ in results for sample in told]
    wanted = sum(ask.output for ask in work.asks)
    elapsed_s = max(s.ended_s for s in samples) - min(s.began_s for s in samples)
    firsts, gaps = [s.first_s - s.began_s for s in samples], [gap for s in samples for gap in s.gaps_s]
    tokens = sum(s.tokens for s in samples)
    return Figures(
        tokens / elapsed_s,
        *(_ms(firsts, 0.5), _ms(firsts, 0.99), _ms(gaps, 0.5), _ms(gaps, 0.99)),
        failed=sum(not s.tokens for s in samples) + (tokens != wanted),
        client_cpu_s=sum(cpu_s for _, cpu_s in results),
    )


def _ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds) or [0.0]
    return 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]


# ------------------------------------------------------------------------------------------------------------- servers


@contextmanager
def serving(command: str, model: Path, log: Path) -> Iterator[int]:
    """Runs a server on a free port, and stops it with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    words = shlex.split(command.format(model=model, port=port))
    with log.open("wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
    try:
        _await_ready(server, port, log)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _await_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            if json.load(answer).get("data"):
                return
        time.sleep(0.5)
    raise SystemExit(f"{server.args} is not ready; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")


# --------------------------------------------------------------------------------------------------------------- floor


def floor_tokens_s(shape: str, work: Work, fp8: str | None) -> float:
    """Output tokens/s if the GPU only read weights and KV and multiplied, each at its measured rate."""
    config = SHAPES[shape]
    hidden, heads, kv_heads = (
        config[f"{name}"] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    attention = hidden * config["head_dim"] * (2 * heads + 2 * kv_heads)
    one = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])  # an expert, or the whole MLP
    count = config.get("num_experts", config.get("num_local_experts", 1))
    used, unused = (
        config.get("num_experts_per_tok", 1),
        (1 - config.get("num_experts_per_tok", 1) / count) ** work.at_once,
    )
    layers = config["num_hidden_layers"] * (attention + used * one)  # parameters that multiply each token
    read_layers = config["num_hidden_layers"] * (attention + count * (1 - unused) * one)
    head = hidden * config["vocab_size"]
    small, flops = (1, FP8_FLOPS) if fp8 in ("weights", "both") else (2, BF16_FLOPS)
    kv = 2 * config["num_hidden_layers"] * kv_heads * config["head_dim"] * (1 if fp8 in ("kv", "both") else 2)
    prompts, outputs = sum(ask.prompt for ask in work.asks), sum(ask.output for ask in work.asks)
    read = sum(ask.output * (ask.prompt + ask.output / 2) for ask in work.asks) * kv / BANDWIDTH
    steps = outputs / work.at_once
    weights = max(
        (read_layers * small + 2 * head) / BANDWIDTH, work.at_once * 2 * (layers / flops + head / BF16_FLOPS)
    )
    return outputs / (prompts * 2 * layers / flops + read + steps * weights)


# ---------------------------------------------------------------------------------------------------------------- main


def make_checkpoint(shape: str, folder: Path) -> None:
    """Weights are drawn on the GPU, which takes seconds instead of minutes."""
    if (folder / "tokenizer.json").exists():
        return
    from benchmarks.gpu.bench import RandomWeights
    from safetensors.torch import save_file

    from headgate.models import read_spec

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.cpu() for name, tensor in RandomWeights(read_spec(folder))}, folder / "model.safetensors")
    add_tokenizer(folder)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = options.checkpoint or folder / "model"
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn")
    ) as pool:  # a separate process, so that its GPU memory is free afterwards
        pool.submit(make_checkpoint, options.shape, model).result()
    works = [Work.of(text) for text in options.work]
    figures: dict[str, dict[str, list[Figures]]] = {work.name: {} for work in works}
    for round_ in range(options.rounds):
        for name, command in options.server:
            with serving(command, model, folder / f"{name}.log") as port:
                measure(port, Work.of("64,16,64"), 10**6, 4)  # warm-up: kernels are compiled for the first requests
                for work in works:
                    told = measure(port, work, round_ + 1, options.processes)
                    figures[work.name].setdefault(name, []).append(told)
                    print(f"{name:12} {work.name:20} {told}", file=sys.stderr, flush=True)
    return {work.name: _row(options, work, figures[work.name]) for work in works}


def _row(options: argparse.Namespace, work: Work, figures: dict[str, list[Figures]]) -> dict[str, Any]:
    floor = floor_tokens_s(options.shape, work, options.fp8)
    middle = {name: median(each.tokens_s for each in told) for name, told in figures.items()}
    first = next(iter(middle.values()))
    return {
        "floor_tokens_s": round(floor),
        "servers": {
            name: {
                "tokens_s": round(middle[name]),
                "of_floor": round(middle[name] / floor, 3),
                "first_is": round(first / middle[name], 3) if middle[name] else None,
                "runs": [asdict(each) for each in told],
            }
            for name, told in figures.items()
        },
    }


def table(rows: dict[str, Any]) -> str:
    lines = [
        f"{'work':20} {'server':12} {'tokens/s':>10} {'of floor':>9} {'first is':>9} "
        f"{'first token p50/p99, ms':>25} gap p50/p99, ms"
    ]
    for work, row in rows.items():
        for name, told in row["servers"].items():
            run = told["runs"][0]
            lines.append(
                f"{work:20} {name:12} {told['tokens_s']:10,} {told['of_floor']:9} {told['first_is']!s:>9} "
                f"{run['first_token_p50_ms']:12.0f} / {run['first_token_p99_ms']:<10.0f} "
                f"{run['gap_p50_ms']:.1f} / {run['gap_p99_ms']:.1f}"
            )
    return "\n".join(lines)


def _named(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return name, command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--checkpoint", type=Path, help="where the random checkpoint is, or is made and kept")
    parser.add_argument(
        "--server",
        type=_named,
        action="append",
        required=True,
        help="NAME=COMMAND, in which {model} and {port} are filled in",
    )
    parser.add_argument("--work", action="append", help="IN,OUT,REQUESTS[,AT_ONCE] or mixed")
    parser.add_argument("--fp8", choices=("weights", "kv", "both"), help="of which precision the floor is")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=8, help="of clients")
    options = parser.parse_args()
    options.work = options.work or ["mixed"]
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options, Path(folder))
    print(table(rows), file=sys.stderr)
    print(json.dumps({"shape": options.shape, "fp8": options.fp8, "works": rows}, indent=1))


if __name__ == "__main__":
    main()
