"""gpt-oss with experts in MXFP4: the model is that of the same numbers in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headgate.device.weights.loading import load_weights
from headgate.device.weights.resources import open_files
from headgate.device.weights.whole import WholeWeights
from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.layers.stored import mxfp4_numbers
from headgate.models import build_model, read_spec
from tests.models.families import write_family
from tests.models.pages import BACKENDS, Pages, prompt
from tests.models.reference import reference_logits

PART = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint with packed experts, and the same with the numbers that they stand for."""
    plain = write_family(tmp_path_factory.mktemp("plain"), "gpt_oss", tokenizer=False)
    packed = Path(shutil.copytree(plain, tmp_path_factory.mktemp("packed"), dirs_exist_ok=True))
    tensors, small = load_file(plain / "model.safetensors"), {}
    random = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], generator=random, dtype=torch.uint8)
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    others = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in small}
    save_file(others | small, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (packed / "config.json").write_text(json.dumps(config | quantised))
    return packed, plain


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_experts_give_the_logits_of_transformers(folders, backend):
    packed, plain = folders
    model = build_model(read_spec(packed), backend=backend)
    load_weights(model, open_files(packed))
    tokens = prompt(40)
    found = Pages(model).step({"a": tokens})["a"]
    torch.testing.assert_close(found, reference_logits(plain, tokens), rtol=0, atol=1e-4)


def test_every_number_and_scale_is_that_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    scales = torch.tensor([100, 120, 126, 127, 128, 130, 140, 150] * 2, dtype=torch.uint8).view(1, 8, 2)
    assert torch.equal(mxfp4_numbers(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_metadata_is_what_iteration_yields(folders):
    whole = WholeWeights(open_files(folders[0]), read_spec(folders[0]).quantisation)
    declared = whole.metadata()
    assert {name: info.shape for name, info in declared.items()} == {
        name: tuple(weight.numbers.shape) for name, weight in whole
    }


def changed(folders, tmp_path: Path, **tensors: torch.Tensor | None) -> Path:
    folder = Path(shutil.copytree(folders[0], tmp_path / "changed"))
    path = folder / "model.safetensors"
    kept = load_file(path) | {f"{PART}{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file({name: each for name, each in kept.items() if each is not None}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"_scales": None}, "has tensor .*down_proj_blocks and lacks the scales"),
        ({"_scales": torch.zeros(4, 64, 1, dtype=torch.uint8)}, "are not an MXFP4 weight"),
        ({"_scales": torch.zeros(4, 64, 2)}, "down_proj_scales has dtype float32; it must be one of uint8"),
        ({"_scales": torch.full((4, 64, 2), 255, dtype=torch.uint8)}, "down_proj_scales has scales that are NaN"),
        ({"_blocks": None, "_scales": None}, r"lacks tensor model\.layers\.1\.mlp\.experts\.down_proj$"),
        ({"_blocks": None}, "has tensor .*down_proj_scales and lacks the numbers"),
    ],
)
def test_25_incomplete_weights_are_refused_and_nothing_changes(folders, tmp_path, tensors, message):
    model = build_model(read_spec(folders[0]))
    load_weights(model, open_files(folders[0]))
    before = Pages(model).step({"a": prompt(9)})["a"]
    with pytest.raises(BrokenCheckpoint, match=message):
        load_weights(model, open_files(changed(folders, tmp_path, **tensors)))
    assert torch.equal(Pages(model).step({"a": prompt(9)})["a"], before)


def test_other_quantised_checkpoints_are_refused(folders, tmp_path):
    folder = Path(shutil.copytree(folders[0], tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModel, match="quantised with fp8"):
        read_spec(folder)
