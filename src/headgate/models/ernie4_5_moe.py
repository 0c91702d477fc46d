"""ERNIE 4.5 MoE: ERNIE 4.5 with a mixture of experts, and MLPs that all tokens share, in a range of layers."""

from __future__ import annotations

from dataclasses import replace

from headgate.errors import UnsupportedModel
from headgate.layers.backend import Routing
from headgate.models.config import Config, decoder_spec, read_rope, same_layers
from headgate.models.spec import AttentionSpec, ExpertNames, Experts, LayerSpec, ModelSpec, refuse_less_than_one

NAMES = ExpertNames(shared="shared_experts", correction_bias="moe_statics.e_score_correction_bias")
NEGLIGIBLE = 1e-6  # far below the sum of the weights of the experts that a token chooses


def ernie4_5_moe(config: Config) -> ModelSpec:
    config = config.otherwise(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500_000.0)
    refuse_variants(config)
    width = config.whole("moe_intermediate_size")
    count = config.whole("moe_num_experts", 64)
    experts = Experts(
        count=count,
        intermediate=width,
        routing=Routing(top=config.whole("moe_k", 6)),
        correction_bias=(1, count),
        shared=config.whole("moe_num_shared_experts", 2) * width,
        names=NAMES,
    )
    layers = with_experts(config, same_layers(config, AttentionSpec()), experts)
    spec = decoder_spec(config, layers, read_rope(config, interleaved=True))
    return replace(spec, unused=("model.mtp_",))


def with_experts(config: Config, layers: tuple[LayerSpec, ...], experts: Experts) -> tuple[LayerSpec, ...]:
    """Put experts into every `moe_layer_interval`th layer of those from `moe_layer_start_index` on."""
    every = config.whole("moe_layer_interval", 1)
    refuse_less_than_one("moe_layer_interval", every)
    first, last = config.whole("moe_layer_start_index", 1), config.whole("moe_layer_end_index", -1)
    chosen = range(first, len(layers) if last == -1 else last + 1)
    return tuple(
        replace(layer, mlp=experts) if i in chosen and (i + 1) % every == 0 else layer
        for i, layer in enumerate(layers)
    )


def refuse_variants(config: Config) -> None:
    if config.flag("use_bias"):
        raise UnsupportedModel("ERNIE 4.5 MoE with use_bias is not supported: its output matrix would have a bias")
    function = config.text("moe_gate_act", "softmax")
    if function != "softmax":
        raise UnsupportedModel(f"moe_gate_act {function!r} is not supported; softmax is")
    least = config.number("moe_norm_min", 1e-12)
    if not 0 <= least <= NEGLIGIBLE:
        raise UnsupportedModel(f"moe_norm_min {least} is not supported; values up to {NEGLIGIBLE} are")
