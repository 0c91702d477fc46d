"""OLMo 2: Llama that norms what attention and MLP return instead of what they receive, and queries and keys as a whole."""

from __future__ import annotations

from dataclasses import replace

from headgate.models.config import Config, decoder_spec, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec, NormNames

NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def olmo2(config: Config) -> ModelSpec:
    config = config.otherwise(rms_norm_eps=1e-5)
    bias = config.flag("attention_bias")
    attention = AttentionSpec(whole_qk_norm=True, qkv_bias=bias, out_bias=bias)
    return replace(decoder_spec(config, same_layers(config, attention, norms=NORMS)), wide_norms=True)
