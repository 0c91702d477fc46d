"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and perhaps a window in the upper layers."""

from __future__ import annotations

from headgate.models.config import Config, dense_spec, qwen_windows
from headgate.models.spec import ModelSpec


def qwen2(config: Config) -> ModelSpec:
    return dense_spec(config, "Qwen2ForCausalLM", qkv_bias=True, windows=qwen_windows(config))
