"""Quantised checkpoints give the answers of the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.device.weights.loading import load_weights
from headgate.device.weights.resources import open_files
from headgate.device.weights.whole import WholeWeights
from headgate.layers.formats import floating_numbers
from headgate.models import Config, build_model, read_spec
from headgate.models.quantisation_config import METHODS, read_quantisation
from headgate.testing.tiny import tiny_model
from tests.formats.encoders import CASES, digest, encoded, write_quantised
from tests.models.families import write_model
from tests.models.pages import BACKENDS, Pages, prompt
from tests.models.reference import reference_logits
from tests.updates.test_stacked_experts import Given

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
# Experts, fused projections, and projections whose rows are stored in another order.
FAMILIES = {
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "phi3": {"intermediate_size": 128},
    "ernie4_5": {"intermediate_size": 128},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain"), tokenizer=False, **SIZES)


def logits_of(folder: Path, backend: str = "auto", **options: object) -> torch.Tensor:
    model = build_model(read_spec(folder), backend=backend, **options)  # type: ignore[arg-type]
    load_weights(model, open_files(folder))
    return Pages(model).step({"a": prompt(40)})["a"]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() < 1e-3 * expected.norm()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_the_numbers_that_are_stored(plain, tmp_path, case):
    packed, dequantised = write_quantised(plain, tmp_path, CASES[case])
    expected = reference_logits(dequantised, prompt(40))
    for backend in BACKENDS:
        assert_close(logits_of(packed, backend), expected)


@pytest.mark.parametrize("case", ["fp8, blocks", "awq, groups", "gptq, ordered zeros", "pack-quantized, zeros"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_fused_projections_are_read_too(tmp_path, family, case):
    written = write_model(tmp_path / "plain", family, tokenizer=False, **{"hidden_size": 128} | FAMILIES[family])
    packed, dequantised = write_quantised(written, tmp_path, CASES[case])
    assert_close(logits_of(packed), reference_logits(dequantised, prompt(40)))


@pytest.mark.parametrize("name", GOLDEN)
def test_weights_that_the_libraries_have_packed_are_read_exactly(name):
    """See check_libraries.py."""
    golden = GOLDEN[name]
    quantisation = read_quantisation(Config("config.json", {"quantization_config": golden["config"]}), METHODS)
    parts = {f"x.up_proj{ending}": tensor_in(part) for ending, part in golden["parts"].items()}
    whole = WholeWeights(Given(parts), quantisation)
    assert {name: info.shape for name, info in whole.metadata().items()} == {"x.up_proj.weight": (32, 64)}
    [(_, weight)] = whole
    assert digest(floating_numbers(weight)) == golden["values"]


def tensor_in(golden: Any) -> torch.Tensor:
    octets = torch.tensor(list(bytes.fromhex(golden["bytes"])), dtype=torch.uint8)
    return octets.view(getattr(torch, golden["dtype"])).view(golden["shape"])


@pytest.mark.parametrize("case", ["fp8, blocks", "gptq, zeros"])
def test_in_bfloat16_every_weight_is_rounded_once(plain, tmp_path, case):
    packed, dequantised = write_quantised(plain, tmp_path, CASES[case])
    found, expected = (logits_of(folder, "torch", dtype=torch.bfloat16) for folder in (packed, dequantised))
    assert torch.equal(found, expected)


class OneBuffer(Given):
    """Each tensor is valid until the next one is requested: all are in the same memory."""

    def __iter__(self):
        buffer = torch.empty(max(each.nbytes for each in self.tensors.values()), dtype=torch.uint8)
        for name, tensor in self.tensors.items():
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            yield name, view


@pytest.mark.parametrize("reverse", [False, True])
def test_components_may_arrive_in_any_order_and_in_the_same_memory(reverse):
    case = CASES["gptq, ordered zeros"]
    tensors, values = encoded({f"a.layers.{i}.up_proj.weight": torch.randn(32, 64) for i in range(3)}, case.encode)
    names = sorted(tensors, key=lambda name: name.rpartition(".")[::-1], reverse=reverse)
    quantisation = read_quantisation(Config("config.json", {"quantization_config": case.config}), METHODS)
    whole = WholeWeights(OneBuffer({name: tensors[name] for name in names}), quantisation)
    whole.metadata()
    found = {name: floating_numbers(weight) for name, weight in whole}
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
