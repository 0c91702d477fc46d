"""Mistral: Llama without biases, optionally with a window of the last `sliding_window` tokens in every layer."""

from __future__ import annotations

from headgate.errors import UnsupportedModel
from headgate.models.config import Config, decoder_spec, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def mistral(config: Config) -> ModelSpec:
    if config.get("layer_types", list) is not None:
        raise UnsupportedModel("Mistral with layer_types is not supported; only one sliding_window for all layers is")
    # Null means no window; an absent key means the window of the first Mistral.
    window = None if config.values.get("sliding_window", 0) is None else config.whole("sliding_window", 4096)
    return decoder_spec(config, same_layers(config, AttentionSpec(window=window)))
