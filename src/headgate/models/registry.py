"""From a model folder to a spec, and from a spec to a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from headgate.errors import RequestError, UnsupportedModel
from headgate.layers.backend import PLAIN, Fp8, Heads
from headgate.layers.choice import choose_backend
from headgate.layers.ranks import ALONE, Ranks
from headgate.models.config import Config, eos_ids, read_config, read_json
from headgate.models.dense import DenseModel
from headgate.models.llama import llama
from headgate.models.mistral import mistral
from headgate.models.qwen2 import qwen2
from headgate.models.qwen3 import qwen3
from headgate.models.spec import ModelSpec

ARCHITECTURES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def read_spec(folder: str | Path) -> ModelSpec:
    """What the model in `folder` is; reads its config files only."""
    folder = Path(folder)
    spec = spec_of(read_config(folder))
    return replace(spec, eos_ids=tuple(dict.fromkeys(spec.eos_ids + generation_eos_ids(folder))))


def spec_of(config: Config) -> ModelSpec:
    """For configs that come from elsewhere than a folder: `spec_of(Config("model.gguf", values))`."""
    return ARCHITECTURES[architecture(config)](config)


def architecture(config: Config) -> str:
    names = config.get("architectures", list, [])
    name = names[0] if names else config.text("model_type", "unnamed")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name} is not supported; {', '.join(ARCHITECTURES)} are")
    return str(name)


def generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """Chat models name the end of a turn here, and only here."""
    path = folder / "generation_config.json"
    return eos_ids(read_json(path)) if path.is_file() else ()


def build_model(
    spec: ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    deterministic: bool = False,
    fp8: Fp8 = PLAIN,
    ranks: Ranks = ALONE,
) -> DenseModel:
    """The network of `spec`, or one rank's part of it; its parameters allocated but not filled."""
    refuse_uneven(spec, ranks.size)
    heads = Heads(query=spec.heads // ranks.size, kv=spec.kv_heads // ranks.size, size=spec.head_dim)
    chosen = choose_backend(backend, torch.device(device), dtype, heads, deterministic=deterministic, fp8=fp8)
    return DenseModel(spec, chosen, ranks)


def refuse_uneven(spec: ModelSpec, ranks: int) -> None:
    """The KV heads divide the attention heads, so these two decide."""
    if spec.kv_heads % ranks or spec.intermediate % ranks:
        fits = [n for n in range(1, spec.kv_heads + 1) if not spec.kv_heads % n and not spec.intermediate % n]
        raise RequestError(
            f"tensor_parallel is {ranks}, and this model's {spec.kv_heads} KV heads and MLP of {spec.intermediate} cannot "
            f"be divided by that; it takes {', '.join(map(str, fits))}",
            param="tensor_parallel",
        )
