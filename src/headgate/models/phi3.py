"""Phi-3 and Phi-4: Llama that may rotate a part of each head, optionally with a window in every layer."""

from __future__ import annotations

from headgate.models.config import Config, decoder_spec, read_rope, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def phi3(config: Config) -> ModelSpec:
    config = config.otherwise(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    scaling = config.section("rope_scaling")
    if scaling.text("type", "longrope") in ("su", "yarn"):  # earlier names
        config = Config(config.name, config.values | {"rope_scaling": scaling.values | {"type": "longrope"}})
    layers = same_layers(config, AttentionSpec(window=config.get("sliding_window", int)))
    return decoder_spec(config, layers, read_rope(config, partial=True))
