"""Maps a model folder to a spec, and a spec to a network: one row per architecture (docs/architectures.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headgate.errors import RequestError, UnsupportedModel
from headgate.layers.backend import NO_FP8, Backend, Fp8, Heads
from headgate.layers.choice import choose_backend
from headgate.layers.ranks import ALONE, Ranks
from headgate.models.config import Config, eos_ids, read_config, read_json
from headgate.models.decoder import Decoder
from headgate.models.ernie4_5 import ernie4_5
from headgate.models.ernie4_5_moe import ernie4_5_moe
from headgate.models.gemma2 import gemma2
from headgate.models.gemma3 import gemma3
from headgate.models.glm4 import glm4
from headgate.models.glm4_moe import glm4_moe
from headgate.models.gpt_oss import gpt_oss
from headgate.models.granite import granite
from headgate.models.llama import llama
from headgate.models.mistral import mistral
from headgate.models.mixtral import mixtral
from headgate.models.network import Network
from headgate.models.olmo2 import olmo2
from headgate.models.phi3 import phi3
from headgate.models.quantisation_config import INTERLEAVED_METHODS, METHODS, MXFP4, read_quantisation
from headgate.models.qwen2 import qwen2
from headgate.models.qwen2_moe import qwen2_moe
from headgate.models.qwen3 import qwen3
from headgate.models.qwen3_moe import qwen3_moe
from headgate.models.smollm3 import smollm3
from headgate.models.spec import Experts, ModelSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """The functions that read and build a model of one architecture."""

    read: Callable[[Config], ModelSpec]
    build: Callable[[ModelSpec, Backend, Ranks], Network]


ARCHITECTURES = {
    "Ernie4_5ForCausalLM": Architecture(ernie4_5, Decoder),
    "Ernie4_5_MoeForCausalLM": Architecture(ernie4_5_moe, Decoder),
    "Gemma2ForCausalLM": Architecture(gemma2, Decoder),
    "Gemma3ForCausalLM": Architecture(gemma3, Decoder),
    "Glm4ForCausalLM": Architecture(glm4, Decoder),
    "Glm4MoeForCausalLM": Architecture(glm4_moe, Decoder),
    "GptOssForCausalLM": Architecture(gpt_oss, Decoder),
    "GraniteForCausalLM": Architecture(granite, Decoder),
    "LlamaForCausalLM": Architecture(llama, Decoder),
    "MistralForCausalLM": Architecture(mistral, Decoder),
    "MixtralForCausalLM": Architecture(mixtral, Decoder),
    "Olmo2ForCausalLM": Architecture(olmo2, Decoder),
    "Phi3ForCausalLM": Architecture(phi3, Decoder),
    "Qwen2ForCausalLM": Architecture(qwen2, Decoder),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe, Decoder),
    "Qwen3ForCausalLM": Architecture(qwen3, Decoder),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe, Decoder),
    "SmolLM3ForCausalLM": Architecture(smollm3, Decoder),
}


def read_spec(folder: str | Path) -> ModelSpec:
    """Return the spec of the model in `folder`. Reads only its config files."""
    folder = Path(folder)
    spec = spec_of(read_config(folder))
    return replace(spec, eos_ids=tuple(dict.fromkeys(spec.eos_ids + generation_eos_ids(folder))))


def spec_of(config: Config) -> ModelSpec:
    """Return the spec for a config, which need not come from a folder: `spec_of(Config("model.gguf", values))`."""
    name = config.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name} is not supported; {', '.join(ARCHITECTURES)} are")
    spec = ARCHITECTURES[name].read(config)
    interleaved = any(isinstance(layer.mlp, Experts) and layer.mlp.interleaved for layer in spec.layers)
    stated = read_quantisation(config, INTERLEAVED_METHODS if interleaved else METHODS)
    # A trainer may send MXFP4 to an engine that has started with a checkpoint in bfloat16.
    return replace(spec, quantisation=MXFP4 if stated is None and interleaved else stated)


def generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that end an answer from `generation_config.json`.

    Chat models name their end-of-turn token only in this file.
    """
    path = folder / "generation_config.json"
    return eos_ids(read_json(path)) if path.is_file() else ()


def build_model(
    spec: ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    deterministic: bool = False,
    fp8: Fp8 = NO_FP8,
    ranks: Ranks = ALONE,
) -> Network:
    """Build the network of `spec`, or one rank's part of it; its parameters are allocated but not filled."""
    refuse_uneven(spec, ranks.size)
    heads = Heads(query=spec.heads // ranks.size, kv=spec.kv_heads // ranks.size, size=spec.head_dim)
    chosen = choose_backend(backend, torch.device(device), dtype, heads, deterministic=deterministic, fp8=fp8)
    return ARCHITECTURES[spec.architecture].build(spec, chosen, ranks)


def refuse_uneven(spec: ModelSpec, ranks: int) -> None:
    """Refuse a number of ranks by which the model cannot be divided evenly.

    The number of KV heads divides the number of attention heads, so only KV heads and MLPs are checked.
    """
    widths = sorted({width for layer in spec.layers for width in layer.mlp.widths})
    fits = [n for n in range(1, spec.kv_heads + 1) if not any(part % n for part in (spec.kv_heads, *widths))]
    if ranks not in fits:
        mlp = " and ".join(map(str, widths))
        raise RequestError(
            f"tensor_parallel is {ranks}, but this model's {spec.kv_heads} KV heads and MLP width of {mlp} cannot "
            f"be divided by that; choose from {', '.join(map(str, fits))}",
            param="tensor_parallel",
        )
