"""Random checkpoints in the shape of known models: `python benchmarks/checkpoint.py qwen3-0.6b FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headgate.testing.tiny import tiny_model

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
}


def checkpoint(shape: str, folder: Path) -> Path:
    """The folder, made if it is not there yet."""
    if not (folder / "config.json").exists():
        tiny_model(folder, "qwen3", dtype="bfloat16", tokenizer=False, **SHAPES[shape])
    return folder


if __name__ == "__main__":
    print(checkpoint(sys.argv[1], Path(sys.argv[2])))
