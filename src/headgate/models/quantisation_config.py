"""Reads `quantization_config`: how the weights of a checkpoint are stored.

Only what determines the weights is read. How a file was calibrated does not matter, and activations are never rounded
here, so their settings are checked and not used: the answers are those of the weights with exact activations. Settings
under which that would be another model are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from headgate.errors import UnsupportedModel
from headgate.layers.stored import AwqStored, Fp8Stored, GptqStored, IntStored, Mxfp4Stored, PackedRows, StoredFormat
from headgate.models.config import Config
from headgate.models.quantisation import ALL_MATRICES, FormatGroup, Quantisation

UNQUANTISED = "use float32, bfloat16 or float16 weights"
LONGEST_PATTERN = 1000
FP8_BLOCK = (128, 128)
WITHIN_ACTIVATIONS = 8  # bits; weights that were made for fewer need the rounding that they were made with


def read_quantisation(config: Config, methods: Mapping[str, Method]) -> Quantisation | None:
    """Return what a config states about its weights; `methods` are those that the architecture supports."""
    stated = config.section("quantization_config")
    if not stated.values:
        stated = config.section("compression_config")  # its name in old files of compressed-tensors
    if not stated.values:
        return None
    method = stated.text("quant_method", "an unnamed method")
    if method not in methods:
        known = ", ".join(methods)
        raise UnsupportedModel(
            f"the checkpoint is quantised with {method}, which cannot be read; {known} can, or {UNQUANTISED}"
        )
    if stated.values.get("kv_cache_scheme") is not None:
        raise UnsupportedModel(
            f"{stated.name}: kv_cache_scheme is not supported; use a checkpoint without scales of its KV cache"
        )
    return methods[method](stated)


def fp8(stated: Config) -> Quantisation:
    refuse_unless(stated, "fmt", "e4m3")
    refuse_unless(stated, "activation_scheme", "dynamic", "static")
    refuse_unless(stated, "expert_dtype", "fp8")
    refuse_unless(stated, "scale_fmt", "float", "ue8m0")
    refuse_given(stated, "modules_to_convert")
    block = FP8_BLOCK if "weight_block_size" not in stated.values else block_size(stated, "weight_block_size")
    kept = names(stated, "modules_to_not_convert") + names(stated, "ignored_layers")
    return everywhere(stated, Fp8Stored(block), kept)


def fbgemm_fp8(stated: Config) -> Quantisation:
    return everywhere(stated, Fp8Stored(whole=False), names(stated, "modules_to_not_convert"))


def awq(stated: Config) -> Quantisation:
    refuse_unless(stated, "bits", 4)
    refuse_unless(stated, "version", "gemm", "GEMM")
    refuse_unless(stated, "format", "gemm", "GEMM")
    refuse_unless(stated, "zero_point", True)
    refuse_unless(stated, "backend", "autoawq", "auto", "legacy_awq")
    return everywhere(stated, AwqStored(group_size(stated)), names(stated, "modules_to_not_convert"))


def gptq(stated: Config) -> Quantisation:
    refuse_unless(stated, "bits", 4, 8)
    refuse_unless(stated, "checkpoint_format", "gptq", "gptq_v2")
    refuse_unless(stated, "format", "gptq", "gptq_v2")
    refuse_unless(stated, "pack_dtype", "int32")
    refuse_unless(stated, "is_marlin_format", False)
    refuse_given(stated, "dynamic")
    format = GptqStored(
        bits=stated.whole("bits"),
        group=group_size(stated),
        symmetric=stated.flag("sym"),
        ordered=stated.flag("desc_act"),
        less_one=stated.text("checkpoint_format", stated.text("format", "gptq")) == "gptq",
    )
    return everywhere(stated, format, names(stated, "modules_to_not_convert"))


def compressed_tensors(stated: Config) -> Quantisation:
    refuse_unless(stated, "quantization_status", "compressed")
    sparsity = stated.section("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise UnsupportedModel(
            f"{sparsity.name}: format is {sparsity.values['format']!r}; sparse weights cannot be read"
        )
    refuse_given(stated, "transform_config")
    sections = stated.section("config_groups")
    if not sections.values:
        raise UnsupportedModel(f"{stated.name} lacks config_groups")
    groups = tuple(compressed_group(stated, sections.section(name)) for name in sections.values)
    return Quantisation("compressed-tensors", groups, names(stated, "ignore"))


def compressed_group(stated: Config, group: Config) -> FormatGroup:
    for which in ("input_activations", "output_activations"):
        refuse_activations(group.section(which))
    weights = group.section("weights")
    if not weights.values:
        raise UnsupportedModel(f"{group.name} lacks weights; activations are not rounded here")
    refuse_unless(weights, "dynamic", False)
    refuse_unless(weights, "actorder", "group", "weight", "static", "dynamic", False)
    format = group.text("format", stated.text("format", "an unnamed format"))
    if format not in COMPRESSED:
        raise UnsupportedModel(f"{stated.name}: format {format!r} cannot be read; {', '.join(COMPRESSED)} can")
    return FormatGroup(names(group, "targets"), COMPRESSED[format](weights))


def refuse_activations(stated: Config) -> None:
    if stated.values and stated.whole("num_bits", 8) != WITHIN_ACTIVATIONS:
        raise UnsupportedModel(
            f"{stated.name}: num_bits is {stated.values['num_bits']!r}; weights made for activations of fewer than "
            f"{WITHIN_ACTIVATIONS} bits are not supported"
        )


def float_quantized(weights: Config) -> StoredFormat:
    refuse_unless(weights, "type", "float", needed=True)
    refuse_unless(weights, "num_bits", 8, needed=True)
    refuse_unless(weights, "symmetric", True)
    match strategy_of(weights, "tensor", "channel", "block"):
        case "tensor":
            return Fp8Stored(rows=False)
        case "channel":
            return Fp8Stored(whole=False)
        case _:
            return Fp8Stored(block_size(weights, "block_structure") or FP8_BLOCK, whole=False, rows=False)


def int_quantized(weights: Config) -> StoredFormat:
    refuse_unless(weights, "type", "int", needed=True)
    refuse_unless(weights, "num_bits", 4, 8, needed=True)
    if weights.text("actorder", "") in ("group", "dynamic"):
        raise UnsupportedModel(f"{weights.name}: actorder 'group' is read in the format pack-quantized only")
    bits, symmetric = weights.whole("num_bits"), weights.flag("symmetric", True)
    match strategy_of(weights, "tensor", "channel", "group"):
        case "tensor":
            return IntStored(bits, "tensor", None, symmetric)
        case "channel":
            return IntStored(bits, "row", None, symmetric)
        case _:
            return IntStored(bits, "group", required_group(weights), symmetric)


def pack_quantized(weights: Config) -> StoredFormat:
    refuse_unless(weights, "type", "int", needed=True)
    refuse_unless(weights, "num_bits", 4, 8, needed=True)
    group = required_group(weights) if strategy_of(weights, "channel", "group") == "group" else None
    ordered = weights.values.get("actorder") in ("group", "dynamic")
    return PackedRows(weights.whole("num_bits"), group, weights.flag("symmetric", True), ordered)


def naive_quantized(weights: Config) -> StoredFormat:
    """The format of both kinds before they had names of their own."""
    return float_quantized(weights) if weights.text("type", "int") == "float" else int_quantized(weights)


MXFP4 = Quantisation("mxfp4", (FormatGroup((ALL_MATRICES,), Mxfp4Stored()),))


def mxfp4(stated: Config) -> Quantisation:
    return MXFP4  # only experts are stored so, whichever modules are listed


COMPRESSED: dict[str, Callable[[Config], StoredFormat]] = {
    "float-quantized": float_quantized,
    "int-quantized": int_quantized,
    "naive-quantized": naive_quantized,
    "pack-quantized": pack_quantized,
}
Method = Callable[[Config], Quantisation]
METHODS: dict[str, Method] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
}
INTERLEAVED_METHODS: dict[str, Method] = {"mxfp4": mxfp4}  # of experts that are stored as gpt-oss stores them


def everywhere(stated: Config, format: StoredFormat, kept: tuple[str, ...]) -> Quantisation:
    return Quantisation(
        stated.text("quant_method", ""), (FormatGroup((ALL_MATRICES,), format),), kept, by_component=True
    )


# -- values ----------------------------------------------------------------------------


def refuse_unless(stated: Config, key: str, *known: str | int | bool, needed: bool = False) -> None:
    """Refuse a value of `key` that is not one of `known`. It may be absent, unless it is `needed`."""
    value = stated.values.get(key)
    if value is None and not needed:
        return
    if not any(value == each and type(value) is type(each) for each in known):
        raise UnsupportedModel(f"{stated.name}: {key} is {value!r:.100}; {', '.join(map(str, known))} can be read")


def refuse_given(stated: Config, key: str) -> None:
    if value := stated.values.get(key):
        raise UnsupportedModel(f"{stated.name}: {key} is {value!r:.100}, which is not supported; leave it out")


def strategy_of(weights: Config, *known: str) -> str:
    """An absent strategy follows from the size of groups, as in compressed-tensors."""
    group = weights.get("group_size", int)
    strategy = weights.text("strategy", "tensor" if group is None else "group" if group > 0 else "channel")
    if strategy not in known:
        raise UnsupportedModel(f"{weights.name}: strategy is {strategy!r}; {', '.join(known)} can be read")
    return strategy


def group_size(stated: Config) -> int | None:
    """The columns that share a scale; None: a scale per row."""
    size = stated.whole("group_size", 128)
    if size != -1 and size < 1:
        raise UnsupportedModel(f"{stated.name}: group_size is {size}; it must be positive, or -1 for whole rows")
    return None if size == -1 else size


def required_group(weights: Config) -> int:
    size = weights.whole("group_size")
    if size < 1:
        raise UnsupportedModel(f"{weights.name}: group_size is {size}; it must be positive")
    return size


def block_size(stated: Config, key: str) -> tuple[int, int] | None:
    value = stated.get(key, (list, str))
    if isinstance(value, str):
        value = [int(each) if each.isdecimal() else each for each in value.split("x")]
    if value is None:
        return None
    if len(value) != 2 or not all(type(each) is int and 0 < each < 2**31 for each in value):
        raise UnsupportedModel(
            f"{stated.name}: {key} is {value!r:.100}, which is not a number of rows and of columns"
        )
    return value[0], value[1]


def names(stated: Config, key: str) -> tuple[str, ...]:
    """A list of modules and patterns."""
    found = stated.get(key, list, [])
    for each in found:
        if not isinstance(each, str) or len(each) > LONGEST_PATTERN:
            raise UnsupportedModel(f"{stated.name}: {key} has {each!r:.100}, which is not the name of a module")
        try:
            re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedModel(
                f"{stated.name}: {key} has {each!r:.100}, which is not a pattern: {error}"
            ) from error
    return tuple(found)
