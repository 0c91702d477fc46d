"""Granite: Llama with multipliers of embeddings, attention scores, results of a layer, and logits."""

from __future__ import annotations

from dataclasses import replace

from headgate.models.config import Config, decoder_spec, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def granite(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = AttentionSpec(qkv_bias=bias, out_bias=bias, scale=config.number("attention_multiplier", 1.0))
    return replace(
        decoder_spec(config, same_layers(config, attention, mlp_bias=config.flag("mlp_bias"))),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )
