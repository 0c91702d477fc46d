"""Qwen3: Qwen2 that norms the heads of queries and keys instead of biasing them."""

from __future__ import annotations

from headgate.models.config import Config, dense_spec, qwen_windows
from headgate.models.spec import ModelSpec


def qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return dense_spec(
        config,
        "Qwen3ForCausalLM",
        windows=qwen_windows(config),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )
