"""Writes checkpoints with random weights in Hugging Face format, small enough for a test and complete enough to serve.

This module does not import torch: it writes the `safetensors` layout directly, so tests that only need a model folder
do not need torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False, "head_dim": 16},
    "mixtral": {"sliding_window": None, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "use_sliding_window": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {
        "use_sliding_window": False,
        "attention_bias": False,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    folder: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a tiny random model to `folder` and return the folder; any key of `config.json` can be overridden."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, dtype) | config_overrides
    write_json(folder / "config.json", config)
    write_tensors(folder, tiny_tensors(config, seed), dtype, shards)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def tiny_config(architecture: str, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [NAMES[architecture]],
        "model_type": architecture,
        "dtype": dtype,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256 + len(SPECIALS),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    return config | OWN[architecture]


def tiny_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: fill(random, name, shape) for name, shape in tensor_shapes(config)}


def fill(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random values, large enough that the next token depends on all previous tokens, not only on the last."""
    noise = random.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return 0.3 * noise
    return noise * np.float32(1.5 / np.sqrt(shape[-1]))


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, i):
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def layer_shapes(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, rows, columns in (
        ("self_attn.q_proj", q, hidden),
        ("self_attn.k_proj", kv, hidden),
        ("self_attn.v_proj", kv, hidden),
        ("self_attn.o_proj", hidden, q),
        *mlp_shapes(config, layer),
    ):
        yield f"{name}.weight", (rows, columns)
        if has_bias(config, name):
            yield f"{name}.bias", (rows,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config["model_type"].startswith("qwen3"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)


Shape = tuple[str, int, int]  # name, rows, columns


def mlp_shapes(config: dict[str, Any], layer: int) -> list[Shape]:
    hidden, kind = config["hidden_size"], config["model_type"]
    if kind == "mixtral":
        width, names = config["intermediate_size"], ("w1", "w3", "w2")
        return [
            ("block_sparse_moe.gate", config["num_local_experts"], hidden),
            *expert_shapes("block_sparse_moe.experts", config["num_local_experts"], hidden, width, names),
        ]
    if not kind.endswith("moe") or layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
        return gated_shapes("mlp", hidden, config["intermediate_size"])
    shapes = [("mlp.gate", config["num_experts"], hidden)]
    shapes += expert_shapes("mlp.experts", config["num_experts"], hidden, config["moe_intermediate_size"])
    if kind == "qwen2_moe":
        shapes += gated_shapes("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes.append(("mlp.shared_expert_gate", 1, hidden))
    return shapes


GATED = ("gate_proj", "up_proj", "down_proj")


def gated_shapes(prefix: str, hidden: int, width: int, names: tuple[str, str, str] = GATED) -> list[Shape]:
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return [(gate, width, hidden), (up, width, hidden), (down, hidden, width)]


def expert_shapes(
    prefix: str, count: int, hidden: int, width: int, names: tuple[str, str, str] = GATED
) -> list[Shape]:
    return [shape for i in range(count) for shape in gated_shapes(f"{prefix}.{i}", hidden, width, names)]


def has_bias(config: dict[str, Any], name: str) -> bool:
    if name.startswith(("mlp", "block_sparse_moe")):
        return bool(config.get("mlp_bias"))
    if config["model_type"].startswith("qwen2"):
        return not name.endswith("o_proj")
    return bool(config.get("attention_bias"))


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], dtype: str, shards: int) -> None:
    names = list(tensors)
    if shards == 1:
        return write_shard(folder / "model.safetensors", tensors, dtype)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        write_shard(folder / file, {name: tensors[name] for name in names if files[name] == file}, dtype)
    return write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def write_shard(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Write a safetensors file: the length of the header, the header, and the tensor bytes."""
    encoded = {name: encode(tensor, dtype) for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, data in encoded.items():
        start, end = end, end + len(data)
        header[name] = {"dtype": STORED[dtype], "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *encoded.values())))


def encode(tensor: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":  # numpy lacks this type, which is the upper half of a float32
        return (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return tensor.astype(dtype).tobytes()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte, followed by the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[3],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
