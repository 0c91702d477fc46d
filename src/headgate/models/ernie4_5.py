"""ERNIE 4.5: Llama whose rotary embedding pairs neighbouring dimensions, with one flag for all biases."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, read_rope, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def ernie4_5(config: Config) -> ModelSpec:
    config = config.otherwise(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500_000.0)
    bias = config.flag("use_bias")
    layers = same_layers(config, AttentionSpec(qkv_bias=bias, out_bias=bias), mlp_bias=bias)
    return decoder_spec(config, layers, read_rope(config, interleaved=True))
