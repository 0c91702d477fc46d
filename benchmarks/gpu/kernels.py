"""Finds the fastest tile sizes of the kernels on this device: `python benchmarks/gpu/kernels.py [OUT]`.

Every candidate is first checked against torch, then timed in a CUDA graph, with more weights and KV than fit in the
cache of the device. Prints the best of each and writes all of them as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headgate.layers.backend import KV, Heads, Matrix, Softmax
from headgate.layers.batch import Batch
from headgate.layers.formats import Floating
from headgate.layers.torch_backend import TorchBackend
from headgate.layers.triton.attention import Program, Scratch, Tile, decode, prefill
from headgate.layers.triton.elementwise import gate_mul
from headgate.layers.triton.matmul import Cut, invariant_cut, small_linear, vector_linear

# Compiling takes most of the time: several processes compile a share each before one process does the timing.
SHARD, SHARDS = (int(part) for part in os.environ.get("SHARD", "0/1").split("/"))
CANDIDATES = count()
CUDA = torch.device("cuda")
# Batch, and whether contexts are mixed or all the same.
DECODES = (
    (1, False),
    (8, False),
    (64, False),
    (256, False),
    *((batch, True) for batch in (24, 40, 64, 96, 128, 256)),
)
BF16 = torch.bfloat16
SHAPES = {
    "0.6b": {"hidden": 1024, "q": 2048, "kv": 1024, "intermediate": 3072},
    "8b": {"hidden": 4096, "q": 4096, "kv": 1024, "intermediate": 12288},
}


def time_us(work: list[Callable[[], object]], repeats: int = 20) -> float:
    """Microseconds per item of `work`, all of it in one graph."""
    if SHARDS > 1:  # this process only fills Triton's cache
        work[0]()
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for item in work[:2]:
            item()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in work:
            item()
    for _ in range(3):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000 / len(work)


def mine() -> bool:
    """Whether this process handles the next candidate."""
    return next(CANDIDATES) % SHARDS == SHARD


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def whole(weight: torch.Tensor) -> Matrix:
    return Matrix(weight, *weight.shape, Floating(weight.dtype))


def matrices(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {
        "qkv": (shape["q"] + 2 * shape["kv"], shape["hidden"]),
        "out": (shape["hidden"], shape["q"]),
        "gate_up": (2 * shape["intermediate"], shape["hidden"]),
        "down": (shape["hidden"], shape["intermediate"]),
    }


def bench_linear(results: list[dict[str, Any]]) -> None:
    for model, shape in SHAPES.items():
        for name, (rows, columns) in matrices(shape).items():
            copies = max(4, min(40, 400_000_000 // (rows * columns * 2)))
            weights = [torch.randn(rows, columns, device=CUDA, dtype=BF16) / columns**0.5 for _ in range(copies)]
            for tokens in (1, 8, 16):
                x = torch.randn(tokens, columns, device=CUDA, dtype=BF16)
                bench_one_linear(results, model, name, x, weights)


def bench_one_linear(
    results: list[dict[str, Any]], model: str, name: str, x: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    gated = name == "gate_up"

    def plain(w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        if not gated:
            return y
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    floor = weights[0].numel() * 2 / 4.29e6
    row = {"kernel": "linear", "model": model, "matrix": name, "rows": len(x), "floor_us": floor}
    results.append(row | {"cut": "cublas", "us": time_us([lambda w=w: F.linear(x, w) for w in weights])})
    expected = plain(weights[0])
    if len(x) == 1:
        bench_vector(results, row, x, weights, gated, expected)
        return
    for n, k, warps, stages in product((16, 32, 64), (128, 256), (4, 8), (3, 5)):
        cut = Cut(n, k, warps, stages)
        if n * k * 2 * stages * (2 if gated else 1) + 16 * k * 2 * stages > 220_000 or (n == 16 and warps == 8):
            continue
        if not mine():
            continue
        try:
            out = small_linear(x, whole(weights[0]), None, gated=gated, cut=cut)
            us = time_us([partial(small_linear, x, whole(w), None, gated=gated, cut=cut) for w in weights])
            results.append(row | {"cut": str(cut), "us": us, "error": error(out, expected)})
        except Exception as failure:
            results.append(row | {"cut": str(cut), "failure": repr(failure)[:200]})


def bench_medium(results: list[dict[str, Any]]) -> None:
    """Medium batches: cuBLAS against our own product, and which of its tilings have the same order of summation."""
    for model, shape in SHAPES.items():
        for name, (rows, columns) in matrices(shape).items():
            copies = max(4, min(40, 400_000_000 // (rows * columns * 2)))
            weights = [torch.randn(rows, columns, device=CUDA, dtype=BF16) / columns**0.5 for _ in range(copies)]
            for tokens in (32, 64, 128, 256, 8192):
                x = torch.randn(tokens, columns, device=CUDA, dtype=BF16)
                bench_one_medium(results, model, name, x, weights[:4] if tokens > 256 else weights)


def bench_one_medium(
    results: list[dict[str, Any]], model: str, name: str, x: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    rows, columns = weights[0].shape
    floor_us = max(2 * len(x) * rows * columns / 783e6, rows * columns * 2 / 4.29e6)
    row = {"kernel": "medium", "model": model, "matrix": name, "rows": len(x), "floor_us": floor_us}
    packed = [whole(weight) for weight in weights]
    for gated in (False, True) if name == "gate_up" and len(x) <= 64 else (False,):

        def library(w: torch.Tensor, gated: bool = gated) -> torch.Tensor:
            return gate_mul(F.linear(x, w)) if gated else F.linear(x, w)

        kind = row | {"gated": gated}
        results.append(kind | {"cut": "cublas", "us": time_us([partial(library, w) for w in weights])})
        invariant = small_linear(x, packed[0], None, gated=gated, cut=invariant_cut(len(x), rows, BF16))
        for cut in MEDIUM if not gated else (*MEDIUM[:3], *GATED):
            if cut.tokens > len(x) or not mine():
                continue
            run = partial(small_linear, x, bias=None, gated=gated, cut=cut)
            try:
                out = run(packed[0])
                us = time_us([partial(run, m) for m in packed], 7)
                same = bool(torch.equal(out, invariant))
                results.append(kind | {"cut": str(cut), "us": us, "error": error(out, invariant), "same_bits": same})
            except Exception as failure:
                results.append(kind | {"cut": str(cut), "failure": repr(failure)[:200]})


MEDIUM = (
    Cut(64, 128, 4, 4, tokens=32),
    Cut(64, 64, 4, 4, tokens=32),
    Cut(64, 64, 4, 4, tokens=64),
    Cut(64, 128, 4, 4, tokens=64),
    Cut(64, 64, 8, 4, tokens=128),
    Cut(64, 128, 8, 4, tokens=128),
    Cut(128, 64, 8, 4, tokens=128),
    Cut(128, 128, 8, 3, tokens=128),
    Cut(256, 64, 8, 4, tokens=128),
    Cut(128, 64, 8, 4, tokens=256),
    Cut(64, 64, 8, 5, tokens=256),
)
GATED = (
    Cut(32, 128, 4, 3, tokens=32),
    Cut(32, 128, 4, 4, tokens=32),
    Cut(32, 64, 4, 5, tokens=32),
    Cut(16, 128, 4, 4, tokens=32),
    Cut(32, 64, 4, 4, tokens=64),
    Cut(32, 128, 4, 4, tokens=64),
    Cut(64, 64, 8, 4, tokens=64),
)


def bench_vector(
    results: list[dict[str, Any]],
    row: dict[str, Any],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    gated: bool,
    expected: torch.Tensor,
) -> None:
    for rows_each, step, warps in product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8)):
        if not 2048 <= rows_each * step <= 16384 or step > x.shape[1] or not mine():
            continue

        cut = Cut(rows_each, step, warps, 1)
        run = partial(vector_linear, x, bias=None, gated=gated, cut=cut)
        try:
            out = run(whole(weights[0]))
            us = time_us([partial(run, whole(w)) for w in weights])
            results.append(row | {"cut": str(cut), "us": us, "error": error(out, expected)})
        except Exception as failure:
            results.append(row | {"cut": str(cut), "failure": repr(failure)[:200]})


def paged(
    contexts: list[int], queries: list[int], heads: Heads, layers: int, block_size: int
) -> tuple[list[KV], Batch]:
    need = [-(-c // block_size) for c in contexts]
    blocks = random.Random(0).sample(range(sum(need)), sum(need))
    tables = torch.zeros(len(contexts), max(need), dtype=torch.int32)
    for i, n in enumerate(need):
        tables[i, :n] = torch.tensor([blocks.pop() for _ in range(n)])
    shape = (sum(need), heads.kv, block_size, heads.size)
    kvs = [KV(*(torch.randn(shape, device=CUDA, dtype=BF16) for _ in range(2))) for _ in range(layers)]
    zeros = torch.zeros(sum(queries), dtype=torch.int64, device=CUDA)
    batch = Batch(
        zeros,
        zeros,
        zeros,
        torch.tensor([0, *queries]).cumsum(0).int().to(CUDA),
        torch.tensor(contexts, dtype=torch.int32, device=CUDA),
        tables.to(CUDA),
        max(queries),
        max(contexts),
    )
    return kvs, batch


def reference(q: torch.Tensor, kv: KV, batch: Batch, heads: Heads) -> torch.Tensor:
    plain = KV(*(cache.transpose(1, 2).contiguous() for cache in kv))
    return TorchBackend(CUDA, BF16, heads).attention(q, plain, batch, Softmax(scale=heads.size**-0.5))


def bench_decode(results: list[dict[str, Any]]) -> None:
    rng = random.Random(1)
    for query_heads, (batch_size, mixed) in product((16, 32), DECODES):
        heads = Heads(query_heads, 8, 128)
        contexts = [rng.randint(100, 2000) if mixed else 640 for _ in range(batch_size)]
        contexts.sort(reverse=True)  # as the engine orders them
        layers = max(2, min(40, int(400e6 / (sum(contexts) * 4096))))
        kvs, batch = paged(contexts, [1] * batch_size, heads, layers, 32)
        q = torch.randn(batch_size, query_heads, 128, device=CUDA, dtype=BF16)
        expected = reference(q, kvs[0], batch, heads)
        row = {
            "kernel": "decode",
            "heads": query_heads,
            "batch": batch_size,
            "mixed": mixed,
            "floor_us": sum(contexts) * 4096 / 4.29e6,
        }
        scratch = Scratch(CUDA)
        splits_tried = (4, 16, 64) if batch_size == 1 else (2, 4, 16) if batch_size == 8 else (1, 2, 4)
        for splits, warps, stages in product(splits_tried, (1, 2, 4), (2, 3, 4, 6)):
            if mine():
                program = Program(warps, stages)
                bench_one_decode(results, row | {"splits": splits}, q, kvs, batch, heads, scratch, program, expected)


def bench_one_decode(
    results: list[dict[str, Any]],
    row: dict[str, Any],
    q: torch.Tensor,
    kvs: list[KV],
    batch: Batch,
    heads: Heads,
    scratch: Scratch,
    program: Program,
    expected: torch.Tensor,
) -> None:
    splits = row["splits"]

    def run(kv: KV) -> torch.Tensor:
        return decode(q, kv, batch, Softmax(scale=heads.size**-0.5), heads, scratch, splits=splits, program=program)

    try:
        out = run(kvs[0])
        us = time_us([lambda kv=kv: run(kv) for kv in kvs], 10)
        again = run(kvs[0])
        results.append(
            row | {"cut": str(program), "us": us, "error": max(error(out, expected), error(again, expected))}
        )
    except Exception as failure:
        results.append(row | {"cut": str(program), "failure": repr(failure)[:200]})


def bench_prefill(results: list[dict[str, Any]]) -> None:
    for query_heads, (length, slices) in product((16, 32), ((512, 16), (8192, 1))):
        heads = Heads(query_heads, 8, 128)
        kvs, batch = paged([length] * slices, [length] * slices, heads, 2, 32)
        q = torch.randn(length * slices, query_heads, 128, device=CUDA, dtype=BF16)
        expected = reference(q, kvs[0], batch, heads)
        flops = 2 * length * length * slices * query_heads * 128
        row = {"kernel": "prefill", "heads": query_heads, "length": length, "floor_us": flops / 783e6}
        for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            if not mine():
                continue
            tile = Tile(rows, keys, warps, stages)
            try:
                out = prefill(q, kvs[0], batch, 128**-0.5, None, heads, tile=tile)
                us = time_us([partial(prefill, q, kv, batch, 128**-0.5, None, heads, tile=tile) for kv in kvs], 5)
                results.append(row | {"cut": str(tile), "us": us, "error": error(out, expected)})
            except Exception as failure:
                results.append(row | {"cut": str(tile), "failure": repr(failure)[:200]})


def bench_single(results: list[dict[str, Any]]) -> None:
    """Decode steps with the prefill kernel, as in deterministic mode."""
    for query_heads, batch_size in product((16, 32), (8, 64, 256)):
        heads = Heads(query_heads, 8, 128)
        kvs, batch = paged([640] * batch_size, [1] * batch_size, heads, max(2, 400_000 // (batch_size * 4096)), 32)
        q = torch.randn(batch_size, query_heads, 128, device=CUDA, dtype=BF16)
        row = {"kernel": "single", "heads": query_heads, "batch": batch_size}
        row["floor_us"] = batch_size * 640 * 4096 / 4.29e6
        usual = prefill(q, kvs[0], batch, 128**-0.5, None, heads)
        for rows, keys, warps, stages in product((64,), (32, 64, 128), (4,), (2, 3, 4, 5)):
            if keys * 512 * stages > 200_000 or not mine():
                continue
            tile = Tile(rows, keys, warps, stages)
            out = prefill(q, kvs[0], batch, 128**-0.5, None, heads, tile=tile)
            us = time_us([partial(prefill, q, kv, batch, 128**-0.5, None, heads, tile=tile) for kv in kvs], 7)
            results.append(row | {"cut": str(tile), "us": us, "same_bits": bool(torch.equal(out, usual))})


def print_best(results: list[dict[str, Any]]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        what = {
            k: v
            for k, v in result.items()
            if k not in ("cut", "us", "error", "failure", "splits", "floor_us", "same_bits")
        }
        groups.setdefault(json.dumps(what), []).append(result)
    for what, group in groups.items():
        done = sorted((r for r in group if "us" in r), key=lambda r: r["us"])
        wrong = [r["cut"] for r in done if r.get("error", 0) > 0.01]
        baseline = [r["us"] for r in done if r["cut"] == "cublas"]
        best = "; ".join(f"{r['us']:.2f} {r.get('splits', '')} {r.get('same_bits', '')} {r['cut']}" for r in done[:4])
        print(
            what, f"floor {group[0]['floor_us']:.2f}", f"cublas {baseline}", best, f"WRONG {wrong}" if wrong else ""
        )
        if failures := [r["failure"] for r in group if "failure" in r]:
            print("   failures", len(failures), failures[0][:120])


def main() -> None:
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    chosen = os.environ.get("BENCHES", "linear decode prefill").split()
    benches = {
        "linear": bench_linear,
        "medium": bench_medium,
        "decode": bench_decode,
        "prefill": bench_prefill,
        "single": bench_single,
    }
    for bench in map(benches.__getitem__, chosen):
        bench(results)
        if len(sys.argv) > 1 and SHARDS == 1:
            Path(sys.argv[1], "kernels.json").write_text(json.dumps(results, indent=1))
    if SHARDS == 1:
        print_best(results)


if __name__ == "__main__":
    main()
