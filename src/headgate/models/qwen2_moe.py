"""Qwen2-MoE: Qwen2 with a mixture of experts, and an MLP that all tokens share, scaled by a sigmoid of the token."""

from __future__ import annotations

from headgate.layers.backend import Routing
from headgate.models.config import Config, decoder_spec, qwen_windows, sparse_layers, windowed
from headgate.models.spec import AttentionSpec, Experts, ModelSpec


def qwen2_moe(config: Config) -> ModelSpec:
    experts = Experts(
        count=config.whole("num_experts", 60),
        intermediate=config.whole("moe_intermediate_size"),
        routing=Routing(
            top=config.whole("num_experts_per_tok", 4),
            normalised=config.flag("norm_topk_prob"),
        ),
        shared=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    attention = AttentionSpec(qkv_bias=config.flag("qkv_bias", True))
    return decoder_spec(config, windowed(sparse_layers(config, attention, experts), qwen_windows(config)))
