"""Compares the encoders and the reader with the libraries that define the formats.

Run by hand, in an environment that has them:

    python -m tests.formats.check_libraries [--write]

With `--write`, tiny weights that the libraries have packed are written to `golden.json`, which the tests read.

Each library that cannot be imported is reported and skipped; `compressed-tensors`, `autoawq`, `auto-gptq` and
`transformers` are known. Only what a library computes itself is compared: its packed tensors, or the numbers that it
unpacks.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headgate.device.weights.source import TensorInfo
from headgate.device.weights.whole import WholeWeights
from headgate.layers.formats import floating_numbers
from headgate.models.config import Config
from headgate.models.quantisation_config import METHODS, read_quantisation
from tests.formats import encoders
from tests.formats.encoders import CASES, Case

ROWS, COLUMNS = 64, 192
NAME = "model.layers.0.mlp.up_proj"
GOLDEN = Path(__file__).parent / "golden.json"

Written = tuple[
    dict[str, Any], dict[str, torch.Tensor], torch.Tensor
]  # config, parts, and the numbers they stand for


class Given:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from self.tensors.items()


def read(config: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """What Headgate reads."""
    quantisation = read_quantisation(Config("config.json", {"quantization_config": config}), METHODS)
    whole = WholeWeights(Given({NAME + ending: part for ending, part in parts.items()}), quantisation)
    whole.metadata()
    [(_, weight)] = list(whole)
    return floating_numbers(weight)


def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


# -- what each library reads -------------------------------------------------------------


def compressed_tensors(case: Case, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    settings = case.config["config_groups"]["group_0"]["weights"]
    known = {key: value for key, value in settings.items() if key in QuantizationArgs.model_fields}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**known))
    state = {ending.removeprefix("."): part.clone() for ending, part in parts.items() if "input" not in ending}
    compressor = BaseCompressor.load_from_registry(case.config["format"])
    if "weight_scale" in state:
        state["weight_scale"] = state["weight_scale"].float()
    if hasattr(compressor, "decompress_weight"):  # before version 0.14
        return compressor.decompress_weight(state, scheme.weights).float()
    return compressor.decompress(state, scheme)["weight"].float()


def autoawq(case: Case, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from awq.utils.packing_utils import dequantize_gemm

    group = case.config["group_size"]
    found = dequantize_gemm(
        parts[".qweight"], parts[".qzeros"], parts[".scales"], 4, COLUMNS if group == -1 else group
    )
    return found.T.float()


def auto_gptq(case: Case, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Its layer computes products; that of an identity matrix is the weight."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    config = case.config
    layer = QuantLinear(config["bits"], config["group_size"], COLUMNS, ROWS, False, weight_dtype=torch.float32)
    layer.qweight, layer.qzeros = parts[".qweight"], parts[".qzeros"]
    layer.scales = parts[".scales"].float()
    layer.g_idx = parts[".g_idx"]
    layer.use_cuda_fp16 = False
    return layer(torch.eye(COLUMNS)).T


def transformers_fp8(case: Case, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    scale = next(part for ending, part in parts.items() if ending.startswith(".weight_scale"))
    block = case.config.get("weight_block_size", [128, 128])
    return _dequantize_fp8_weight(parts[".weight"], scale, block, torch.float32)


def reader_of(name: str) -> Callable[[Case, dict[str, torch.Tensor]], torch.Tensor] | None:
    if "quantized" in name:
        return compressed_tensors
    if name.startswith("awq"):
        return autoawq
    if name.startswith("gptq") and "version 2" not in name and "incomplete" not in name and "without" not in name:
        return auto_gptq
    return transformers_fp8 if name.startswith("fp8") else None


# -- what each library writes ------------------------------------------------------------


def written_by_auto_gptq(*, ordered: bool) -> Written:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    found = encoders.quantise(tiny(), 4, 32, symmetric=False, ordered=ordered)
    linear = torch.nn.Linear(*reversed(found.values.shape), bias=False)
    linear.weight.data = found.values
    layer = QuantLinear(4, 32, linear.in_features, linear.out_features, False, weight_dtype=torch.float32)
    scale, zero, group_of = (torch.from_numpy(each) for each in (found.scale, found.zero, found.group_of))
    layer.pack(linear, scale, zero.float(), group_of)
    parts = {f".{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    parts[".g_idx"] = parts[".g_idx"].int()
    return encoders.gptq_config(4, 32, sym=False, desc_act=ordered), parts, found.values


def written_by_autoawq() -> Written:
    from awq.modules.linear.gemm import WQLinear_GEMM

    found = encoders.quantise(tiny(), 4, 32, symmetric=False)
    linear = torch.nn.Linear(*reversed(found.values.shape), bias=False)
    linear.weight.data = found.values
    scales, zeros = (torch.from_numpy(each).float().T.contiguous() for each in (found.scale, found.zero))
    layer = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales, zeros=zeros)
    return (
        encoders.awq_config(32),
        {f".{each}": getattr(layer, each) for each in ("qweight", "qzeros", "scales")},
        found.values,
    )


def written_by_compressed_tensors(bits: int, group: int | None, *, symmetric: bool) -> Written:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    found = encoders.quantise(tiny(), bits, group, symmetric=symmetric, dtype="bfloat16")
    config = encoders.pack_config(bits, group, symmetric=symmetric)
    settings = config["config_groups"]["group_0"]["weights"]
    known = {key: value for key, value in settings.items() if key in QuantizationArgs.model_fields}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**known))
    state = {"weight": found.values, "weight_scale": torch.from_numpy(found.scale)}
    if not symmetric:
        state["weight_zero_point"] = torch.from_numpy(found.zero - (1 << (bits - 1))).to(torch.int8)
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    if hasattr(compressor, "decompress_weight"):
        raise ImportError("compressed-tensors is too old to write single weights")
    compressed = compressor.compress(state, scheme)
    return config, {f".{name}": tensor for name, tensor in compressed.items()}, found.values


WRITERS: dict[str, Callable[[], Written]] = {
    "auto-gptq": lambda: written_by_auto_gptq(ordered=False),
    "auto-gptq, ordered": lambda: written_by_auto_gptq(ordered=True),
    "autoawq": written_by_autoawq,
    "compressed-tensors, symmetric": lambda: written_by_compressed_tensors(4, 32, symmetric=True),
    "compressed-tensors, zeros": lambda: written_by_compressed_tensors(4, 32, symmetric=False),
    "compressed-tensors, rows": lambda: written_by_compressed_tensors(4, None, symmetric=False),
    "compressed-tensors, eight bits": lambda: written_by_compressed_tensors(8, 64, symmetric=False),
}


def tiny() -> torch.Tensor:
    return weight()[:32, :64]


def as_json(tensor: torch.Tensor) -> dict[str, Any]:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": octets.hex()}


def as_golden(written: Written) -> dict[str, Any]:
    config, parts, values = written
    return {
        "config": config,
        "parts": {ending: as_json(part) for ending, part in parts.items()},
        "values": encoders.digest(values),
    }


# -- running -----------------------------------------------------------------------------

failures: list[str] = []


def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor, atol: float = 0.0) -> None:
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=2e-3 if atol else 1e-6, atol=atol)
    print(f"{'same' if same else 'DIFFERENT':10} {name}")
    if not same:
        failures.append(name)


def attempt(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except (ImportError, ValueError) as error:  # ValueError: the version of the library has dropped the format
        print(f"{'skipped':10} {name}: {str(error).splitlines()[0]}")


def without_its_init(package: str) -> None:
    """Let modules of `package` be imported without the rest of it, which may need other versions of its dependencies."""
    if (spec := importlib.util.find_spec(package)) is not None:
        module = types.ModuleType(package)
        module.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[package] = module


def main(write: bool) -> int:
    for package in ("awq", "awq.modules", "awq.utils", "auto_gptq", "auto_gptq.nn_modules"):
        without_its_init(package)
    for name, case in CASES.items():
        if (library := reader_of(name)) is not None:
            parts, values = case.encode(weight())
            compare(f"{name}: Headgate and the encoder", read(case.config, parts), values)
            atol = 1e-3 if library is autoawq else 0.0  # it computes in float16
            attempt(name, lambda: compare(f"{name}: {library.__name__}", values, library(case, parts), atol))  # noqa: B023
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name, writer in WRITERS.items():

        def check() -> None:
            config, parts, values = written = writer()  # noqa: B023
            compare(f"{name} writes what Headgate reads", read(config, parts), values)  # noqa: B023
            golden[name] = as_golden(written)  # noqa: B023

        attempt(name, check)
    if write and not failures:
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
