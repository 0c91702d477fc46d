"""Mixtures of experts from GGUF files: the same logits as from the checkpoint that the file was converted from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headgate.device.build import read_model_spec
from headgate.device.weights.gguf import GGUFWeights, StoredGGUF, keep_as_stored
from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.layers.choice import available_backends
from headgate.layers.formats import Floating, GgufBlocks
from headgate.model_store.gguf import read_gguf
from headgate.models import build_model
from tests.models.families import write_model
from tests.models.pages import Pages, load, prompt

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FAMILIES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "ernie4_5_moe": "ernie4_5-moe"}


def gguf_name(name: str) -> str:
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    base, _, suffix = name.rpartition(".")
    if base in TOP:
        return f"{TOP[base]}.{suffix}"
    layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", base).groups()  # type: ignore[union-attr]
    if shared := re.fullmatch(r"mlp\.shared_experts?\.(\w+)", part):
        return f"blk.{layer}.ffn_{EXPERTS[shared[1]]}_shexp.{suffix}"
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def pairs_from_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def converted(folder: Path, path: Path, architecture: str, kinds: tuple[str, ...] = (), **changes: Any) -> Path:
    """`kinds`: the kinds of block of the experts' stacks in turn, if they are quantised."""
    config = json.loads((folder / "config.json").read_text()) | changes
    tensors = {name: tensor.numpy() for name, tensor in SafetensorsFolder(folder)}
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, config)
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        values = tensors[name]
        if expert := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.\d+\.(\w+)\.weight", name):
            stacks.setdefault(f"blk.{expert[1]}.ffn_{EXPERTS[expert[2]]}_exps.weight", []).append(values)
            continue
        if architecture == "llama" and re.search("[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = pairs_from_halves(values, heads)
        if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
            values = values.reshape(-1)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for i, (name, each) in enumerate(stacks.items()):
        if kinds:
            kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)]]
            writer.add_tensor(name, gguf.quantize(np.stack(each), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or hidden // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    count = next(config[key] for key in ("num_local_experts", "num_experts", "moe_num_experts") if key in config)
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    for key, add in {
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
    }.items():
        if key in config:
            add(config[key])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_gives_the_logits_of_the_checkpoint_that_it_was_converted_from(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family, tokenizer=False)
    path = converted(folder, tmp_path / "model.gguf", FAMILIES[family])
    model = build_model(read_model_spec(path))
    load_weights(model, GGUFWeights(path))
    tokens = prompt(20)
    expected = Pages(load(folder)).step({"a": tokens})["a"]
    torch.testing.assert_close(Pages(model).step({"a": tokens})["a"], expected, rtol=0, atol=1e-5)


# By down, gate and up, in the order of their names.
KINDS = {"alike": ("Q8_0",), "down differs": ("Q5_1", "Q4_0", "Q4_0"), "gate differs": ("Q8_0", "Q4_1", "Q5_0")}


@pytest.mark.skipif("cpu" not in available_backends(), reason="needs the compiled kernels")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_experts_stay_in_the_blocks_of_their_file(tmp_path: Path, family: str, kinds: tuple[str, ...]) -> None:
    folder = write_model(tmp_path / "model", family, tokenizer=False)
    path = converted(folder, tmp_path / "model.gguf", FAMILIES[family], kinds)
    model = build_model(read_model_spec(path), backend="cpu")
    keep_as_stored(model, path)
    load_weights(model, StoredGGUF(path))
    stored = {each.name: each.kind for each in read_gguf(path).tensors.values()}
    names = [name for name in dict(model.parameters()) if ".experts.7." in name]
    formats = {name.split(".")[-2]: dict(model.parameters())[name].format for name in names if ".layers.0." in name}
    by_part = {part: stored[f"blk.0.ffn_{EXPERTS[part]}_exps.weight"] for part in formats}
    together = {kind for part, kind in by_part.items() if EXPERTS[part] != "down"}
    for part, kind in by_part.items():
        kept = EXPERTS[part] == "down" or len(together) == 1
        assert formats[part] == (GgufBlocks(kind) if kept else Floating(torch.float32)), part
    reference = build_model(read_model_spec(path), backend="torch")
    load_weights(reference, GGUFWeights(path))
    tokens = prompt(20)
    expected = Pages(reference).step({"a": tokens})["a"]
    whole = Pages(model).step({"a": tokens})["a"]
    torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-4)
    pages = Pages(model)
    assert torch.equal(torch.cat([pages.step({"a": [token]})["a"] for token in tokens]), whole)


def test_25_a_missing_expert_of_a_file_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", tokenizer=False)
    path = converted(folder, tmp_path / "model.gguf", "qwen3moe", num_experts=9)
    model = build_model(read_model_spec(path))
    with pytest.raises(BrokenCheckpoint, match=r"lacks tensor model\.layers\.0\.mlp\.experts\.8\.down_proj\.weight"):
        load_weights(model, GGUFWeights(path))


def test_mixtures_of_other_families_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3_moe", tokenizer=False)
    path = converted(folder, tmp_path / "model.gguf", "dots1")
    with pytest.raises(
        UnsupportedModel, match="architecture dots1; GGUF files of mixtures of experts llama, qwen2moe"
    ):
        read_model_spec(path)
