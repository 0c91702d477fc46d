"""The results of `transformers` for a model folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


@lru_cache(maxsize=1)
def reference(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return reference(folder, dtype)(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def reference_greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    prompt = torch.tensor([tokens])
    mask = torch.ones_like(prompt)
    model = reference(folder, torch.float32)
    out = model.generate(
        prompt, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0
    )
    return out[0, len(tokens) :].tolist()
