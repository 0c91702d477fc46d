"""Llama: the basic decoder. If it has attention biases, the output projection has one too."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def llama(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = AttentionSpec(qkv_bias=bias, out_bias=bias)
    return decoder_spec(config, same_layers(config, attention, mlp_bias=config.flag("mlp_bias")))
