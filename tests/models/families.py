"""Tiny random checkpoints of every family, written by `transformers` where `headgate.testing.tiny` does not know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headgate.testing.tiny import NAMES, SPECIALS, tiny_model, write_tokenizer

SIZES = {
    "vocab_size": 256 + len(SPECIALS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 259,
}
# What differs from a family's defaults, so that a tiny model has everything that a real one has.
OWN: dict[str, dict[str, Any]] = {
    "ernie4_5": {"head_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
    },
    "glm4": {"head_dim": 16},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 48,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "intermediate_size": 64,
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
}


def write_model(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Write a tiny model of any family, with the options of `tiny_model`."""
    return (tiny_model if family in NAMES else write_family)(folder, family, **options)


def write_family(
    folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", tokenizer: bool = True, **overrides: Any
) -> Path:
    config = AutoConfig.for_model(family, **SIZES | OWN[family] | overrides)
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        corrections = ((name, each) for name, each in model.named_buffers() if name.endswith("correction_bias"))
        for name, parameter in (*model.named_parameters(), *corrections):
            parameter.copy_(filled(name, parameter, random))
        if family.startswith("gemma"):  # which multiplies embeddings; a token would otherwise only repeat itself
            model.get_input_embeddings().weight.div_(config.hidden_size**0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def filled(name: str, like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Return random values as `headgate.testing.tiny` does. A norm is around its value in a new model, 0 or 1."""
    noise = torch.randn(like.shape, generator=random)
    if "norm" in name:
        return like + 0.1 * noise
    if "embed_tokens" in name or like.ndim == 1:
        return 0.3 * noise
    return noise * (1.5 / like.shape[-1] ** 0.5)
