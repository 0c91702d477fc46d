"""Profiles one decode step: `python benchmarks/gpu/profile_step.py [OUT]`.

Runs the model alone, in a CUDA graph, without the engine; `bench.py` measures the whole engine.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.checkpoint import config_of
from torch.profiler import ProfilerActivity, profile

from headgate.layers.batch import Batch
from headgate.layers.formats import floating
from headgate.models import Config, Network, build_model, spec_of

CONTEXT, BLOCK_SIZE = 640, 32
SHAPES_PROFILED = ("qwen3-0.6b", "qwen3-8b", "qwen3_moe-30b-a3b")


def random_model(shape: str) -> Network:
    spec = spec_of(Config(shape, config_of(shape)))
    model = build_model(spec, device="cuda", dtype=torch.bfloat16)
    for name, parameter in model.parameters():
        noise = torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16)
        numbers = 1 + 0.1 * noise if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
        parameter.write(floating(numbers))
    return model


def decode_batch(slices: int, vocab: int) -> Batch:
    width = CONTEXT // BLOCK_SIZE
    tables = torch.randperm(slices * width, device="cuda").int().view(slices, width)
    return Batch(
        tokens=torch.randint(vocab, (slices,), device="cuda"),
        positions=torch.full((slices,), CONTEXT - 1, device="cuda"),
        slots=tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1,
        query_starts=torch.arange(slices + 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.full((slices,), CONTEXT, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        max_query=1,
        max_context=CONTEXT,
    )


@torch.inference_mode()
def profile_shape(shape: str) -> list[dict[str, Any]]:
    model = random_model(shape)
    kv = model.allocate_kv(256 * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    for cache in kv:
        cache.k.normal_(), cache.v.normal_()
    return [profile_batch(shape, model, kv, slices) for slices in (1, 8, 64, 256)]


def profile_batch(shape: str, model: Network, kv: list[Any], slices: int) -> dict[str, Any]:
    batch = decode_batch(slices, model.spec.vocab)

    def step() -> torch.Tensor:
        return model.logits(model(batch, kv))

    start = time.perf_counter()
    assert torch.isfinite(step()).all()
    compiled_s = time.perf_counter() - start
    start = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured_s = time.perf_counter() - start
    ms = replay_ms(graph)
    start = time.perf_counter()
    graph.replay()
    replay_host_us = (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_time > 0:
            kernels[event.name[:70]].append(event.device_time)
    table = sorted(((sum(times), len(times), name) for name, times in kernels.items()), reverse=True)
    print(
        f"{shape} batch {slices}: {ms:.3f} ms; first {compiled_s:.1f} s, capture {captured_s:.2f} s,"
        f" replay call {replay_host_us:.0f} us; {sum(n for _, n, _ in table)} kernels"
    )
    for total, count, name in table[:12]:
        print(f"   {total:8.1f} us {count:4d} x {total / count:7.2f}  {name}")
    return {"shape": shape, "batch": slices, "ms": ms, "kernels": table}


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    for _ in range(3):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 20


if __name__ == "__main__":
    results = [row for shape in SHAPES_PROFILED for row in profile_shape(shape)]
    if len(sys.argv) > 1:
        Path(sys.argv[1], "profile.json").write_text(json.dumps(results, indent=1))
