"""Qwen3: like Qwen2, with norms on the heads of queries and keys instead of biases."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, qwen_windows, same_layers, windowed
from headgate.models.spec import AttentionSpec, ModelSpec


def qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    layers = same_layers(config, AttentionSpec(qk_norm=True, qkv_bias=bias, out_bias=bias))
    return decoder_spec(config, windowed(layers, qwen_windows(config)))
