"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from __future__ import annotations

from headgate.layers.backend import Routing
from headgate.models.config import Config, decoder_spec, qwen_windows, sparse_layers, windowed
from headgate.models.spec import AttentionSpec, Experts, ModelSpec


def qwen3_moe(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    experts = Experts(
        count=config.whole("num_experts", 128),
        intermediate=config.whole("moe_intermediate_size"),
        routing=Routing(
            top=config.whole("num_experts_per_tok", 8),
            normalised=config.flag("norm_topk_prob"),
        ),
    )
    attention = AttentionSpec(qk_norm=True, qkv_bias=bias, out_bias=bias)
    return decoder_spec(config, windowed(sparse_layers(config, attention, experts), qwen_windows(config)))
