"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optionally a window in the upper layers."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, qwen_windows, same_layers, windowed
from headgate.models.spec import AttentionSpec, ModelSpec


def qwen2(config: Config) -> ModelSpec:
    layers = same_layers(config, AttentionSpec(qkv_bias=True))
    return decoder_spec(config, windowed(layers, qwen_windows(config)))
