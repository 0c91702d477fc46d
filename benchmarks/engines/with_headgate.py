from __future__ import annotations

import sys

import torch
from serve import serve

import headgate
from headgate import LLM, SamplingParams


def main(model: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    llm = LLM(model, dtype=dtype, max_context=2048, max_running=32)

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return sum(len(answer.token_ids) for answer in llm.generate(prompts, params, progress=False))

    serve({"version": headgate.__version__, "backend": llm.engine.info.backend}, generate)


main(*sys.argv[1:])
