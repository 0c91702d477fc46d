"""SmolLM3: Llama without rotary embedding in some layers, optionally with a window there."""

from __future__ import annotations

from dataclasses import replace

from headgate.errors import UnsupportedModel
from headgate.layers.rotary import NO_ROPE
from headgate.models.config import Config, decoder_spec, layer_window, same_layers, windowed
from headgate.models.spec import AttentionSpec, LayerSpec, ModelSpec, refuse_less_than_one


def smollm3(config: Config) -> ModelSpec:
    config = config.otherwise(tie_word_embeddings=True, rope_theta=2_000_000.0)
    bias = config.flag("attention_bias")
    attention = AttentionSpec(qkv_bias=bias, out_bias=bias)
    layers = same_layers(config, attention, mlp_bias=config.flag("mlp_bias"))
    return decoder_spec(config, without_positions(config, layers))


def without_positions(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers with the windows and rotary embeddings that the config states for each of them."""
    interval = config.whole("no_rope_layer_interval", 4)
    refuse_less_than_one("no_rope_layer_interval", interval)
    rotated = config.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(len(layers))])
    default = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
    kinds = config.get("layer_types", list, default)
    if not len(rotated) == len(kinds) == len(layers):
        raise UnsupportedModel(f"{config.name}: no_rope_layers and layer_types must have {len(layers)} entries each")
    window = config.get("sliding_window", int) if config.flag("use_sliding_window") else None
    positioned = (
        replace(layer, attention=replace(layer.attention, rope=None if rotates else NO_ROPE))
        for layer, rotates in zip(layers, rotated, strict=True)
    )
    return windowed(tuple(positioned), [layer_window(kind, window) for kind in kinds])
