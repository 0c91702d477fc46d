"""Reads a Hugging Face `config.json`: typed access, and the fields that all decoders share.

An absent key has the default of `transformers`. A value that would change the network in an unsupported way is
refused by name, because serving it would give subtly wrong results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headgate.errors import NotAModel, UnsupportedModel
from headgate.layers.backend import Activation
from headgate.layers.rotary import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from headgate.models.spec import (
    PRE_NORMS,
    AttentionSpec,
    Dense,
    Experts,
    LayerSpec,
    ModelSpec,
    NormNames,
    refuse_less_than_one,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Several times the largest values of any published model. A larger number is a mistake or an attack, and is refused
# before any memory or time is spent on it. `ModelSpec.num_parameters` is also compared with the checkpoint files.
LARGEST = {
    "num_hidden_layers": 4096,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**12,
    "vocab_size": 2**23,
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
    "sliding_window": 2**31 - 1,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "num_nextn_predict_layers": 64,
    "moe_num_experts": 2**14,
    "group_size": 2**20,
    "num_bits": 64,
}
MOST_EOS_IDS = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """One JSON object of a model folder. Error messages include `name`."""

    name: str
    values: dict[str, Any]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of `key`, or `default` if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UnsupportedModel(f"{self.name}: {key} is {value!r}, which is not valid")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = int(self._required(key, self.get(key, int, default)))
        if value > LARGEST.get(key, value):
            raise UnsupportedModel(f"{self.name}: {key} is {value!r:.24}; the maximum is {LARGEST[key]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, self.get(key, (int, float), default))
        if not abs(value) < 1e300:  # excludes infinity and NaN, too
            raise UnsupportedModel(f"{self.name}: {key} is {value!r:.40}, which is too large or not a number")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Return a number that may be absent."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, bool, default))

    def text(self, key: str, default: str) -> str:
        return str(self.get(key, str, default))

    def section(self, key: str) -> Config:
        return Config(f"{self.name}: {key}", self.get(key, dict, {}))

    @property
    def architecture(self) -> str:
        names = self.get("architectures", list, [])
        return str(names[0] if names else self.text("model_type", "unnamed"))

    def otherwise(self, **defaults: Any) -> Config:
        """Return the config with an architecture's own defaults for keys that are absent."""
        return Config(self.name, defaults | self.values)

    def _required(self, key: str, value: Any) -> Any:
        if value is None:
            raise UnsupportedModel(f"{self.name} lacks {key}")
        return value


def read_config(folder: Path) -> Config:
    if not folder.is_dir():
        raise NotAModel(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise NotAModel(f"{folder} has no config.json")
    return read_json(folder / "config.json")


def read_json(path: Path) -> Config:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise NotAModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise NotAModel(f"{path} is not a JSON object")
    return Config(path.name, values)


def decoder_spec(config: Config, layers: tuple[LayerSpec, ...], rope: Rope | None = None) -> ModelSpec:
    """Return the spec of the whole model; `layers` come from the architecture's own module, and `rope` may."""
    activation = config.text("hidden_act", "silu")
    if any(isinstance(layer.mlp, Experts) and known_activation(activation) != "silu" for layer in layers):
        raise UnsupportedModel(f"experts with activation {activation!r} are not supported; silu is")
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    spec = ModelSpec(
        architecture=config.architecture,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", hidden // max(heads, 1)),
        vocab=config.whole("vocab_size"),
        max_positions=config.whole("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config) if rope is None else rope,
        dtype=checkpoint_dtype(config),
        tied=config.flag("tie_word_embeddings"),
        eos_ids=eos_ids(config),
    )
    refuse_angles(config, spec)
    return spec


def same_layers(
    config: Config,
    attention: AttentionSpec,
    *,
    mlp_bias: bool = False,
    norms: NormNames = PRE_NORMS,
    activation: str | None = None,
) -> tuple[LayerSpec, ...]:
    """Return identical layers, as many as the config states."""
    count = config.whole("num_hidden_layers")
    refuse_less_than_one("layers", count)
    activation = activation or config.text("hidden_act", "silu")
    mlp = Dense(config.whole("intermediate_size"), mlp_bias, known_activation(activation))
    return (LayerSpec(attention, mlp, norms),) * count


def sparse_layers(config: Config, attention: AttentionSpec, experts: Experts) -> tuple[LayerSpec, ...]:
    """Qwen's mixtures have experts in every `decoder_sparse_step`th layer, except in `mlp_only_layers`."""
    layers = same_layers(config, attention)
    every, dense = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers", list, [])
    refuse_less_than_one("decoder_sparse_step", every)
    return tuple(
        layer if i in dense or (i + 1) % every else replace(layer, mlp=experts) for i, layer in enumerate(layers)
    )


def windowed(layers: tuple[LayerSpec, ...], windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """Return the same layers, each with its own attention window."""
    if len(windows) != len(layers):
        raise UnsupportedModel(f"{len(windows)} layer types are given for {len(layers)} layers")
    return tuple(
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(layers, windows, strict=True)
    )


def known_activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def checkpoint_dtype(config: Config) -> torch.dtype:
    """Read the dtype of the weights. `transformers` 5 writes it as `dtype`, earlier versions as `torch_dtype`."""
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; {', '.join(DTYPES)} are")
    return DTYPES[name]


def eos_ids(config: Config) -> tuple[int, ...]:
    ids = config.get("eos_token_id", (int, list), [])
    ids = ids if isinstance(ids, list) else [ids]
    if len(ids) > MOST_EOS_IDS or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise UnsupportedModel(f"{config.name}: eos_token_id is {ids!r:.100}, which are not token ids")
    return tuple(ids)


def read_rope(config: Config, *, partial: bool = False, interleaved: bool = False) -> Rope:
    """Read the rotary embedding's settings. `partial`: the architecture may rotate a part of each head.

    `transformers` 5 writes them to `rope_parameters`, earlier versions to `rope_theta` and `rope_scaling`.
    """
    stated = config.section("rope_parameters")
    if not stated.values:
        stated = config.section("rope_scaling")
    if any(isinstance(value, dict) for value in stated.values.values()):
        raise UnsupportedModel(f"{stated.name} differs from layer to layer, which is not supported")
    fraction = stated.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if fraction != 1 and not partial:
        raise UnsupportedModel(f"partial_rotary_factor {fraction} is not supported; the whole head must be rotated")
    return replace(stated_rope(config, stated), fraction=fraction, interleaved=interleaved)


def stated_rope(config: Config, stated: Config) -> Rope:
    """Return the base and scaling that a section of the config states."""
    kind = stated.text("rope_type", stated.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; {', '.join(ROPE_TYPES)} are")
    theta = stated.number("rope_theta", config.number("rope_theta", 10_000.0))
    positions = config.whole("max_position_embeddings")
    original = stated.whole(
        "original_max_position_embeddings", config.whole("original_max_position_embeddings", positions)
    )
    match kind:
        case "linear":
            return Rope(theta, LinearScaling(stated.number("factor")))
        case "llama3":
            return Rope(theta, llama3_scaling(stated, original))
        case "yarn":
            return Rope(theta, yarn_scaling(stated, original))
        case "longrope":
            return Rope(theta, long_scaling(stated, original, positions))
    return Rope(theta)


def refuse_angles(config: Config, spec: ModelSpec) -> None:
    """Refuse a base and a scaling that are valid one by one but together give invalid angles."""
    for rope in spec.ropes:
        pairs = rope.dimensions(spec.head_dim) // 2
        if isinstance(rope.scaling, LongScaling) and not len(rope.scaling.short) == len(rope.scaling.long) == pairs:
            raise UnsupportedModel(f"{config.name}: short_factor and long_factor must be {pairs} numbers each")
        try:
            usable = all(rope.frequencies(spec.head_dim, end).isfinite().all() for end in (1, spec.max_positions))
        except (ArithmeticError, ValueError):
            usable = False
        if not usable:
            raise UnsupportedModel(
                f"{config.name}: rope_theta or rope_scaling gives angles that are not numbers: {rope}"
            )


def llama3_scaling(stated: Config, original: int) -> Llama3Scaling:
    low, high = stated.number("low_freq_factor"), stated.number("high_freq_factor")
    return Llama3Scaling(stated.number("factor"), low, high, original)


def yarn_scaling(stated: Config, original: int) -> YarnScaling:
    factor = stated.number("factor")
    return YarnScaling(
        factor=factor,
        original_positions=original,
        magnitude=stated.number("attention_factor", yarn_magnitude(stated, factor)),
        beta_fast=stated.number("beta_fast", 32.0),
        beta_slow=stated.number("beta_slow", 1.0),
        whole_dimensions=stated.flag("truncate", True),
    )


def long_scaling(stated: Config, original: int, positions: int) -> LongScaling:
    short, long = (tuple(map(float, factor_list(stated, key))) for key in ("short_factor", "long_factor"))
    factor = stated.number("factor", positions / max(original, 1))
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongScaling(short, long, original, stated.number("attention_factor", default))


def factor_list(stated: Config, key: str) -> list[float]:
    factors = stated.get(key, list)
    if factors is None:
        raise UnsupportedModel(f"{stated.name} lacks {key}")
    if len(factors) > LARGEST["head_dim"] or not all(type(each) in (int, float) and each > 0 for each in factors):
        raise UnsupportedModel(f"{stated.name}: {key} is {factors!r:.60}, which are not positive numbers")
    return list(factors)


def yarn_magnitude(stated: Config, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = stated.number("mscale", 0.0), stated.number("mscale_all_dim", 0.0)
    return magnitude(numerator) / magnitude(denominator) if numerator and denominator else magnitude(1.0)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention.

    If the config enables windows, they apply to the layers that `layer_types` names, or from `max_window_layers` on.
    """
    layers = config.whole("num_hidden_layers")
    if not config.flag("use_sliding_window"):
        return (None,) * layers
    window = config.whole("sliding_window", 4096)
    full = config.whole("max_window_layers", 28)
    types = config.get("layer_types", list)
    if types is None:
        types = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    return tuple(layer_window(kind, window) for kind in types)


def layer_window(kind: str, window: int | None) -> int | None:
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(f"layer type {kind!r} is not supported; full_attention and sliding_attention are")
    return window if kind == "sliding_attention" else None
