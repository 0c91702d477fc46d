"""The results of `transformers` for a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def reference_config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def reference_tensors(path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference_config(path))
    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    return tensors


def reference_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
