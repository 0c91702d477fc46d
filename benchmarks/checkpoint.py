"""Random checkpoints in the shape of known models: `python benchmarks/checkpoint.py qwen3-0.6b FOLDER [tokenizer]`.

With a tokenizer they can be served: one token per byte, and a made-up word for every other id, so that any answer is
text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headgate.testing.tiny import NAMES, tiny_config, tiny_model, write_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "qwen3_moe-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "mixtral-8x0.1b": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    },
    "gpt_oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    },
}


def config_of(shape: str) -> dict[str, Any]:
    """The contents of config.json."""
    family = shape.partition("-")[0]
    return tiny_config(family if family in NAMES else "llama", "bfloat16") | SHAPES[shape]


def checkpoint(shape: str, folder: Path) -> Path:
    """The folder of the checkpoint, which is created if it does not exist."""
    if not (folder / "config.json").exists():
        tiny_model(folder, dtype="bfloat16", tokenizer=False, **config_of(shape))
    return folder


def add_tokenizer(folder: Path) -> None:
    write_tokenizer(folder)
    path, size = folder / "tokenizer.json", json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    specials = len(tokenizer["added_tokens"])
    vocabulary |= {f"w{id}": id for id in range(len(vocabulary) + specials, size)}
    path.write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    print(folder := checkpoint(sys.argv[1], Path(sys.argv[2])))
    if "tokenizer" in sys.argv[3:]:
        add_tokenizer(folder)
