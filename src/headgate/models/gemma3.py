"""Gemma 3 (text): Gemma 2 with norms of queries and keys, and rotary embeddings of their own in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from headgate.errors import UnsupportedModel
from headgate.layers.rotary import Rope
from headgate.models.config import Config, stated_rope
from headgate.models.gemma2 import gemma_layers, gemma_spec
from headgate.models.spec import AttentionSpec, LayerSpec, ModelSpec, refuse_less_than_one


def gemma3(config: Config) -> ModelSpec:
    period = config.whole("sliding_window_pattern", 6)
    refuse_less_than_one("sliding_window_pattern", period)
    count = config.whole("num_hidden_layers")
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    if config.optional("attn_logit_softcapping") is not None:  # `transformers` ignores it
        raise UnsupportedModel("Gemma 3 with attn_logit_softcapping is not supported")
    layers = gemma_layers(config, AttentionSpec(qk_norm=True), kinds)
    near, far = gemma_ropes(config)
    return gemma_spec(config, tuple(with_rope(layer, near) for layer in layers), far)


def gemma_ropes(config: Config) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers with a window and of the others."""
    stated = config.section("rope_parameters")
    far = stated.section("full_attention") if stated.values else config.section("rope_scaling")
    local = config.number("rope_local_base_freq", 10_000.0)
    return (
        stated_rope(Config(config.name, config.values | {"rope_theta": local}), stated.section("sliding_attention")),
        stated_rope(config.otherwise(rope_theta=1_000_000.0), far),
    )


def with_rope(layer: LayerSpec, near: Rope) -> LayerSpec:
    return layer if layer.attention.window is None else replace(layer, attention=replace(layer.attention, rope=near))
