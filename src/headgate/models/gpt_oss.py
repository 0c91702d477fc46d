"""gpt-oss: a mixture of experts with biases and a clamped gate; attention with sinks, and windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from headgate.errors import UnsupportedModel
from headgate.layers.backend import ClampedGate, Routing
from headgate.models.config import Config, decoder_spec, layer_window, windowed
from headgate.models.spec import AttentionSpec, ExpertNames, Experts, LayerSpec, ModelSpec, refuse_less_than_one

NAMES = ExpertNames(router="router")
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def gpt_oss(config: Config) -> ModelSpec:
    config = with_defaults(config)
    bias = config.flag("attention_bias")
    experts = Experts(
        count=config.whole("num_local_experts", 128),
        intermediate=config.whole("intermediate_size"),
        routing=Routing(top=config.whole("num_experts_per_tok", 4)),
        router_bias=True,
        gate=ClampedGate(alpha=config.number("swiglu_alpha", 1.702), limit=swiglu_limit(config)),
        bias=True,
        interleaved=True,
        names=NAMES,
    )
    layer = LayerSpec(AttentionSpec(qkv_bias=bias, out_bias=bias, sinks=True), experts)
    count = config.whole("num_hidden_layers")
    refuse_less_than_one("layers", count)
    return replace(decoder_spec(config, windowed((layer,) * count, windows(config, count))), wide_norms=True)


def with_defaults(config: Config) -> Config:
    config = config.otherwise(attention_bias=True, head_dim=64, rms_norm_eps=1e-5, rope_theta=150_000.0)
    if not config.section("rope_parameters").values and not config.section("rope_scaling").values:
        config = config.otherwise(rope_scaling=YARN)
    return config


def swiglu_limit(config: Config) -> float:
    limit = config.number("swiglu_limit", 7.0)
    if limit <= 0:
        raise UnsupportedModel(f"swiglu_limit {limit} is not supported; it must be positive")
    return limit


def windows(config: Config, layers: int) -> list[int | None]:
    window = config.whole("sliding_window", 128)
    types = config.get("layer_types", list)
    if types is None:
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return [layer_window(kind, window) for kind in types]
