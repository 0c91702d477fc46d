"""Profiles large batches on a GPU: `python -m benchmarks.gpu.steps --rows 512,2048 --work 1000,1000,768`.

Two views of the same engine, with random weights. `--rows` captures one decode step of that many sequences and lists
the device time of its kernels by part (attention, matrix products, sampling ...) with the floor of each. `--work
IN,OUT,REQUESTS` runs whole requests through scheduler, executor and runner in this process and reports the time
between completed steps by kind of step, with the host time of `schedule`, `commit` and the launch. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from benchmarks.checkpoint import SHAPES, config_of
from benchmarks.gpu.bench import BANDWIDTH, Clients, chosen_share, open_random, params, random_prompts
from torch.profiler import ProfilerActivity, profile

import headgate.device.tensor_parallel.parallelism as parallelism
from headgate.config import FP8, EngineConfig
from headgate.engine.build import build_engine
from headgate.layers.backend import Fp8
from headgate.layers.batch import Batch, of_groups
from headgate.layers.formats import floating
from headgate.layers.triton.draw import draw_tokens
from headgate.models import Config, Network, build_model, spec_of

BLOCK_SIZE = 32
FP8_FLOPS, BF16_FLOPS = 1.5e15, 783e12
KV_BYTES = 100e9  # of GPU memory, for the largest batch
PARTS = {
    "decode_kernel": "attention",
    "prefill_kernel": "attention",
    "round": "rounding",
    "norm": "norms",
    "rope": "rotary and cache write",
    "silu": "gate",
    "chunk_kernel": "sampling",
    "winner": "sampling",
}


def part_of(kernel: str) -> str:
    return next((part for name, part in PARTS.items() if name in kernel), "matrix products")


# -- one step ---------------------------------------------------------------------------------------------------------


def random_model(shape: str, fp8: str) -> Network:
    spec = spec_of(Config(shape, config_of(shape)))
    kinds = Fp8(weights=fp8 in ("weights", "both"), kv=fp8 in ("kv", "both"))
    model = build_model(spec, device="cuda", dtype=torch.bfloat16, fp8=kinds)
    for name, parameter in model.parameters():
        noise = torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16)
        numbers = 1 + 0.1 * noise if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
        parameter.write(floating(numbers))
    return model


def decode_batch(rows: int, context: int, vocab: int, groups: int) -> Batch:
    """A step of `rows` sequences. All groups of layers use the same blocks: the values of the KV do not matter here."""
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    last = context - 1
    batch = Batch(
        tokens=torch.randint(vocab, (rows,), device="cuda"),
        positions=torch.full((rows,), last, device="cuda"),
        slots=tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        query_starts=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        max_query=1,
        max_context=context,
        order=torch.arange(rows, dtype=torch.int32, device="cuda"),
    )
    return of_groups([batch] * groups)


@torch.inference_mode()
def profile_rows(model: Network, kv: list[Any], rows: int, context: int) -> dict[str, Any]:
    batch = decode_batch(rows, context, model.spec.vocab, len(model.spec.kv_layout.windows))
    temperatures = torch.full((rows,), 0.6, device="cuda")
    keys = torch.arange(rows, device="cuda")

    def step() -> torch.Tensor:
        return draw_tokens(model.logits(model(batch, kv)), temperatures, keys)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ms = replay_ms(graph)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    parts, kernels = defaultdict[str, float](float), defaultdict[str, list[float]](list)
    for event in prof.events():
        if event.device_time > 0:
            parts[part_of(event.name)] += event.device_time / 1000
            kernels[event.name[:90]].append(event.device_time)
    top = sorted(((sum(times), len(times), name) for name, times in kernels.items()), reverse=True)[:10]
    return {
        "view": "step",
        "rows": rows,
        "context": context,
        "ms": round(ms, 3),
        "floor_ms": {part: round(floor, 3) for part, floor in step_floors(model, rows, context).items()},
        "parts_ms": {part: round(spent, 3) for part, spent in sorted(parts.items(), key=lambda item: -item[1])},
        "kernels": [[round(total / 1000, 3), count, name] for total, count, name in top],
    }


def step_floors(model: Network, rows: int, context: int) -> dict[str, float]:
    """Milliseconds for reading KV, and for reading or multiplying the matrices, whichever is longer."""
    tokens = sum(min(context, window or context) for window in model.spec.kv_layout.windows)
    read_kv = rows * tokens * model.kv_bytes_per_block(BLOCK_SIZE) / BLOCK_SIZE / BANDWIDTH
    chosen = chosen_share(model.spec)
    read, multiply = 0.0, 0.0
    for name, parameter in model.parameters():
        if len(parameter.shape) < 2 or ("embed" in name and not model.spec.tied):
            continue
        size = torch.Size(parameter.shape).numel()
        eight = "layers" in name and model.backend.name.endswith("fp8")
        share = chosen if ".experts." in name else 1.0
        read += size * (1 - (1 - share) ** rows) * (1 if eight else 2) / BANDWIDTH
        multiply += 2 * size * share * rows / (FP8_FLOPS if eight else BF16_FLOPS)
    return {"attention": read_kv * 1000, "matrix products": max(read, multiply) * 1000}


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 10


def steps_of(shape: str, fp8: str, rows: list[int], context: int) -> Iterator[dict[str, Any]]:
    model = random_model(shape, fp8)
    per_token = model.kv_bytes_per_block(BLOCK_SIZE) / BLOCK_SIZE
    most = int(KV_BYTES / per_token)
    kv = model.allocate_kv(most // BLOCK_SIZE + max(rows), BLOCK_SIZE)
    for each in rows:
        yield profile_rows(model, kv, each, min(context, most // each))


# -- whole requests ---------------------------------------------------------------------------------------------------


class Stopwatch:
    """Host time of some methods, by name."""

    def __init__(self) -> None:
        self.spent_ms: dict[str, list[float]] = defaultdict(list)

    def around(self, owner: Any, method: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.spent_ms[method].append((time.perf_counter() - began_s) * 1000)

        setattr(owner, method, timed)


def run_work(shape: str, fp8: str, work: str, how: dict[str, Any]) -> dict[str, Any]:
    given, wanted, requests = map(int, work.split(","))
    clients, watch = Clients(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)))
        settings = EngineConfig(
            device="cuda", max_context=given + wanted + 64, memory_fraction=0.9, kv_listen=None, fp8=fp8, **how
        )
        engine = clients.engine = build_engine(Path(folder), settings, clients.hear)
    rng = random.Random(1)
    clients.run(random_prompts(rng, [given] * 8), [params(16, i) for i in range(8)])
    landings: list[tuple[float, int, int]] = []  # when, tokens computed, slices
    launch = engine.executor.launch

    def noted(plan: Any) -> Any:
        future = launch(plan)
        tokens, slices = sum(plan.counts), len(plan.rows)
        future.add_done_callback(lambda _: landings.append((time.perf_counter(), tokens, slices)))
        return future

    engine.executor.launch = noted  # type: ignore[method-assign]
    watch.around(engine.scheduler, "schedule")
    watch.around(engine.scheduler, "commit")
    watch.around(engine.executor._runner, "launch")  # type: ignore[attr-defined]
    elapsed = clients.run(random_prompts(rng, [given] * requests), [params(wanted, i) for i in range(requests)])
    counters = engine.scheduler.counters
    blocks = engine.info.num_blocks
    engine.close()
    decode = [(b[0] - a[0]) * 1000 for a, b in pairwise(landings) if b[1] == b[2]]
    mixed = [((b[0] - a[0]) * 1000, b[1]) for a, b in pairwise(landings) if b[1] > b[2]]
    return {
        "view": "work",
        "work": work,
        "settings": how,
        "seconds": round(elapsed, 2),
        "output_tokens_per_s": round(clients.tokens / elapsed),
        "preemptions": counters.preemptions,
        "kv_tokens": blocks * BLOCK_SIZE // len(engine.scheduler.pool.groups),
        "decode_steps": len(decode),
        "decode_s": round(sum(decode) / 1000, 2),
        "decode_ms": [round(median(decode), 2), round(mean(decode), 2)] if decode else None,
        "mixed_steps": len(mixed),
        "mixed_s": round(sum(spent for spent, _ in mixed) / 1000, 2),
        "mixed_tokens": sum(tokens for _, tokens in mixed),
        "host_ms": {
            name: [round(median(spent), 2), round(max(spent), 2), round(sum(spent) / 1000, 2)]
            for name, spent in watch.spent_ms.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-8b")
    parser.add_argument("--fp8", choices=FP8, default="both")
    parser.add_argument("--rows", default="", help="sequences of single decode steps, such as 256,512,1024,2048")
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--work", action="append", default=[], metavar="IN,OUT,REQUESTS")
    parser.add_argument("--max-running", type=int, default=1024)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parallelism.open_source = open_random  # type: ignore[assignment]
    results: list[dict[str, Any]] = []
    how = {"max_running": arguments.max_running, "max_batch_tokens": arguments.max_batch_tokens}

    def note(result: dict[str, Any]) -> None:
        results.append({"shape": arguments.shape, "fp8": arguments.fp8} | result)
        print(json.dumps(results[-1]), flush=True)

    if arguments.rows:
        for result in steps_of(
            arguments.shape, arguments.fp8, [*map(int, arguments.rows.split(","))], arguments.context
        ):
            note(result)
        gc.collect()
        torch.cuda.empty_cache()
    for work in arguments.work:
        note(run_work(arguments.shape, arguments.fp8, work, how))
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.out:
        device = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
        path = (
            arguments.out / f"{device}-{time.strftime('%Y-%m-%d')}-steps-{arguments.shape}-fp8-{arguments.fp8}.json"
        )
        path.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
