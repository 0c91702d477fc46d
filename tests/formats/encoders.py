"""Writes quantised checkpoints, from the public definition of each format. Slow, and independent of the reader.

`tests/formats/check_libraries.py` compares these encoders with the libraries that define the formats.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]  # the parts by ending, and the numbers that they stand for
Encode = Callable[[torch.Tensor], Encoded]

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word, from the lowest


@dataclass(frozen=True)
class Quantised:
    """Unsigned numbers [rows, columns] in groups of columns: a weight is `(number - zero) * scale`."""

    numbers: np.ndarray
    scale: np.ndarray  # [rows, groups], float32
    zero: np.ndarray  # [rows, groups]
    group_of: np.ndarray  # [columns]

    @property
    def values(self) -> torch.Tensor:
        wide = (self.numbers.astype(np.float64) - self.zero[:, self.group_of]) * self.scale[:, self.group_of]
        return torch.from_numpy(wide.astype(np.float32))


def quantise(
    weight: torch.Tensor,
    bits: int,
    group: int | None,
    *,
    symmetric: bool,
    ordered: bool = False,
    dtype: str = "float16",
) -> Quantised:
    """Round `weight`. `ordered`: columns are in groups in an order that is not their own."""
    wide = weight.float().numpy()
    rows, columns = wide.shape
    size = group or columns
    group_of = np.arange(columns) // size
    if ordered:
        group_of = np.random.default_rng(columns).permutation(group_of)
    groups, most = -(-columns // size), (1 << bits) - 1
    numbers, scale, zero = (
        np.zeros((rows, columns), int),
        np.zeros((rows, groups), np.float32),
        np.zeros((rows, groups), int),
    )
    for g in range(groups):
        mine = group_of == g
        part = wide[:, mine]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        reach = np.maximum(-low, high) / (1 << (bits - 1)) if symmetric else (high - low) / most
        scale[:, g] = rounded(np.maximum(reach, 1e-4), dtype)
        zero[:, g] = 1 << (bits - 1) if symmetric else np.clip(np.rint(-low / scale[:, g]), 1, most)
        numbers[:, mine] = np.clip(np.rint(part / scale[:, g, None]) + zero[:, g, None], 0, most)
    return Quantised(numbers, scale, zero, group_of)


def rounded(scale: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(scale).to(getattr(torch, dtype)).float().numpy()


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack the last axis into int32, the first number in the lowest bits; the last word may be incomplete."""
    per = 32 // bits
    columns = -(-numbers.shape[-1] // per)
    packed = np.zeros((*numbers.shape[:-1], columns), np.uint32)
    for i in range(numbers.shape[-1]):
        packed[..., i // per] |= numbers[..., i].astype(np.uint32) << np.uint32(bits * (i % per))
    return torch.from_numpy(packed.view(np.int32).copy())


def digest(values: torch.Tensor) -> str:
    """SHA-256 of numbers in float32."""
    return hashlib.sha256(values.float().contiguous().numpy().tobytes()).hexdigest()


# -- formats ---------------------------------------------------------------------------


def awq(group: int | None) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        found = quantise(weight, 4, group, symmetric=False)

        def pack(by_input: np.ndarray) -> torch.Tensor:  # [inputs, outputs]
            order = [8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(by_input.shape[1])]
            return words(by_input[:, order], 4)

        parts = {
            ".qweight": pack(found.numbers.T),
            ".qzeros": pack(found.zero.T),
            ".scales": torch.from_numpy(found.scale.T.copy()).half(),
        }
        return parts, found.values

    return encode


def gptq(
    bits: int, group: int | None, *, symmetric: bool, ordered: bool = False, less_one: bool = True, g_idx: bool = True
) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        found = quantise(weight, bits, group, symmetric=symmetric, ordered=ordered)
        parts = {
            ".qweight": words(found.numbers, bits).T.contiguous(),
            ".qzeros": words(found.zero.T - less_one, bits),
            ".scales": torch.from_numpy(found.scale.T.copy()).half(),
        }
        if g_idx:
            parts[".g_idx"] = torch.from_numpy(found.group_of.astype(np.int32))
        return parts, found.values

    return encode


def packed_rows(bits: int, group: int | None, *, symmetric: bool, ordered: bool = False) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        found = quantise(weight, bits, group, symmetric=symmetric, ordered=ordered, dtype="bfloat16")
        parts = {
            ".weight_packed": words(found.numbers, bits),
            ".weight_scale": torch.from_numpy(found.scale).bfloat16(),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = words(found.zero.T, bits).T.contiguous()
        if ordered:
            parts[".weight_g_idx"] = torch.from_numpy(found.group_of.astype(np.int32))
        return parts, found.values

    return encode


def int_rows(scales: str, group: int | None = None, *, symmetric: bool = True) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        flat = weight.reshape(1, -1) if scales == "tensor" else weight
        found = quantise(flat, 8, group, symmetric=symmetric, dtype="bfloat16")
        scale = torch.from_numpy(found.scale).bfloat16()
        numbers = torch.from_numpy((found.numbers - 128).astype(np.int8)).view(weight.shape)
        parts = {".weight": numbers, ".weight_scale": scale.view(1) if scales == "tensor" else scale}
        parts[".input_scale"] = torch.tensor([0.7])
        if not symmetric:
            zero = torch.from_numpy((found.zero - 128).astype(np.int8))
            parts[".weight_zero_point"] = zero.view(1) if scales == "tensor" else zero
        return parts, found.values.view(weight.shape)

    return encode


def fp8(scales: str, block: tuple[int, int] = (128, 128), *, ending: str = "_scale") -> Encode:
    """`scales`: tensor, scalar (the same without a dimension), row or block."""

    def encode(weight: torch.Tensor) -> Encoded:
        rows, columns = weight.shape
        height, width = {"tensor": (rows, columns), "scalar": (rows, columns), "row": (1, columns), "block": block}[
            scales
        ]
        down, across = -(-rows // height), -(-columns // width)
        scale, numbers, values = (
            torch.zeros(down, across),
            torch.zeros(rows, columns, dtype=FP8),
            torch.zeros(rows, columns),
        )
        for i in range(down):
            for j in range(across):
                place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale[i, j] = weight[place].abs().max() / 448
                numbers[place] = (weight[place] / scale[i, j]).to(FP8)
                values[place] = numbers[place].float() * scale[i, j]
        stored = scale.view(()) if scales == "scalar" else scale.view(1) if scales == "tensor" else scale
        parts = {".weight": numbers, f".weight{ending}": stored, ".input_scale": torch.tensor(0.3)}
        return parts, values

    return encode


# -- configs ---------------------------------------------------------------------------


def compressed(
    format: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "observer": "minmax", **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": format,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def int_config(strategy: str, *, symmetric: bool = True, group: int | None = None, bits: int = 8) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return compressed("int-quantized", weights, W8A8 if symmetric else None)


def pack_config(bits: int, group: int | None, *, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return compressed("pack-quantized", weights | {"actorder": actorder})


def float_config(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return compressed(
        "float-quantized", weights, {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    )


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | more


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | more


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
FP8_TENSORS = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    encode: Encode


CASES = {
    "fp8, blocks": Case(FP8_BLOCKS, fp8("block", ending="_scale_inv")),
    "fp8, blocks by default": Case({"quant_method": "fp8"}, fp8("block", ending="_scale_inv")),
    "fp8, tensors": Case(FP8_TENSORS, fp8("tensor")),
    "fp8, scalars": Case(FP8_TENSORS, fp8("scalar", ending="_scale_inv")),
    "fbgemm, rows": Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8("row")),
    "float-quantized, rows": Case(float_config("channel"), fp8("row")),
    "float-quantized, tensors": Case(float_config("tensor"), fp8("tensor")),
    "float-quantized, blocks": Case(float_config("block", block_structure=[64, 32]), fp8("block", (64, 32))),
    "int-quantized, rows": Case(int_config("channel"), int_rows("row")),
    "int-quantized, rows with zeros": Case(int_config("channel", symmetric=False), int_rows("row", symmetric=False)),
    "int-quantized, tensors": Case(int_config("tensor"), int_rows("tensor")),
    "int-quantized, groups": Case(int_config("group", group=32), int_rows("group", 32)),
    "awq, groups": Case(awq_config(32), awq(32)),
    "awq, rows": Case(awq_config(-1, modules_to_not_convert=["lm_head", "gate"]), awq(None)),
    "gptq, groups": Case(gptq_config(4, 32), gptq(4, 32, symmetric=True)),
    "gptq, groups without g_idx": Case(gptq_config(4, 64), gptq(4, 64, symmetric=True, g_idx=False)),
    "gptq, version 2 declared as 1": Case(gptq_config(4, 32), gptq(4, 32, symmetric=True, less_one=False)),
    "gptq, zeros": Case(gptq_config(4, 32, sym=False), gptq(4, 32, symmetric=False)),
    "gptq, zeros of version 2": Case(
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), gptq(4, 32, symmetric=False, less_one=False)
    ),
    "gptq, ordered": Case(gptq_config(4, 32, desc_act=True), gptq(4, 32, symmetric=True, ordered=True)),
    "gptq, ordered zeros": Case(
        gptq_config(4, 32, desc_act=True, sym=False), gptq(4, 32, symmetric=False, ordered=True)
    ),
    "gptq, incomplete group": Case(gptq_config(4, 80), gptq(4, 80, symmetric=True)),
    "gptq, rows in eight bits": Case(gptq_config(8, -1), gptq(8, None, symmetric=True)),
    "pack-quantized, groups": Case(pack_config(4, 32, symmetric=True), packed_rows(4, 32, symmetric=True)),
    "pack-quantized, zeros": Case(pack_config(4, 32, symmetric=False), packed_rows(4, 32, symmetric=False)),
    "pack-quantized, rows": Case(pack_config(4, None, symmetric=True), packed_rows(4, None, symmetric=True)),
    "pack-quantized, rows with zeros": Case(
        pack_config(4, None, symmetric=False), packed_rows(4, None, symmetric=False)
    ),
    "pack-quantized, eight bits": Case(pack_config(8, 64, symmetric=False), packed_rows(8, 64, symmetric=False)),
    "pack-quantized, ordered": Case(
        pack_config(4, 32, symmetric=True, actorder="group"), packed_rows(4, 32, symmetric=True, ordered=True)
    ),
}


# -- checkpoints -----------------------------------------------------------------------


def is_quantised(name: str) -> bool:
    """Matrices of the layers, but not the routers of experts."""
    return ".layers." in name and name.endswith("proj.weight")


def encoded(
    tensors: Mapping[str, torch.Tensor], encode: Encode
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors as a quantised checkpoint has them, and the numbers that these stand for."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        if is_quantised(name):
            parts, values[name] = encode(tensor)
            stored |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
        else:
            stored[name] = values[name] = tensor
    return stored, values


def write_quantised(plain: Path, folder: Path, case: Case) -> tuple[Path, Path]:
    """Write the checkpoint in `plain` as `case`, and the numbers that this stands for, in float32."""
    packed, dequantised = (Path(shutil.copytree(plain, folder / name)) for name in ("packed", "dequantised"))
    stored, values = encoded(load_file(plain / "model.safetensors"), case.encode)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(values, dequantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    return packed, dequantised
