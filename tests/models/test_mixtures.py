"""Configs and checkpoints of mixtures of experts: what is read, what is not used, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.models import Config, spec_of
from headgate.models.spec import Experts
from tests.models.families import write_family
from tests.models.pages import Pages, load, prompt

ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 48,
}
GLM = ERNIE | {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 16}

OSS = ERNIE | {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4}


def read(values, **more):
    return spec_of(Config("config.json", values | more))


def sparse(spec):
    return [i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, Experts)]


def test_ernie_has_experts_in_a_range_of_layers():
    assert sparse(read(ERNIE)) == [1, 2, 3, 4]
    assert sparse(read(ERNIE, moe_layer_start_index=2, moe_layer_end_index=3)) == [2, 3]
    assert sparse(read(ERNIE, moe_layer_interval=2, moe_layer_start_index=0)) == [1, 3]
    assert read(ERNIE).layers[1].mlp.shared == 96


def test_glm_has_experts_after_some_dense_layers():
    assert sparse(read(GLM)) == [1, 2, 3, 4]
    assert sparse(read(GLM, first_k_dense_replace=3)) == [3, 4]
    assert read(GLM).rope.dimensions(16) == 8


def test_gpt_oss_has_windows_in_every_other_layer_and_scaled_angles_by_default():
    spec = read(OSS)
    assert [layer.attention.window for layer in spec.layers] == [128, None, 128, None]
    assert (spec.head_dim, spec.rope.theta, spec.rope.scaling.factor) == (64, 150_000.0, 32.0)
    assert read(OSS, rope_parameters={"rope_type": "default", "rope_theta": 5.0}).rope.scaling is None
    assert read(OSS, quantization_config={"quant_method": "mxfp4"}) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (ERNIE | {"use_bias": True}, "ERNIE 4.5 MoE with use_bias is not supported"),
        (ERNIE | {"moe_gate_act": "sigmoid"}, "moe_gate_act 'sigmoid' is not supported; softmax is"),
        (ERNIE | {"moe_norm_min": 0.1}, "moe_norm_min 0.1 is not supported"),
        (ERNIE | {"moe_layer_interval": 0}, "moe_layer_interval = 0"),
        (ERNIE | {"moe_num_experts": 2**20}, "moe_num_experts is 1048576; the maximum is 16384"),
        (ERNIE | {"moe_k": 65}, "each token uses 65 of 64 experts"),
        (OSS | {"swiglu_limit": 0}, "swiglu_limit 0.0 is not supported; it must be positive"),
        (OSS | {"layer_types": ["full_attention"]}, "1 layer types are given for 4 layers"),
        (
            OSS | {"quantization_config": {"quant_method": "gptq"}},
            "quantised with gptq, which cannot be read; mxfp4 can",
        ),
        (GLM | {"n_group": 3}, "1 of 3 groups of 128 experts cannot be chosen"),
        (GLM | {"n_group": 32, "num_experts_per_tok": 8}, "1 groups have fewer than 8 experts"),
        (GLM | {"num_nextn_predict_layers": 65}, "num_nextn_predict_layers is 65; the maximum is 64"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused_by_name(values, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(values)


@pytest.mark.parametrize(
    ("family", "name"),
    [("ernie4_5_moe", "model.mtp_block.0.input_layernorm.weight"), ("glm4_moe", "model.layers.3.eh_proj.weight")],
)
def test_tensors_that_only_predict_further_tokens_are_not_used(tmp_path, family, name):
    folder = write_family(tmp_path, family, tokenizer=False)
    expected = Pages(load(folder)).step({"a": prompt(9)})["a"]
    add_tensor(folder, name)
    assert torch.equal(Pages(load(folder)).step({"a": prompt(9)})["a"], expected)


def test_a_layer_beyond_those_is_refused(tmp_path):
    folder = write_family(tmp_path, "glm4_moe", tokenizer=False)
    add_tensor(folder, "model.layers.4.eh_proj.weight")
    with pytest.raises(BrokenCheckpoint, match=r"no place for tensor model\.layers\.4\.eh_proj\.weight"):
        load(folder)


def add_tensor(folder, name):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(4)}, path, metadata={"format": "pt"})
