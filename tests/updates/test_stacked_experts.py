"""Experts in every form in which checkpoints and trainers store them: one by one, stacked, fused, in any order."""

from __future__ import annotations

import random

import pytest
import torch

from headgate.device.weights.loading import SafetensorsFolder, TensorInfo, load_weights
from headgate.device.weights.stacking import pieces_of, stacked_names
from headgate.device.weights.staging import CPU, StagedWeights
from headgate.errors import BrokenCheckpoint
from headgate.models import build_model, read_spec
from headgate.protocol.command import TensorSpec
from headgate.testing.tiny import tiny_model
from tests.models.pages import Pages, prompt

EXPERTS, LAYERS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tokenizer=False)


@pytest.fixture(scope="module")
def tensors(folder):
    return dict(SafetensorsFolder(folder))


class Given:
    def __init__(self, tensors):
        self.tensors = tensors

    def metadata(self):
        return {name: TensorInfo(each.dtype, tuple(each.shape)) for name, each in self.tensors.items()}

    def __iter__(self):
        yield from self.tensors.items()


def experts(tensors, layer, part):
    return [tensors[f"model.layers.{layer}.mlp.experts.{i}.{part}.weight"] for i in range(EXPERTS)]


def stacked(tensors, *, fused, suffix=""):
    """As `transformers` 5 (fused), or with gate and up apart."""
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        gate, up, down = (torch.stack(experts(tensors, layer, f"{part}_proj")) for part in ("gate", "up", "down"))
        parts = {"gate_up_proj": torch.cat([gate, up], 1)} if fused else {"gate_proj": gate, "up_proj": up}
        for name, tensor in (parts | {"down_proj": down}).items():
            others[f"model.layers.{layer}.mlp.experts.{name}{suffix}"] = tensor
    return others


def fused_one_by_one(tensors):
    found = {name: tensor for name, tensor in tensors.items() if "gate_proj" not in name and "up_proj" not in name}
    for layer in range(LAYERS):
        pairs = zip(experts(tensors, layer, "gate_proj"), experts(tensors, layer, "up_proj"), strict=True)
        for i, pair in enumerate(pairs):
            found[f"model.layers.{layer}.mlp.experts.{i}.gate_up_proj.weight"] = torch.cat(pair)
    return found


FORMS = {
    "one by one": dict,
    "stacked and fused": lambda tensors: stacked(tensors, fused=True),
    "stacked and fused, as weights": lambda tensors: stacked(tensors, fused=True, suffix=".weight"),
    "stacked": lambda tensors: stacked(tensors, fused=False),
    "fused": fused_one_by_one,
}


def shuffled(tensors):
    names = list(tensors)
    random.Random(3).shuffle(names)
    return {name: tensors[name] for name in names}


def logits(folder, source):
    model = build_model(read_spec(folder))
    load_weights(model, source)
    return Pages(model).step({"a": prompt(20)})["a"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_experts_gives_the_same_bits(folder, tensors, form):
    expected = logits(folder, SafetensorsFolder(folder))
    assert torch.equal(logits(folder, Given(shuffled(FORMS[form](tensors)))), expected)


@pytest.mark.parametrize("form", FORMS)
def test_79_parts_of_every_form_are_collected(folder, tensors, form):
    expected = {name: parameter.shape for name, parameter in build_model(read_spec(folder)).parameters()}
    staged = StagedWeights(expected, CPU, lambda _: 2**40)
    given = shuffled(FORMS[form](tensors))
    for name, tensor in given.items():
        assert staged.wants(name) and staged.state().missing > 0
        staged.verify([TensorSpec(name, "float32", tuple(tensor.shape))])
        staged.add([(name, tensor)])
    assert staged.state().missing == 0 and all(name in staged for name in given)
    assert torch.equal(logits(folder, staged), logits(folder, SafetensorsFolder(folder)))


def test_25_a_missing_expert_is_named(folder, tensors):
    lacking = stacked(tensors, fused=True)
    name = "model.layers.1.mlp.experts.down_proj"
    lacking[name] = lacking[name][:-1]
    with pytest.raises(BrokenCheckpoint, match=r"lacks tensor model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight"):
        logits(folder, Given(lacking))


def test_25_an_expert_too_many_is_named(folder, tensors):
    given = stacked(tensors, fused=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    given[name] = torch.cat([given[name], given[name][:1]])
    with pytest.raises(BrokenCheckpoint, match=r"no place for tensor model\.layers\.0\.mlp\.experts\.8\.gate_proj"):
        logits(folder, Given(given))


def test_25_an_expert_in_two_forms_is_refused(folder, tensors):
    given = stacked(tensors, fused=True) | {
        name: tensor for name, tensor in tensors.items() if ".0.mlp.experts.3.up_proj" in name
    }
    with pytest.raises(BrokenCheckpoint, match=r"has tensor .*experts\.3\.up_proj\.weight twice"):
        logits(folder, Given(given))


def test_25_experts_of_another_shape_are_refused(folder, tensors):
    given = stacked(tensors, fused=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    given[name] = given[name].transpose(1, 2).contiguous()
    with pytest.raises(BrokenCheckpoint, match=r"experts\.0\.gate_proj\.weight has shape \[32, 192\]"):
        logits(folder, Given(given))


def test_a_tensor_of_a_dense_model_is_itself():
    assert [piece.name for piece in pieces_of("a.weight", (4, 4), {"a.weight": (4, 4)})] == ["a.weight"]
    assert [piece.name for piece in pieces_of("odd", (0, 4, 4), {"a.weight": (4, 4)})] == ["odd"]
    assert "model.layers.0.mlp.gate_up_proj" in stacked_names(["model.layers.0.mlp.gate_proj.weight"])
