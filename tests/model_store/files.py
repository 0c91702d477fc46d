"""Tiny GGUF files, written with the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 2, 4, 2, 64
ALPHABET = sorted(ByteLevel.alphabet())
SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
END = TOKENS.index("<|end|>")
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def shapes(architecture: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    top: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        top["output.weight"] = (len(TOKENS), HIDDEN)
    return top | {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def quantised(random: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random values in a number format; for those that `gguf` cannot make, random blocks with sane scales."""
    values = random.standard_normal(shape, dtype=np.float32)
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // per_block, size), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind.name]
        for start in at:
            blocks[..., start : start + 2] = scale
        return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    tied: bool = True,
    pre: str = "smollm",
    tensors: dict[str, np.ndarray] | None = None,
    seed: int = 0,
    **metadata: Any,
) -> Path:
    """`kinds`: formats other than `kind`, by a part of the names of tensors."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(END + 1)
    writer.add_eos_token_id(END)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(name, value)
    for name, shape in shapes(architecture, tied=tied).items():
        chosen = next((other for part, other in (kinds or {}).items() if part in name), kind)
        # As everywhere: vectors stay as they are, matrices are quantised.
        if len(shape) == 1 or chosen == "F32":
            writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))
        elif chosen == "F16":
            writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32).astype(np.float16))
        else:
            packed = gguf.GGMLQuantizationType[chosen]
            writer.add_tensor(name, quantised(random, shape, packed), raw_dtype=packed)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
