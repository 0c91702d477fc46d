"""Projections that a checkpoint or a trainer stores together, and the same ones apart, give the same bits."""

from __future__ import annotations

import pytest
import torch

from headgate.device.weights.loading import SafetensorsFolder, load_weights
from headgate.device.weights.stacking import FUSED
from headgate.device.weights.staging import CPU, StagedWeights
from headgate.errors import BrokenCheckpoint
from headgate.models import build_model, read_spec
from headgate.protocol.command import TensorSpec
from tests.models.families import write_model
from tests.models.pages import Pages, prompt
from tests.updates.test_stacked_experts import Given, shuffled

FAMILIES = ("qwen2", "llama", "phi3", "glm4")  # with biases; with neither tensor fused, both, and one of them


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    options = {"num_key_value_heads": 1, "tokenizer": False}
    return write_model(tmp_path_factory.mktemp("model"), request.param, **options)


@pytest.fixture(scope="module")
def apart(folder):
    """The tensors as the model names them."""
    shapes = {name: parameter.shape for name, parameter in build_model(read_spec(folder)).parameters()}
    staged = StagedWeights(shapes, CPU, lambda _: 2**40)
    staged.add(SafetensorsFolder(folder))
    return {name: tensor.clone() for name, tensor in staged}


def fused(apart):
    """The tensors with all projections of a layer in as few tensors as possible."""
    together, rest = {}, dict(apart)
    for name in apart:
        prefix, _, suffix = name.rpartition(".")
        place, _, part = prefix.rpartition(".")
        for whole, parts in FUSED.items():
            names = [f"{place}.{each}.{suffix}" for each in parts]
            if part == parts[0] and all(each in rest for each in names):
                together[f"{place}.{whole}.{suffix}"] = torch.cat([rest.pop(each) for each in names])
    return rest | together


def logits(folder, source):
    model = build_model(read_spec(folder))
    load_weights(model, source)
    return Pages(model).step({"a": prompt(20)})["a"]


def test_25_fused_and_unfused_names_give_the_same_bits(folder, apart):
    expected = logits(folder, SafetensorsFolder(folder))
    together = fused(apart)
    assert any("qkv_proj.weight" in name for name in together) and not any(".k_proj" in name for name in together)
    assert torch.equal(logits(folder, Given(shuffled(together))), expected)
    assert torch.equal(logits(folder, Given(shuffled(apart))), expected)


def test_79_fused_parts_are_collected(folder, apart):
    staged = StagedWeights({name: tuple(tensor.shape) for name, tensor in apart.items()}, CPU, lambda _: 2**40)
    for name, tensor in shuffled(fused(apart)).items():
        assert staged.wants(name), name
        staged.verify([TensorSpec(name, "float32", tuple(tensor.shape))])
        staged.add([(name, tensor)])
    assert staged.state().missing == 0
    assert torch.equal(logits(folder, staged), logits(folder, SafetensorsFolder(folder)))


def test_25_a_fused_tensor_of_another_height_is_refused(folder, apart):
    given = fused(apart)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    given[name] = given[name][:-1]
    with pytest.raises(BrokenCheckpoint, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight has shape"):
        logits(folder, Given(given))
