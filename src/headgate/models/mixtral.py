"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from headgate.layers.backend import Routing
from headgate.models.config import Config, decoder_spec, windowed
from headgate.models.spec import AttentionSpec, ExpertNames, Experts, LayerSpec, ModelSpec

NAMES = ExpertNames(layer="block_sparse_moe", gate="w1", up="w3", down="w2")


def mixtral(config: Config) -> ModelSpec:
    experts = Experts(
        count=config.whole("num_local_experts", 8),
        intermediate=config.whole("intermediate_size"),
        routing=Routing(top=config.whole("num_experts_per_tok", 2)),
        names=NAMES,
    )
    window = config.get("sliding_window", int)
    count = config.whole("num_hidden_layers")
    return decoder_spec(config, windowed((LayerSpec(AttentionSpec(), experts),) * count, (window,) * count))
