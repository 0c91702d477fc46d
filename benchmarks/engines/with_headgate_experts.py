"""Like `with_headgate.py`, and counts the experts that decoding steps used."""

from __future__ import annotations

import sys

import torch
from serve import serve

import headgate
from headgate import LLM, SamplingParams
from headgate.layers.backend import Routed, Routing
from headgate.layers.cpu_backend import CpuBackend

used: list[int] = []  # per layer and step


class CountingBackend(CpuBackend):
    rows = 0  # of a decoding step

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
        routed = CpuBackend.route(self, logits, routing, bias)
        if len(logits) == CountingBackend.rows:
            used.append(len(set(routed.ids.flatten().tolist())))
        return routed


def seen() -> dict[str, float]:
    mean = sum(used) / max(len(used), 1)
    used.clear()
    return {"experts_per_layer": mean}


def main(model: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    headgate.layers.choice.CpuBackend = CountingBackend  # type: ignore[attr-defined]
    llm = LLM(model, dtype=dtype, max_context=2048, max_running=32)

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        CountingBackend.rows = len(prompts)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return sum(len(answer.token_ids) for answer in llm.generate(prompts, params, progress=False))

    serve({"version": headgate.__version__, "backend": llm.engine.info.backend}, generate, seen)


main(*sys.argv[1:])
