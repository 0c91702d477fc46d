from __future__ import annotations

import sys

import torch
import transformers
from serve import serve
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main(model: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        """All prompts must have one length: padding would be extra work."""
        batch = torch.tensor(prompts)
        out = network.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )
        return out[:, batch.shape[1] :].numel()

    serve({"version": transformers.__version__}, generate)


main(*sys.argv[1:])
