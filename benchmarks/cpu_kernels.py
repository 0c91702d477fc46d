"""Compares the CPU kernels with torch and with the limits of the machine, and prints JSON.

    python benchmarks/cpu_kernels.py [--models qwen3-0.6b] [--rows 1 8 64] [--isa avx512-bf16] [--threads 2]

The two floors are measured in the same run: the time to read the weights once at the read bandwidth of all threads,
and the time of the arithmetic at the peak rate of register-to-register multiplication. Each figure is the best of
several undisturbed repeats, because the machine is shared. Weights rotate through enough copies that none is cached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headgate.layers.cpu import Kernels, NotCompiled, load_kernels

MATRICES = {
    "qwen3-0.6b": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "lm_head": (151936, 1024),
    },
    "smollm2-135m": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate_up": (3072, 576),
        "down": (576, 1536),
        "lm_head": (49152, 576),
    },
}
LAYERS = {"qwen3-0.6b": 28, "smollm2-135m": 30}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_BYTES = 1 << 29  # total size of the rotating copies: many times any cache
READ_BYTES = 1 << 30  # read by the bandwidth probe, about the size of the model


def best_s(work: Callable[[], object], seconds: float, serial: bool = False) -> float:
    """The shortest of several undisturbed runs, or infinity if there was none.

    One thread (or `serial` work, too little to share) is timed by its CPU time, which other processes do not affect.
    Several threads wait for each other, so a run counts only if all of them had a core throughout (waiting threads
    spin, so they use CPU time too); otherwise it would measure how long the kernel made a thread wait. The search for
    an undisturbed run takes up to ten times `seconds`.
    """
    threads = 1 if serial else torch.get_num_threads()
    work()
    best, start = float("inf"), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or (best == float("inf") and elapsed < 10 * seconds):
        wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        work()
        wall, cpu, own = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own
        if threads == 1:
            best = min(best, own)
        elif cpu >= 0.9 * threads * wall:
            best = min(best, wall)
    return best


def rounded(value: float, digits: int = 4) -> float | None:
    return None if math.isinf(value) or math.isnan(value) else round(value, digits)


class Floors:
    """The best rates so far. Measured repeatedly, because other load on the machine can halve them for a while."""

    def __init__(self, k: Kernels, dtype: torch.dtype) -> None:
        self.bytes_per_s = self.operations_per_s = math.nan  # until a probe ran undisturbed
        self._read, self._k, self._dtype = k.probe_read(READ_BYTES), k, dtype

    def measure(self) -> None:
        operations = self._k.probe_multiply(self._dtype, 200_000)
        read_s = best_s(self._read, 0.1)
        multiply_s = best_s(lambda: self._k.probe_multiply(self._dtype, 200_000), 0.02)
        if math.isfinite(read_s):
            self.bytes_per_s = max(READ_BYTES / read_s, self.bytes_per_s)
        if math.isfinite(multiply_s):
            self.operations_per_s = max(operations / multiply_s, self.operations_per_s)


def copies(make: Callable[[], Tensor]) -> Iterator[Tensor]:
    first = make()
    count = max(1, min(200, COLD_BYTES // first.nbytes))
    return cycle([first, *(make() for _ in range(count - 1))])


def time_linear(
    k: Kernels, name: str, N: int, K: int, rows: list[int], dtype: torch.dtype, floors: Floors, seconds: float
) -> Iterator[dict[str, Any]]:
    plain = copies(lambda: torch.randn(N, K).to(dtype))

    def packed() -> Tensor:
        room = k.empty_packed(N, K, dtype)
        k.pack_into(room, next(plain))
        return room

    ours = copies(packed)
    for M in rows:
        floors.measure()
        yield {"matrix": name, "rows": M, "shape": [N, K]} | time_product(k, name, N, M, K, ours, plain, seconds)


def time_product(
    k: Kernels, name: str, N: int, M: int, K: int, ours: Iterator[Tensor], plain: Iterator[Tensor], seconds: float
) -> dict[str, float]:
    x = torch.randn(M, K).to(next(plain).dtype)
    out_dtype = torch.float32 if name == "lm_head" else x.dtype
    out = torch.empty(M, N // 2 if name == "gate_up" else N, dtype=out_dtype)
    if name == "gate_up":
        ours_s = best_s(lambda: k.linear_silu_mul(x, next(ours), N // 2, out=out), seconds)
    else:
        ours_s = best_s(lambda: k.linear(x, next(ours), N, None, out_dtype, out=out), seconds)
    torch_s = best_s(lambda: F.linear(x, next(plain)), seconds)
    return {"ours_ms": ours_s * 1e3, "torch_ms": torch_s * 1e3}


def add_floors(row: dict[str, Any], itemsize: int, floors: Floors) -> None:
    N, K = row["shape"]
    by_bandwidth = N * K * itemsize / floors.bytes_per_s * 1e3
    by_peak = 2 * row["rows"] * N * K / floors.operations_per_s * 1e3
    row["bandwidth_floor_ms"], row["peak_floor_ms"] = by_bandwidth, by_peak
    row["of_floor"] = max(by_bandwidth, by_peak) / row["ours_ms"]


def steps(table: list[dict[str, Any]], layers: int, rows: list[int]) -> list[dict[str, float]]:
    """All matrix products of one step: the layers' and the head's."""

    def total(M: int, key: str) -> float:
        return sum(row[key] * (1 if row["matrix"] == "lm_head" else layers) for row in table if row["rows"] == M)

    keys = ("ours_ms", "torch_ms", "bandwidth_floor_ms", "peak_floor_ms")
    return [{"rows": M} | {key: total(M, key) for key in keys} for M in rows]


def time_attention(
    k: Kernels, batch: int, query: int, context: int, dtype: torch.dtype, seconds: float
) -> dict[str, object]:
    layers, H, HK, D, block = 28, 16, 8, 128, 32
    width = -(-context // block)
    caches = [k.empty_kv(batch * width, block, HK, D, dtype) for _ in range(layers)]
    for keys, values in caches:
        keys.normal_()
        values.normal_()
    tables = torch.randperm(batch * width).view(batch, width).int()
    q = torch.randn(batch * query, H, D).to(dtype)
    starts = (torch.arange(batch + 1) * query).int()
    contexts = torch.full((batch,), context, dtype=torch.int32)

    def step() -> None:
        for keys, values in caches:
            k.attention(q, keys, values, starts, contexts, tables, D**-0.5)

    kv_bytes = sum(keys.nbytes + values.nbytes for keys, values in caches)
    spent = best_s(step, seconds)
    return {
        "batch": batch,
        "query": query,
        "context": context,
        "28_layers_ms": spent * 1e3,
        "kv_gb_per_s": kv_bytes / spent / 1e9,
        "tflops": layers * batch * query * (context - query / 2) * H * D * 4 / spent / 1e12,
    }


def time_small(k: Kernels, rows: int, seconds: float) -> dict[str, float]:
    """Microseconds of the small operations, in the 0.6B shape."""
    H, HK, D = 16, 8, 128
    cos = sin = torch.randn(1024, D)
    x, residual, weight = (torch.randn(rows, 1024).bfloat16() for _ in range(3))
    k_cache, v_cache = k.empty_kv(64, 32, HK, D, torch.bfloat16)
    qkv = torch.randn(rows, (H + 2 * HK) * D).bfloat16()
    positions, slots, norm = torch.arange(rows), torch.arange(rows) * 40, torch.randn(D).bfloat16()
    logits = torch.randn(rows, 151936) * 4
    ones, none, keys = torch.ones(rows), torch.zeros(rows), torch.arange(rows)
    off = torch.zeros(rows, dtype=torch.int32)
    rope = (qkv, positions, cos, sin, norm, norm, 1e-6, k_cache, v_cache, slots, H, HK, D)
    cases: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: k.add_rms_norm(x, residual, weight[0], 1e-6),
        "rope_and_write": lambda: k.rope_and_write(*rope),
        "greedy": lambda: k.sample(logits, none, off, ones, none, keys),
        "sample": lambda: k.sample(logits, ones, off, ones, none, keys),
        "sample_top_k_top_p": lambda: k.sample(logits, ones, off + 50, ones * 0.9, none, keys),
        "sample_top_p": lambda: k.sample(logits, ones, off, ones * 0.95, none, keys),
        "log_softmax_stats": lambda: k.log_softmax_stats(logits),
    }
    return {f"{name}_us": best_s(work, seconds, serial=rows == 1) * 1e6 for name, work in cases.items()}


def plain(value: Any) -> Any:
    """For JSON: rounded numbers, and null where no undisturbed run was found."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return rounded(value) if isinstance(value, float) else value


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--isa")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    k = load_kernels(asked.isa)
    if isinstance(k, NotCompiled):
        raise SystemExit(k.reason)
    dtype: torch.dtype = getattr(torch, asked.dtype)
    floors = Floors(k, dtype)
    models = {
        model: [
            row
            for name, (N, K) in MATRICES[model].items()
            for row in time_linear(k, name, N, K, asked.rows, dtype, floors, asked.seconds)
        ]
        for model in asked.models
    }
    attention = [
        time_attention(k, batch, query, context, dtype, asked.seconds)
        for batch, query, context in ((1, 1, 512), (8, 1, 512), (32, 1, 512), (1, 1, 4096), (1, 512, 512))
    ]
    floors.measure()
    for row in (row for table in models.values() for row in table):
        add_floors(row, dtype.itemsize, floors)
    environment = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "isa": k.isa,
        "dtype": asked.dtype,
        "torch": torch.__version__,
        "read_gb_per_s": round(floors.bytes_per_s / 1e9, 1),
        "peak_gflops": round(floors.operations_per_s / 1e9, 1),
        # A product that beats a floor means that the floor was measured wrongly, not that the product is good.
        "floors_hold": not any(row["of_floor"] > 1.03 for table in models.values() for row in table),
    }
    x = torch.ones(1, 16)
    report = {
        "environment": environment,
        "step": {model: steps(table, LAYERS[model], asked.rows) for model, table in models.items()},
        "linear": models,
        "attention": attention,
        "small": {rows: time_small(k, rows, asked.seconds) for rows in (1, 32)},
        "call_us": best_s(lambda: k.rms_norm(x, x[0], 1e-6, x), asked.seconds, serial=True) * 1e6,
    }
    print(json.dumps(plain(report), indent=1))


if __name__ == "__main__":
    main()
