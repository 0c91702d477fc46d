"""Aborts, weight updates and prefix sharing on one GPU: `python -m benchmarks.gpu.lifecycle [--shape 0.6b] [--out
FILE]`.

Three measurements with the whole engine in this process and random weights, printed as JSON:

- abort: how long after an abort, sent at a random time under 256 running sequences, are its blocks free?
- update: how long do `pause`, `update_weights` from another process's memory on the same GPU, and `resume` take, and is
  any graph captured again?
- prefix: 256 requests share 2,048 tokens. When do they get their first token: with nothing shared (each has its own salt),
  in the first wave that may share (the prompt is computed once, within the wave), and in the second?

`--device cpu --shape tiny` tests the script itself; weights then come from a file in shared memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import torch
from benchmarks.checkpoint import SHAPES
from benchmarks.gpu import bench

import headgate.device.tensor_parallel.parallelism as parallelism
from headgate.collector import spare_the_collector
from headgate.config import EngineConfig
from headgate.device.weights.resources import open_source
from headgate.device.weights.source import WeightSource
from headgate.engine.build import Engine, build_engine
from headgate.models import read_spec
from headgate.protocol.command import (
    Command,
    EngineState,
    FileSource,
    Pause,
    PauseMode,
    Result,
    Resume,
    Source,
    UpdateWeights,
)
from headgate.protocol.message import Abort, CommandAnswer, CommandCall, StepOutputs, Submit
from headgate.protocol.plan import StepResult
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_config
from headgate.weights import publish, share

DEADLINE_S = 120.0
TARGET_UPDATE_MS, TARGET_RATIO = 300.0, 0.1


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement."""

    config: dict[str, Any]  # of the model; changes to the config of a tiny one
    running: int = 256
    prompt: int = 512
    shared: int = 2048
    own: int = 16
    vocab: int = 10_000
    engine: dict[str, Any] = field(default_factory=lambda: {"max_context": 2304, "memory_fraction": 0.8})


SIZES = {shape.removeprefix("qwen3-"): Size(config) for shape, config in SHAPES.items()}
SIZES["tiny"] = Size({}, running=8, prompt=48, shared=256, own=8, vocab=256, engine={"kv_blocks": 200})


# -- weights -----------------------------------------------------------------------------


class RandomWeights(bench.RandomWeights):
    """Random weights for the model in `folder`, one tensor at a time, on any device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(read_spec(folder))
        self._device = device

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self._shapes.items():
            noise = torch.randn(shape, device=self._device, dtype=torch.bfloat16)
            yield name, 1 + 0.1 * noise if name.endswith("norm.weight") else noise / shape[-1] ** 0.5


def open_random(source: Source, device: torch.device) -> WeightSource:
    """Random weights for a folder without weights."""
    if isinstance(source, FileSource) and Path(source.path, "config.json").exists():
        return RandomWeights(Path(source.path), device)
    return open_source(source, device)


def train(folder: Path, device: torch.device) -> None:
    """The trainer process: holds weights, prints their handles, and exits when its standard input closes."""
    torch.manual_seed(1)
    tensors = dict(RandomWeights(folder, device))
    with share(tensors) if device.type == "cuda" else publish(tensors) as source:
        print(msgspec.json.encode(source).decode(), flush=True)
        sys.stdin.read()


@contextmanager
def trainer(folder: Path, device: str) -> Iterator[Source]:
    command = [sys.executable, "-m", "benchmarks.gpu.lifecycle", "--train", str(folder), "--device", device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the trainer has ended with {process.wait(10)} before it had weights")
        yield msgspec.json.decode(line, type=Source)
        process.stdin.close()


# -- an engine and its clients -----------------------------------------------------------


class Desk:
    """Sends requests and commands to an engine, runs its loop, and records the times of the outputs."""

    engine: Engine

    def __init__(self) -> None:
        self.first_s: dict[int, float] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.landings_s: list[float] = []  # of steps
        self.asked_s = 0.0
        self._answers: dict[int, Result] = {}
        self._next_id = 1

    def watch(self, engine: Engine) -> None:
        self.engine, commit = engine, engine.scheduler.commit

        def noted(result: StepResult) -> None:
            commit(result)
            self.landings_s.append(time.perf_counter())

        engine.scheduler.commit = noted  # type: ignore[method-assign]

    def hear(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        now_s = time.perf_counter()
        if isinstance(message, CommandAnswer):
            self._answers[message.number] = message.result
            return
        outputs = message.outputs
        assert not outputs.refused, outputs.refused
        for id, token in zip(outputs.ids, outputs.tokens, strict=True):
            self.first_s.setdefault(id, now_s)
            self.tokens.setdefault(id, []).append(token)
        for ended in outputs.ended:
            self.ended[ended.id], self.cached[ended.id] = ended.finish_reason, ended.cached_tokens

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int, salts: Callable[[int], str]) -> list[int]:
        """Submit all prompts at once, and record the time in `asked_s`."""
        ids = list(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(prompts)
        asked = [
            GenerateRequest(id, tuple(prompt), bench.params(max_tokens, i, temperature=0.0), salt=salts(i))
            for i, (id, prompt) in enumerate(zip(ids, prompts, strict=True))
        ]
        self.asked_s = time.perf_counter()
        self.engine.loop.post(Submit(asked))
        return ids

    def turn_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.perf_counter() + DEADLINE_S
        while not holds():
            if time.perf_counter() > deadline_s:
                raise SystemExit(f"gave up after {DEADLINE_S:g} s: {self.engine.scheduler!r}")
            self.engine.loop.turn()

    def answered(self, ids: Sequence[int]) -> list[list[int]]:
        self.turn_until(lambda: all(id in self.ended for id in ids))
        return [self.tokens[id] for id in ids]

    def call(self, command: Command) -> EngineState:
        number, self._next_id = self._next_id, self._next_id + 1
        self.engine.loop.post(CommandCall(0, number, command))
        self.turn_until(lambda: number in self._answers)
        told = self._answers.pop(number)
        assert isinstance(told, EngineState), told
        return told

    def timed(self, command: Command) -> tuple[EngineState, float]:
        """The answer to a command, and its time in milliseconds."""
        began_s = time.perf_counter()
        told = self.call(command)
        return told, (time.perf_counter() - began_s) * 1000

    def load(self, size: Size, rng: random.Random, max_tokens: int) -> list[int]:
        """Start sequences, and wait until all of them run and have tokens."""
        prompts = [[rng.randrange(size.vocab) for _ in range(size.prompt)] for _ in range(size.running)]
        salt = str(rng.random())
        ids = self.submit(prompts, max_tokens, lambda _: salt)
        self.turn_until(lambda: all(id in self.first_s for id in ids))
        return ids

    def end_all(self) -> None:
        self.engine.loop.post(Abort(list(self.engine.scheduler.sequences), "api_abort"))
        self.turn_until(lambda: self.engine.loop.idle)
        assert self.engine.scheduler.pool.held == 0


# -- abort -------------------------------------------------------------------------------


def measure_abort(desk: Desk, size: Size, rng: random.Random, trials: int) -> dict[str, Any]:
    """Abort one, half and all of the sequences, from another thread, at times independent of the loop."""
    return {
        "step_ms": step_ms(desk, size, rng),
        **{
            name: summed([abort_once(desk, size, rng, count) for _ in range(trials)])
            for name, count in (("one", 1), ("half", size.running // 2), ("all", size.running))
        },
    }


def step_ms(desk: Desk, size: Size, rng: random.Random) -> float:
    desk.load(size, rng, max_tokens=200)
    start = len(desk.landings_s)
    desk.turn_until(lambda: len(desk.landings_s) >= start + 50)
    desk.end_all()
    times = desk.landings_s[start:]
    return median((b - a) * 1000 for a, b in pairwise(times))


@dataclass(frozen=True, slots=True)
class Freed:
    ms: float
    steps: int  # completed meanwhile


def abort_once(desk: Desk, size: Size, rng: random.Random, count: int) -> Freed:
    ids = desk.load(size, rng, max_tokens=200)
    chosen, scheduler = rng.sample(ids, count), desk.engine.scheduler
    sent: list[tuple[float, int]] = []

    def send() -> None:
        sent.append((time.perf_counter(), len(desk.landings_s)))
        desk.engine.loop.post(Abort(chosen, "api_abort"))

    timer = threading.Timer(rng.uniform(0.01, 0.02), send)
    timer.start()
    desk.turn_until(lambda: all(id in desk.ended for id in chosen) and not scheduler.returning)
    freed_s, steps = time.perf_counter(), len(desk.landings_s)
    assert all(desk.ended[id] == "abort" for id in chosen)
    assert scheduler.pool.held == len({block for seq in scheduler.sequences.values() for block in seq.blocks})
    desk.end_all()
    return Freed((freed_s - sent[0][0]) * 1000, steps - sent[0][1])


def summed(found: list[Freed]) -> dict[str, Any]:
    times = [each.ms for each in found]
    return {"median_ms": median(times), "worst_ms": max(times), "steps": [each.steps for each in found]}


# -- update ------------------------------------------------------------------------------


def graphs_of(engine: Engine) -> dict[Any, Any]:
    """The captured graphs, by size; none on a device without graphs."""
    graphs = engine.executor._runner._graphs  # type: ignore[attr-defined]
    return {} if graphs is None else dict(graphs.decode._captured)


def addresses_of(engine: Engine) -> list[int]:
    runner = engine.executor._runner  # type: ignore[attr-defined]
    weights = [parameter.tensor for _, parameter in runner.model.parameters()]
    return [tensor.data_ptr() for tensor in [*weights, *(cache for layer in runner.kv for cache in layer)]]


def measure_update(
    desk: Desk, size: Size, rng: random.Random, source: Source, mode: PauseMode, trials: int, old: list[int]
) -> dict[str, Any]:
    """Update under load; after a freeze the streams continue with recomputed KV. `old` are earlier answers."""
    rounds, answers = [], []
    graphs, addresses = graphs_of(desk.engine), addresses_of(desk.engine)
    for _ in range(trials):
        ids = desk.load(size, rng, max_tokens=200)
        version = desk.engine.scheduler.version + 1
        _, pause_ms = desk.timed(Pause(mode, timeout_s=60.0))
        told, update_ms = desk.timed(UpdateWeights(source, version=version))
        _, resume_ms = desk.timed(Resume())
        assert told.version == version
        rounds.append(
            {
                "pause_ms": pause_ms,
                "update_ms": update_ms,
                "resume_ms": resume_ms,
                "all_ms": pause_ms + update_ms + resume_ms,
                "next_token_ms": next_token_ms(desk, size, ids, mode, rng),
            }
        )
        desk.end_all()
        answers.append(probe(desk, size))
    after = graphs_of(desk.engine)
    return {
        "rounds": rounds,
        "all_ms": median(each["all_ms"] for each in rounds),
        "target_ms": TARGET_UPDATE_MS,
        "weights_changed": all(answer == answers[0] != old for answer in answers),
        "graphs": len(graphs),
        "graphs_captured_again": sum(after.get(key) is not graph for key, graph in graphs.items()),
        "addresses_kept": addresses_of(desk.engine) == addresses,
    }


def probe(desk: Desk, size: Size) -> list[int]:
    return desk.answered(desk.submit([[i % size.vocab for i in range(size.prompt)]], 16, lambda _: "probe"))[0]


def next_token_ms(desk: Desk, size: Size, ids: list[int], mode: PauseMode, rng: random.Random) -> float:
    """Time from the resume to the next token, of a held request or of a new one."""
    began_s = time.perf_counter()
    if mode == "freeze":
        before = sum(len(desk.tokens[id]) for id in ids)
        desk.turn_until(lambda: sum(len(desk.tokens[id]) for id in ids) > before)
    else:
        (id,) = desk.submit([[rng.randrange(size.vocab) for _ in range(size.prompt)]], 1, lambda _: "next")
        desk.turn_until(lambda: id in desk.first_s)
    return (time.perf_counter() - began_s) * 1000


# -- prefix ------------------------------------------------------------------------------


def measure_prefix(desk: Desk, size: Size, rng: random.Random, trials: int) -> dict[str, Any]:
    rounds = [prefix_round(desk, size, rng) for _ in range(trials)]
    told = {
        wave: {
            key: median(each[wave][key] for each in rounds)
            for key in ("median_ms", "p99_ms", "all_ms", "cached_tokens")
        }
        for wave in rounds[0]
    }
    nothing, first, second = (told[wave]["median_ms"] for wave in ("nothing_shared", "first", "second"))
    return {
        "requests": size.running,
        "shared_tokens": size.shared,
        "own_tokens": size.own,
        **told,
        "second_to_nothing_shared": second / nothing,
        "second_to_first": second / first,
        "first_to_nothing_shared": first / nothing,
        "target": TARGET_RATIO,
    }


def prefix_round(desk: Desk, size: Size, rng: random.Random) -> dict[str, dict[str, float]]:
    """Each wave has the same prefix, followed by different tokens."""
    prefix, mark = [rng.randrange(size.vocab) for _ in range(size.shared)], rng.random()
    waves = {"nothing_shared": lambda i: f"{mark} {i}", "first": lambda _: f"{mark}", "second": lambda _: f"{mark}"}
    return {name: wave(desk, size, rng, prefix, salts) for name, salts in waves.items()}


def wave(
    desk: Desk, size: Size, rng: random.Random, prefix: list[int], salts: Callable[[int], str]
) -> dict[str, float]:
    prompts = [prefix + [rng.randrange(size.vocab) for _ in range(size.own)] for _ in range(size.running)]
    finish(desk)
    ids = desk.submit(prompts, 1, salts)
    desk.answered(ids)
    desk.turn_until(lambda: desk.engine.loop.idle)
    times = sorted((desk.first_s[id] - desk.asked_s) * 1000 for id in ids)
    return {
        "median_ms": median(times),
        "p99_ms": quantiles(times, n=100, method="inclusive")[98],
        "all_ms": times[-1],
        "cached_tokens": median(desk.cached[id] for id in ids),
    }


def finish(desk: Desk) -> None:
    if desk.engine.info.device.startswith("cuda"):
        torch.cuda.synchronize()


# -- all of it ---------------------------------------------------------------------------


def measure(shape: str, device: str, trials: int, **settings: Any) -> dict[str, Any]:
    size, rng, desk = SIZES[shape], random.Random(0), Desk()
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config("qwen3", "bfloat16") | size.config
        Path(folder, "config.json").write_text(json.dumps(config))
        # Started first, so that the engine sizes its cache by the memory that is left.
        with trainer(Path(folder), device) as source:
            engine = build_engine(
                Path(folder),
                EngineConfig(device=device, max_running=size.running, **{**size.engine, **settings}),
                desk.hear,
            )
            try:
                desk.watch(engine)
                spare_the_collector()  # as in an engine process
                return told(shape, engine, desk, size, rng, source, trials)
            finally:
                engine.close()


def told(
    shape: str, engine: Engine, desk: Desk, size: Size, rng: random.Random, source: Source, trials: int
) -> dict[str, Any]:
    desk.load(size, rng, max_tokens=40)  # warm-up: kernels are compiled at the first step of their kind
    desk.end_all()
    desk.answered(desk.submit([[1] * (size.shared + size.own)] * 2, 2, str))
    result = {
        "shape": shape,
        "device": torch.cuda.get_device_name() if engine.info.device.startswith("cuda") else engine.info.device,
        "torch": torch.__version__,
        "run_ahead": engine.loop._run_ahead,
        "abort": say("abort", measure_abort(desk, size, rng, trials)),
        "prefix": say("prefix", measure_prefix(desk, size, rng, trials)),
    }
    old = probe(desk, size)
    for mode in ("freeze", "abort"):
        name = f"update, pause {mode}"
        result[name] = say(name, measure_update(desk, size, rng, source, mode, trials, old))
    return result


def say(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SIZES], default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--run-ahead", type=int, help="steps on the device at once")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, torch.device(options.device))
        return
    parallelism.open_source = open_random  # type: ignore[assignment]
    found = json.dumps(measure(options.shape, options.device, options.trials, run_ahead=options.run_ahead), indent=1)
    print(found)
    if options.out:
        options.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
