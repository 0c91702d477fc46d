"""Measures the accuracy of FP8: `python benchmarks/fp8_accuracy.py [MODEL] [TEXT...]`.

Computes the perplexity of texts (default: this project's documentation) under a real model, in bfloat16 and with
weights, KV cache or both rounded as by `--fp8`. It runs in torch on a CPU, which rounds the same values in the same
places. Prints JSON: perplexity, and the mean change of a token's log-probability.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headgate.models.registry as registry
from headgate.contract.sampling import SamplingParams
from headgate.layers.backend import KV, NO_FP8, Fp8, Heads, Matrix, Rotary
from headgate.layers.batch import Batch
from headgate.layers.formats import FP8, Weight, floating, fp8_rows
from headgate.layers.torch_backend import TorchBackend
from headgate.offline import LLM

WINDOW = 1024
KINDS = {"none": NO_FP8, "weights": Fp8(weights=True), "kv": Fp8(kv=True), "both": Fp8(weights=True, kv=True)}


class RoundedBackend(TorchBackend):
    """The torch backend, with values rounded to FP8 wherever the GPU rounds them."""

    def __init__(self, dtype: torch.dtype, heads: Heads, fp8: Fp8) -> None:
        super().__init__(torch.device("cpu"), dtype, heads)
        self.fp8 = fp8

    def matrix(self, rows: int, columns: int) -> Matrix:
        return replace(super().matrix(rows, columns), scale=torch.ones(rows))

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        if self.fp8.weights and matrix.scale is not None:
            weight = floating(through_eight_bits(weight.numbers))
        super().pack(matrix, weight, row)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if self.fp8.weights and len(x) > 1 and matrix.scale is not None:
            x = through_eight_bits(x)
        return F.linear(x, matrix.data, bias)

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        q = super().rope_and_write(qkv, batch, rotary, kv)
        if self.fp8.kv:
            for cache in kv:
                written = cache.flatten(0, 1)
                written[batch.slots] = written[batch.slots].clamp(-448, 448).to(FP8).to(cache.dtype)
        return q


def through_eight_bits(rows: torch.Tensor) -> torch.Tensor:
    kept = fp8_rows(floating(rows))
    assert kept.scale is not None
    return (kept.numbers.float() * kept.scale[:, None]).to(rows.dtype)


def logprobs_of(model: str | None, texts: list[Path], fp8: Fp8, windows: int) -> torch.Tensor:
    """Log-probabilities of all tokens of the texts but the first of each window."""

    def choose(name: str, device: torch.device, dtype: torch.dtype, heads: Heads, **_: Any) -> TorchBackend:
        return RoundedBackend(dtype, heads, fp8)

    registry.choose_backend = choose
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(model, device="cpu", dtype="bfloat16", max_context=WINDOW + 32, kv_blocks=200) as llm:
        prompts = list(cut(llm, texts))[:windows]
        answers = llm.generate(prompts, params)
        return torch.tensor([each.token for answer in answers for each in (answer.prompt_logprobs or [])[1:] if each])


def cut(llm: LLM, texts: list[Path]) -> Iterator[list[int]]:
    assert llm.tokenizer is not None
    for text in texts:
        ids = llm.tokenizer.encode(text.read_text())
        yield from (ids[start : start + WINDOW] for start in range(0, len(ids) - 64, WINDOW))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: the server's")
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens (default: %(default)s)")
    options = parser.parse_args()
    texts = options.texts or sorted(Path(__file__).parents[1].glob("docs/*.md"))
    results: dict[str, Any] = {}
    exact = torch.zeros(0)
    for kind, fp8 in KINDS.items():
        found = logprobs_of(options.model, texts, fp8, options.windows)
        exact = found if kind == "none" else exact
        results[kind] = {
            "perplexity": math.exp(-found.mean().item()),
            "mean_change": (found - exact).abs().mean().item(),
            "tokens": len(found),
        }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
