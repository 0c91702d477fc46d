"""Gemma 2: norms before and after attention and MLP, scores and logits with a soft cap, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from headgate.errors import UnsupportedModel
from headgate.layers.rotary import Rope
from headgate.models.config import Config, decoder_spec, layer_window, same_layers, windowed
from headgate.models.spec import AttentionSpec, LayerSpec, ModelSpec, NormNames

NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
ACTIVATION = "gelu_pytorch_tanh"


def gemma2(config: Config) -> ModelSpec:
    config = config.otherwise(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.whole("num_hidden_layers"))]
    return gemma_spec(config, gemma_layers(config, AttentionSpec(), kinds))


def gemma_layers(config: Config, attention: AttentionSpec, kinds: list[str]) -> tuple[LayerSpec, ...]:
    """Return the layers of Gemma 2 or 3, of the kinds that the config lists, or of these."""
    if config.flag("use_bidirectional_attention"):
        raise UnsupportedModel("Gemma with use_bidirectional_attention is not supported")
    bias, scalar = config.flag("attention_bias"), config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise UnsupportedModel(f"{config.name}: query_pre_attn_scalar is {scalar}; it must be positive")
    attention = replace(
        attention,
        qkv_bias=bias,
        out_bias=bias,
        scale=scalar**-0.5,
        cap=config.optional("attn_logit_softcapping"),
    )
    layers = same_layers(config, attention, norms=NORMS, activation=config.text("hidden_activation", ACTIVATION))
    window = config.otherwise(sliding_window=4096).get("sliding_window", int)
    return windowed(layers, [layer_window(kind, window) for kind in config.get("layer_types", list, kinds)])


def gemma_spec(config: Config, layers: tuple[LayerSpec, ...], rope: Rope | None = None) -> ModelSpec:
    """Return the spec of the whole model; `layers` and `rope` are those of Gemma 2 or 3."""
    config = config.otherwise(tie_word_embeddings=True, head_dim=256)
    spec = decoder_spec(config, layers, rope)
    return replace(
        spec,
        embedding_multiplier=spec.hidden**0.5,
        logits_cap=config.optional("final_logit_softcapping"),
        wide_norms=True,
        norm_offset=1.0,
    )
