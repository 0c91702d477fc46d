"""Mistral: Llama without biases, each layer of which may see only the last `sliding_window` tokens."""

from __future__ import annotations

from headgate.errors import UnsupportedModel
from headgate.models.config import Config, decoder_spec, same_layers
from headgate.models.spec import AttentionSpec, ModelSpec


def mistral(config: Config) -> ModelSpec:
    if config.get("layer_types", list) is not None:
        raise UnsupportedModel("Mistral with layer_types is not supported; one sliding_window for all layers is")
    # Null says no window; an absent key says the window of the first Mistral.
    window = None if config.values.get("sliding_window", 0) is None else config.whole("sliding_window", 4096)
    return decoder_spec(config, same_layers(config, AttentionSpec(window=window)))
