"""Finds the fastest tilings of experts on this device: `python -m benchmarks.gpu.experts [OUT]`.

Every kernel is checked against the reference, then timed in a CUDA graph over several layers, so that no weight is in
the cache of the device. Prints the best tilings for each number of tokens beside the time that reading the chosen
experts takes, and writes all of them as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.kernels import error, time_us

from headgate.layers.backend import Heads, Routed, Routing
from headgate.layers.experts import compute_one_by_one
from headgate.layers.torch_backend import TorchBackend
from headgate.layers.triton import experts
from headgate.layers.triton.experts import GroupCut, PairCut
from headgate.layers.triton.launch import compiled_at_once
from headgate.layers.triton_backend import TritonBackend

EXPERTS, HIDDEN, WIDTH, TOP = 128, 2048, 768, 8  # Qwen3-30B-A3B
LAYERS = 6
BANDWIDTH, FLOPS = 4.29e12, 783e12
SHARED_MEMORY = 220 * 1024
CUDA, BF16, HEADS = torch.device("cuda"), torch.bfloat16, Heads(32, 4, 128)
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)
GROUP_CUTS = [
    GroupCut(rows, columns, tokens, warps, stages, bulk)
    for bulk in (False, True)
    for tokens in (16, 32, 64, 128, 256)
    for rows, columns, warps, stages in (
        *((32, 128, 4, 4), (32, 256, 4, 4), (64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 4, 3), (64, 128, 4, 5)),
        *((64, 256, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3)),
    )
]
PAIR_CUTS = [
    PairCut(rows, columns, warps)
    for rows in (1, 2, 4, 8)
    for columns in (256, 512, 1024, 2048)
    for warps in (2, 4, 8)
    if rows * columns <= 8192 and rows * columns >= 1024
]


class Layer:
    def __init__(self, backend: TritonBackend) -> None:
        self.gate_up = backend.expert_gate_up_matrices(EXPERTS, WIDTH, HIDDEN)
        self.down = backend.expert_matrices(EXPERTS, HIDDEN, WIDTH)
        for matrices in (self.gate_up, self.down):
            assert matrices.stacked is not None
            matrices.stacked.normal_(std=matrices.stacked.shape[-1] ** -0.5)


class Case:
    """Some tokens and, for each layer, their experts."""

    def __init__(self, backend: TritonBackend, layers: list[Layer], count: int) -> None:
        self.count = count
        self.x = torch.randn(count, HIDDEN, device=CUDA, dtype=BF16)
        self.inner = torch.randn(count * TOP, WIDTH, device=CUDA, dtype=BF16)
        logits = (torch.randn(count, EXPERTS, device=CUDA) for _ in layers)
        self.each = list(zip(layers, (backend.route(l, Routing(top=TOP), None) for l in logits), strict=True))  # noqa: E741

    def group_product(self, cut: GroupCut, gated: bool) -> list[Callable[[], object]]:
        def product(layer: Layer, routed: Routed) -> Callable[[], object]:
            groups = experts.group_pairs(routed.ids, EXPERTS, cut.tokens)
            inner = torch.randn(len(groups.pairs), WIDTH, device=CUDA, dtype=BF16)
            outer = torch.empty(self.count * TOP, HIDDEN, device=CUDA, dtype=BF16)
            if gated:
                return lambda: experts.multiply_groups(self.x, layer.gate_up, groups, cut, inner, top=TOP, gated=True)
            return lambda: experts.multiply_groups(inner, layer.down, groups, cut, outer, top=1, gated=False)

        return [product(layer, routed) for layer, routed in self.each]

    def pair_product(self, cut: PairCut, gated: bool) -> list[Callable[[], object]]:
        def product(layer: Layer, routed: Routed) -> Callable[[], object]:
            if gated:
                return lambda: experts.multiply_gate_up(self.x, layer.gate_up, routed, cut=cut)
            return lambda: experts.multiply_down(self.inner, layer.down, routed, cut)

        return [product(layer, routed) for layer, routed in self.each]

    def whole(self) -> list[Callable[[], object]]:
        return [lambda a=a, r=r: experts.compute(self.x, a.gate_up, a.down, r) for a, r in self.each]

    def grouping(self) -> list[Callable[[], object]]:
        return [lambda r=r: experts.group_pairs(r.ids, EXPERTS, 32) for _, r in self.each]

    def floor_us(self, gated: bool) -> float:
        used = sum(len(routed.ids.unique()) for _, routed in self.each) / len(self.each)
        numbers = 2 * WIDTH * HIDDEN if gated else HIDDEN * WIDTH
        return max(used * numbers * 2 / BANDWIDTH, self.count * TOP * numbers * 2 / FLOPS) * 1e6

    def check(self) -> None:
        layer, routed = self.each[0]
        reference = TorchBackend(CUDA, BF16, HEADS)
        expected = compute_one_by_one(reference, self.x, layer.gate_up, layer.down, routed)
        for each in experts.TILINGS:
            found = experts.compute_grouped(self.x, layer.gate_up, layer.down, routed, None, each[1:])
            assert error(found, expected) < 1e-2
        assert error(experts.compute(self.x, layer.gate_up, layer.down, routed), expected) < 1e-2


def fits(cut: GroupCut, gated: bool) -> bool:
    weights = (2 if gated else 1) * cut.rows * cut.columns
    sums = (2 if gated else 1) * cut.rows * cut.tokens / (32 * cut.warps)
    return cut.stages * (weights + cut.tokens * cut.columns) * 2 <= SHARED_MEMORY and sums <= 160


def main() -> None:
    torch.manual_seed(0)
    backend = TritonBackend(CUDA, BF16, HEADS)
    layers = [Layer(backend) for _ in range(LAYERS)]
    warm = Case(backend, layers[:1], 64)
    products = [(cut, gated) for gated in (True, False) for cut in GROUP_CUTS if fits(cut, gated)]
    works = [work for cut, gated in products for work in warm.group_product(cut, gated)]
    works += [work for cut in PAIR_CUTS for gated in (True, False) for work in warm.pair_product(cut, gated)]
    with compiled_at_once():
        for work in works:
            work()
    results: list[dict[str, Any]] = []
    for count in TOKENS:
        case = Case(backend, layers, count)
        case.check()
        both = case.floor_us(True) + case.floor_us(False)
        show(results, count, "whole", None, time_us(case.whole()), both)
        show(results, count, "grouping", None, time_us(case.grouping()), 0.0)
        for gated in (True, False):
            found: list[tuple[float, Any]] = []
            if count <= 16:
                found += [(time_us(case.pair_product(cut, gated)), cut) for cut in PAIR_CUTS]
            each = count * TOP / EXPERTS
            cuts = [cut for cut, g in products if g == gated and each / 4 <= cut.tokens <= max(32, 4 * each)]
            found += [(time_us(case.group_product(cut, gated)), cut) for cut in cuts]
            for us, cut in sorted(found, key=lambda each: each[0])[:5]:
                show(results, count, "gate_up" if gated else "down", cut, us, case.floor_us(gated))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


def show(results: list[dict[str, Any]], count: int, work: str, cut: Any, us: float, floor: float) -> None:
    print(f"{count:6} {work:10} {us:9.1f} us   floor {floor:9.1f}   {cut or ''}", flush=True)
    results.append({"tokens": count, "work": work, "us": us, "floor": floor, "cut": str(cut or "")})


if __name__ == "__main__":
    main()
