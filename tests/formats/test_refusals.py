"""What cannot be read correctly is refused by name: settings by `read_spec`, tensors before the first write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headgate.device.weights.loading import load_weights
from headgate.device.weights.resources import open_files
from headgate.errors import BrokenCheckpoint, UnsupportedModel
from headgate.models import build_model, read_spec
from headgate.testing.tiny import tiny_model
from tests.formats.encoders import (
    CASES,
    FP8_BLOCKS,
    Case,
    awq_config,
    float_config,
    gptq_config,
    int_config,
    pack_config,
    write_quantised,
)
from tests.models.pages import Pages, prompt

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
UP = "model.layers.1.mlp.up_proj"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain"), tokenizer=False, **SIZES)


def group(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config with other settings of its only group."""
    [(name, found)] = config["config_groups"].items()
    return config | {"config_groups": {name: found | more}}


def weights(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return group(config, weights=config["config_groups"]["group_0"]["weights"] | more)


PACK = pack_config(4, 32, symmetric=True)
REFUSED = [
    (
        {"quant_method": "bitsandbytes"},
        "quantised with bitsandbytes, which cannot be read; fp8, fbgemm_fp8, awq, gptq",
    ),
    ({"bits": 4}, "quantised with an unnamed method"),
    ({"quant_method": "mxfp4"}, "quantised with mxfp4, which cannot be read"),
    (gptq_config(3, 32), "quantization_config: bits is 3; 4, 8 can be read"),
    (gptq_config(4, 0), "group_size is 0; it must be positive, or -1 for whole rows"),
    (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format is 'marlin'; gptq, gptq_v2 can be read"),
    (gptq_config(4, 32, is_marlin_format=True), "is_marlin_format is True; False can be read"),
    (gptq_config(4, 32, pack_dtype="int16"), "pack_dtype is 'int16'; int32 can be read"),
    (gptq_config(4, 32, dynamic={"-:lm_head": {}}), "dynamic is {'-:lm_head': {}}, which is not supported"),
    (gptq_config(4, 32, sym="yes"), "sym is 'yes', which is not valid"),
    (awq_config(32, bits=3), "bits is 3; 4 can be read"),
    (awq_config(32, version="gemv"), "version is 'gemv'; gemm, GEMM can be read"),
    (awq_config(32, zero_point=False), "zero_point is False; True can be read"),
    (awq_config(32, backend="llm-awq"), "backend is 'llm-awq'"),
    (awq_config(32, modules_to_not_convert=[3]), "modules_to_not_convert has 3, which is not the name of a module"),
    (FP8_BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2'; e4m3 can be read"),
    (FP8_BLOCKS | {"activation_scheme": "none"}, "activation_scheme is 'none'; dynamic, static can be read"),
    (FP8_BLOCKS | {"weight_block_size": [128]}, "weight_block_size is [128], which is not a number of rows and of"),
    (FP8_BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
    (FP8_BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; fp8 can be read"),
    (
        PACK | {"kv_cache_scheme": {"num_bits": 8}},
        "kv_cache_scheme is not supported; use a checkpoint without scales",
    ),
    (PACK | {"quantization_status": "frozen"}, "quantization_status is 'frozen'; compressed can be read"),
    (PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights cannot be read"),
    (PACK | {"transform_config": {"config_groups": {}}}, "transform_config is"),
    (PACK | {"config_groups": {}}, "lacks config_groups"),
    (PACK | {"format": "marlin-24"}, "format 'marlin-24' cannot be read; float-quantized, int-quantized, naive"),
    (PACK | {"ignore": ["re:("]}, "ignore has 're:(', which is not a pattern"),
    (group(PACK, weights=None), "lacks weights; activations are not rounded here"),
    (
        group(PACK, input_activations={"num_bits": 4, "type": "int"}),
        "weights made for activations of fewer than 8 bits",
    ),
    (group(PACK, output_activations={"num_bits": 4}), "output_activations: num_bits is 4"),
    (weights(PACK, num_bits=3), "weights: num_bits is 3; 4, 8 can be read"),
    (weights(PACK, num_bits=None), "weights: num_bits is None; 4, 8 can be read"),
    (weights(PACK, type="float"), "weights: type is 'float'; int can be read"),
    (weights(PACK, strategy="tensor_group"), "strategy is 'tensor_group'; channel, group can be read"),
    (weights(PACK, group_size=None), "weights lacks group_size"),
    (weights(PACK, dynamic=True), "dynamic is True; False can be read"),
    (weights(PACK, actorder="random"), "actorder is 'random'"),
    (
        weights(int_config("group", group=32), actorder="group"),
        "actorder 'group' is read in the format pack-quantized",
    ),
    (float_config("token"), "strategy is 'token'; tensor, channel, block can be read"),
    (float_config("channel") | {"format": "int-quantized"}, "type is 'float'; int can be read"),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSED)
def test_settings_that_are_not_understood_are_refused_by_name(tmp_path, config, sentence):
    folder = tiny_model(tmp_path, tokenizer=False, quantization_config=config)
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(folder)
    assert sentence in str(refusal.value)


def test_a_format_of_each_group_goes_before_that_of_all_matrices(tmp_path):
    groups = PACK["config_groups"] | {
        "eight": PACK["config_groups"]["group_0"]
        | {
            "targets": ["re:.*down_proj", "model.layers.0.mlp.up_proj"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    }
    config = PACK | {"config_groups": groups, "ignore": ["lm_head", "re:.*o_proj"]}
    quantisation = read_spec(tiny_model(tmp_path, tokenizer=False, quantization_config=config)).quantisation
    bits = {
        name: format and format.bits
        for name in ("q_proj", "down_proj", "mlp.up_proj", "o_proj")
        for format in [quantisation.format_of(f"model.layers.0.{name}.weight")]
    }
    assert bits == {"q_proj": 4, "down_proj": 8, "mlp.up_proj": 8, "o_proj": None}
    assert quantisation.format_of("lm_head.weight") is None
    assert quantisation.format_of("model.layers.1.mlp.up_proj.weight").bits == 4


# -- tensors -----------------------------------------------------------------------------


def without(ending: str):
    return lambda tensors: tensors.pop(UP + ending)


def replaced(ending: str, change):
    def spoil(tensors: Tensors) -> None:
        tensors[UP + ending] = change(tensors[UP + ending]).contiguous()

    return spoil


def added(ending: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({UP + ending: tensor})


def nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone().flatten()
    changed[0] = torch.nan
    return changed.view(tensor.shape)


def bits_of_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.view(torch.uint8).clone()
    changed[0, 0] = 0x7F
    return changed.view(tensor.dtype)


BROKEN = [
    ("awq, groups", without(".scales"), "has tensor {up}.qweight and lacks the scales"),
    ("awq, groups", without(".qzeros"), "has tensor {up}.qweight and lacks the zero points"),
    ("awq, groups", without(".qweight"), "has tensor {up}.qzeros and lacks the numbers"),
    ("awq, groups", replaced(".qweight", torch.t), "{up}.qweight is of 24 inputs, which groups of 32 do not divide"),
    ("awq, groups", replaced(".scales", torch.t), "{up}.scales has shape [192, 4], which does not fit"),
    ("awq, groups", replaced(".scales", lambda scale: scale[:-1]), "{up}.scales has shape [3, 192]"),
    ("awq, groups", replaced(".qweight", lambda words: words.long()), "{up}.qweight has dtype int64"),
    ("awq, groups", replaced(".scales", nan), "{up}.scales has scales that are infinite or NaN"),
    ("awq, groups", added(".weight", torch.zeros(192, 128)), "{up}.qweight beside {up}.weight, which is in float32"),
    ("awq, groups", added(".g_idx", torch.zeros(128, dtype=torch.int32)), "{up}.g_idx has no place in a weight"),
    ("gptq, groups", replaced(".qweight", torch.t), "{up}.scales has shape [4, 192], which does not fit"),
    ("gptq, groups", replaced(".qzeros", lambda words: words + 1), "zero points other than 8, and sym is true"),
    ("gptq, groups", replaced(".g_idx", lambda order: order.flip(0)), "{up}.g_idx reorders the inputs, and desc_act"),
    ("gptq, zeros", replaced(".qzeros", lambda words: words | 0xF0), "{up}.qzeros stores the zero point 15, which"),
    ("gptq, ordered", without(".g_idx"), "lacks the order of its inputs"),
    ("gptq, ordered", replaced(".g_idx", lambda order: order + 1), "{up}.g_idx names groups outside 0 to 3"),
    ("gptq, ordered", replaced(".g_idx", lambda order: order[1:]), "{up}.g_idx has shape [127]"),
    ("pack-quantized, groups", without(".weight_shape"), "lacks the shape (weight_shape)"),
    (
        "pack-quantized, groups",
        replaced(".weight_shape", lambda shape: shape.flip(0)),
        "declares a weight of shape [128",
    ),
    (
        "pack-quantized, groups",
        added(".weight_zero_point", torch.zeros(24, 4, dtype=torch.int32)),
        "{up}.weight_zero_point has zero points, and the weights are declared as symmetric",
    ),
    ("pack-quantized, zeros", without(".weight_zero_point"), "lacks the zero points"),
    ("pack-quantized, zeros", replaced(".weight_zero_point", torch.t), "{up}.weight_zero_point has shape [4, 24]"),
    ("pack-quantized, ordered", replaced(".weight_g_idx", lambda order: order - 1), "names groups outside 0 to 3"),
    ("fp8, blocks", without(".weight_scale_inv"), "has tensor {up}.weight and lacks the scales"),
    ("fp8, blocks", replaced(".weight_scale_inv", torch.t), "{up}.weight_scale_inv has shape [1, 2]"),
    ("fp8, blocks", replaced(".weight_scale_inv", nan), "scales that are infinite or NaN"),
    (
        "fp8, blocks",
        added(".weight_scale", torch.ones(2, 1)),
        "_scale and {up}.weight_scale_inv, which mean the same",
    ),
    ("fp8, blocks", replaced(".weight", lambda numbers: numbers.to(torch.float8_e5m2)), "has dtype float8_e5m2"),
    ("fp8, blocks", replaced(".weight", torch.Tensor.float), "{up}.weight_scale_inv beside {up}.weight, which is in"),
    (
        "float-quantized, rows",
        replaced(".weight_scale", lambda scale: scale[:1]),
        "{up}.weight_scale has shape [1, 1]",
    ),
    ("float-quantized, tensors", replaced(".weight_scale", lambda scale: scale.expand(192)), "has shape [192]"),
    ("int-quantized, rows", replaced(".weight_scale", torch.t), "{up}.weight_scale has shape [1, 192]"),
    ("int-quantized, rows with zeros", without(".weight_zero_point"), "lacks the zero points"),
    ("int-quantized, groups", without(".weight_scale"), "lacks the scales"),
]


@pytest.mark.parametrize(("case", "spoil", "sentence"), BROKEN)
def test_25_a_weight_whose_parts_do_not_fit_is_named_and_nothing_changes(plain, tmp_path, case, spoil, sentence):
    packed, _ = write_quantised(plain, tmp_path, CASES[case])
    model = build_model(read_spec(packed))
    load_weights(model, open_files(packed))
    before = Pages(model).step({"a": prompt(9)})["a"]
    broken = change_tensors(packed, tmp_path / "broken", spoil)
    with pytest.raises(BrokenCheckpoint) as refusal:
        load_weights(model, open_files(broken))
    assert sentence.format(up=UP) in str(refusal.value)
    assert torch.equal(Pages(model).step({"a": prompt(9)})["a"], before)


def change_tensors(packed: Path, folder: Path, spoil: Any) -> Path:
    shutil.copytree(packed, folder)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_numbers_that_are_nan_are_refused(plain, tmp_path):
    packed, _ = write_quantised(plain, tmp_path, CASES["fp8, blocks"])
    broken = change_tensors(packed, tmp_path / "broken", replaced(".weight", bits_of_nan))
    with pytest.raises(Exception, match=r"tensor .*up_proj.weight has numbers that are NaN"):
        load_weights(build_model(read_spec(broken)), open_files(broken))


@pytest.mark.parametrize("listed", ["model.layers.1.mlp.up_proj", "up_proj", "model.layers.1.mlp"])
def test_a_quantised_weight_of_a_module_that_is_not_to_be_converted_is_refused(plain, tmp_path, listed):
    case = Case(awq_config(32, modules_to_not_convert=["lm_head", listed]), CASES["awq, groups"].encode)
    packed, _ = write_quantised(plain, tmp_path, case)
    with pytest.raises(BrokenCheckpoint, match=r"and its config says that .*proj.weight is not quantised"):
        load_weights(build_model(read_spec(packed)), open_files(packed))


def test_a_packed_weight_of_another_size_is_refused_like_any_other(plain, tmp_path):
    packed, _ = write_quantised(plain, tmp_path, CASES["fp8, scalars"])
    broken = change_tensors(packed, tmp_path / "broken", replaced(".weight", torch.t))
    with pytest.raises(
        BrokenCheckpoint, match=r"up_proj.weight has shape \[128, 192\]; the model expects \[192, 128\]"
    ):
        load_weights(build_model(read_spec(broken)), open_files(broken))


def test_scales_of_the_kv_cache_are_refused_by_name(plain, tmp_path):
    packed, _ = write_quantised(plain, tmp_path, CASES["fp8, tensors"])
    name = "model.layers.0.self_attn.k_scale"
    broken = change_tensors(packed, tmp_path / "broken", lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(BrokenCheckpoint, match=f"no place for tensor {name}"):
        load_weights(build_model(read_spec(broken)), open_files(broken))


def test_a_config_under_its_old_name_is_read(tmp_path):
    config = json.loads(json.dumps(PACK))
    folder = tiny_model(tmp_path, tokenizer=False, compression_config=config)
    assert str(read_spec(folder).quantisation) == "compressed-tensors, INT4 with a scale per 32 columns"
