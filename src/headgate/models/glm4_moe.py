"""GLM-4 MoE (GLM-4.5, 4.6): after some dense layers, a mixture of experts whose scores are sigmoids, beside an MLP that
all tokens share. A part of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from headgate.layers.backend import Routing
from headgate.models.config import Config, decoder_spec, read_rope, same_layers
from headgate.models.spec import AttentionSpec, ExpertNames, Experts, ModelSpec

NAMES = ExpertNames(shared="shared_experts")


def glm4_moe(config: Config) -> ModelSpec:
    config = config.otherwise(partial_rotary_factor=0.5, rms_norm_eps=1e-5)
    width = config.whole("moe_intermediate_size")
    count = config.whole("n_routed_experts", 128)
    experts = Experts(
        count=count,
        intermediate=width,
        routing=Routing(
            top=config.whole("num_experts_per_tok", 8),
            scores="sigmoid",
            normalised=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
            groups=config.whole("n_group", 1),
            top_groups=config.whole("topk_group", 1),
        ),
        correction_bias=(count,),
        shared=config.whole("n_shared_experts", 1) * width,
        names=NAMES,
    )
    attention = AttentionSpec(qkv_bias=config.flag("attention_bias"), qk_norm=config.flag("use_qk_norm"))
    dense = config.whole("first_k_dense_replace", 1)
    layers = same_layers(config, attention)
    mixed = tuple(layer if i < dense else replace(layer, mlp=experts) for i, layer in enumerate(layers))
    further = range(len(mixed), len(mixed) + config.whole("num_nextn_predict_layers", 1))
    unused = tuple(f"model.layers.{i}." for i in further)
    return replace(decoder_spec(config, mixed, read_rope(config, partial=True)), unused=unused)
