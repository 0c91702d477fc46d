"""How checkpoints store quantised weights: several tensors that together are one weight.

A `StoredFormat` says which tensors belong to a weight, verifies their declared types and shapes before any of them is
read, and makes a `Weight` of them. What it does not understand it refuses with BrokenCheckpoint: a wrong zero point or
a transposed tensor would otherwise give plausible but wrong answers.

The tensors of a weight are its *components*. Numbers of four or eight bits are packed into int32 words from the lowest bits
up; a format says along which dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from headgate.errors import BrokenCheckpoint
from headgate.layers.formats import FP8, Fp8Rows, IntGroups, Weight, floating

Kind = Literal["numbers", "scale", "zero", "order", "shape", "skipped"]  # of a component; skipped: not needed


class Component(NamedTuple):
    """A stored tensor, or only what is declared about it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Components = Mapping[Kind, Component]
Tensors = Mapping[Kind, torch.Tensor]

WORD = torch.int32
BYTES = (FP8, torch.float8_e5m2, torch.int8)  # of numbers that need a scale
SCALES = (torch.float32, torch.bfloat16, torch.float16)
NAN_BITS = 0x7F  # of e4m3, without the sign

# How the names of components end. `NAME.weight` is the weight; its numbers may have that name themselves.
MODULE_ENDINGS: dict[str, Kind] = {".qweight": "numbers", ".qzeros": "zero", ".scales": "scale", ".g_idx": "order"}
WEIGHT_ENDINGS: dict[str, Kind] = {
    "_packed": "numbers",
    "_scale": "scale",
    "_scale_inv": "scale",
    "_zero_point": "zero",
    "_g_idx": "order",
    "_shape": "shape",
}
# Scales for rounding the activations, which are not rounded here.
SKIPPED_ENDINGS = (".input_scale", ".input_zero_point", ".activation_scale", "_activation_scale")


class StoredFormat(Protocol):
    @property
    def bits(self) -> float:
        """Bits of a number, without scales."""

    def component_of(self, name: str, dtype: torch.dtype) -> tuple[str, Kind] | None:
        """The weight that a stored tensor is a component of; None if it is a weight itself."""

    def shape(self, components: Components) -> tuple[int, ...]:
        """Verify the declared components and return the shape of the weight."""

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        """Verify the values of one component, other than `numbers`."""

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        """The weight, from verified components."""


class NamedAfterModule:
    """Components are named after the module, as `q_proj.qweight`."""

    __slots__ = ()

    def component_of(self, name: str, dtype: torch.dtype) -> tuple[str, Kind] | None:
        for ending, kind in MODULE_ENDINGS.items():
            if name.endswith(ending):
                return name.removesuffix(ending) + ".weight", kind
        return None


class NamedAfterWeight:
    """Components are named after the weight, as `q_proj.weight_scale`."""

    __slots__ = ()

    def component_of(self, name: str, dtype: torch.dtype) -> tuple[str, Kind] | None:
        for ending in SKIPPED_ENDINGS:
            if name.endswith(ending):
                return name.removesuffix(ending) + (".weight" if ending[0] == "." else ""), "skipped"
        for ending, kind in WEIGHT_ENDINGS.items():
            if name.endswith((f".weight{ending}", f"_proj{ending}")):
                return name.removesuffix(ending), kind
        return (name, "numbers") if dtype in BYTES else None


@dataclass(frozen=True, slots=True)
class Fp8Stored(NamedAfterWeight):
    """e4m3 numbers with a scale per block, per row or for the whole tensor. Several matrices may be stacked."""

    block: tuple[int, int] | None = None  # rows and columns
    whole: bool = True  # the scale may be one per tensor ...
    rows: bool = True  # ... or one per row

    bits = 8

    def __str__(self) -> str:
        scales = (["row"] * self.rows) + (["tensor"] * self.whole)
        return "FP8 with a scale per " + (f"{self.block[0]}x{self.block[1]} block" if self.block else scales[0])

    def shape(self, components: Components) -> tuple[int, ...]:
        numbers, scale = required(components, "numbers", "scale")
        refuse_others(components, "numbers", "scale")
        refuse_dtype(numbers, FP8)
        refuse_dtype(scale, *SCALES)
        refuse_shape(numbers, len(numbers.shape) in (2, 3))
        refuse_shape(scale, scale.shape in self._scale_shapes(numbers.shape))
        return numbers.shape

    def _scale_shapes(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        stack, (rows, columns) = numbers[:-2], numbers[-2:]
        found: list[tuple[int, ...]] = []
        if self.block is not None:
            found.append((*stack, -(-rows // self.block[0]), -(-columns // self.block[1])))
        if self.whole:
            found += [stack, (*stack, 1), (*stack, 1, 1)]
        if self.rows:
            found += [(*stack, rows), (*stack, rows, 1)]
        return found

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        refuse_infinite(name, tensor)

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        numbers, scale = tensors["numbers"], tensors["scale"].float()
        if (numbers.view(torch.uint8) & NAN_BITS == NAN_BITS).any():
            raise BrokenCheckpoint(f"tensor {components['numbers'].name} has numbers that are NaN")
        *stack, rows, _ = numbers.shape
        if tuple(scale.shape) not in Fp8Stored(None, self.whole, self.rows)._scale_shapes(numbers.shape):
            assert self.block is not None
            return floating(scaled_blocks(numbers, scale, self.block))
        each = scale.reshape(*stack, -1).expand(*stack, rows).contiguous()
        return Weight(numbers, Fp8Rows(), each)


def scaled_blocks(numbers: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The numbers times the scales of their blocks, in float32."""
    rows = numbers.shape[-2]
    by_row = scale.repeat_interleave(min(block[0], rows), -2)[..., :rows, :]
    out = numbers.float()
    for i in range(
        scale.shape[-1]
    ):  # a strip of columns at a time, so that no scales of the size of the weight exist
        out[..., i * block[1] : (i + 1) * block[1]].mul_(by_row[..., i : i + 1])
    return out


@dataclass(frozen=True, slots=True)
class IntStored(NamedAfterWeight):
    """Signed numbers, one per byte, with a scale per tensor, per row or per group of columns."""

    bits: int
    scales: Literal["tensor", "row", "group"]
    group: int | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        return described(f"INT{self.bits}", self.group, self.scales)

    def shape(self, components: Components) -> tuple[int, ...]:
        numbers, scale = required(components, "numbers", "scale")
        refuse_others(components, "numbers", "scale", "zero")
        refuse_dtype(numbers, torch.int8)
        refuse_dtype(scale, *SCALES)
        refuse_shape(numbers, len(numbers.shape) == 2)
        rows, columns = numbers.shape
        refuse_group(numbers, columns, self.group)
        shapes: list[tuple[int, ...]] = [(rows, groups_in(columns, self.group))]
        if self.scales == "row":
            shapes.append((rows,))
        if self.scales == "tensor":
            shapes = [(), (1,), (1, 1)]
        refuse_shape(scale, scale.shape in shapes)
        if zero := zero_of(components, self.symmetric):
            refuse_dtype(zero, torch.int8)
            refuse_shape(zero, zero.shape == scale.shape)
        return numbers.shape

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        if kind == "scale":
            refuse_infinite(name, tensor)

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        numbers = tensors["numbers"]
        rows, columns = numbers.shape
        shape = (rows, groups_in(columns, self.group))

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.view(-1, shape[1]) if tensor.numel() > 1 else tensor.view(1, 1)).expand(shape).contiguous()

        zero = tensors.get("zero")
        zeros = shifted(torch.zeros(1, dtype=torch.int8, device=numbers.device) if zero is None else zero)
        size = self.group or columns
        return Weight(shifted(numbers), IntGroups(8, size), spread(tensors["scale"].float()), spread(zeros))


def shifted(numbers: torch.Tensor) -> torch.Tensor:
    """Signed bytes, from -128 on, as bytes from 0 on."""
    return numbers.view(torch.uint8) ^ 0x80


@dataclass(frozen=True, slots=True)
class PackedRows(NamedAfterWeight):
    """compressed-tensors' `pack-quantized`: signed numbers plus half their range, packed along the columns.

    Zero points are packed along the rows.
    """

    bits: int
    group: int | None = None  # None: one scale per row
    symmetric: bool = True
    ordered: bool = False  # columns may be in groups that are not consecutive

    def __str__(self) -> str:
        return described(f"INT{self.bits}", self.group, "row")

    def shape(self, components: Components) -> tuple[int, ...]:
        numbers, scale, size = required(components, "numbers", "scale", "shape")
        refuse_others(components, "numbers", "scale", "shape", "zero", *(("order",) if self.ordered else ()))
        refuse_dtype(numbers, WORD)
        refuse_dtype(scale, *SCALES)
        refuse_dtype(size, torch.int64, torch.int32)
        refuse_shape(size, size.shape == (2,))
        refuse_shape(numbers, len(numbers.shape) == 2)
        rows, columns = numbers.shape[0], numbers.shape[1] * per_word(self.bits)
        refuse_group(numbers, columns, self.group)
        groups = groups_in(columns, self.group)
        refuse_shape(scale, scale.shape == (rows, groups) or (groups == 1 and scale.shape == (rows,)))
        if zero := zero_of(components, self.symmetric):
            refuse_dtype(zero, WORD)
            refuse_shape(zero, zero.shape == (-(-rows // per_word(self.bits)), groups))
        if order := components.get("order"):
            refuse_order(order, columns)
        return rows, columns

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        rows, columns = components["numbers"].shape[0], components["numbers"].shape[1] * per_word(self.bits)
        if kind == "scale":
            refuse_infinite(name, tensor)
        if kind == "shape" and tensor.tolist() != [rows, columns]:
            found = f"{tensor.tolist()}, and the packed numbers are of {[rows, columns]}"
            raise BrokenCheckpoint(f"tensor {name} declares a weight of shape {found}")
        if kind == "order" and not (tensor == -1).all():
            refuse_outside(name, tensor, groups_in(columns, self.group))

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        numbers = unpacked(tensors["numbers"], self.bits).flatten(1)
        rows, columns = numbers.shape
        scale = tensors["scale"].float().view(rows, -1)
        zero = torch.full(scale.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=scale.device)
        if (packed := tensors.get("zero")) is not None:
            zero = unpacked(packed.T.contiguous(), self.bits).flatten(1).T[:rows].contiguous()
        order = tensors.get("order")
        if order is None or bool((order == -1).all()):
            return Weight(numbers, IntGroups(self.bits, self.group or columns), scale, zero)
        return scattered(numbers, scale, zero, order)


@dataclass(frozen=True, slots=True)
class AwqStored(NamedAfterModule):
    """AWQ's `gemm` packing: a row per input, and eight outputs in a word, even ones before odd ones."""

    group: int | None  # None: one scale per output

    bits = 4

    def __str__(self) -> str:
        return described("INT4", self.group, "row")

    def shape(self, components: Components) -> tuple[int, ...]:
        numbers, scale, zero = required(components, "numbers", "scale", "zero")
        refuse_others(components, "numbers", "scale", "zero")
        for component in (numbers, zero):
            refuse_dtype(component, WORD)
            refuse_shape(component, len(component.shape) == 2)
        refuse_dtype(scale, *SCALES)
        columns, words = numbers.shape
        refuse_group(numbers, columns, self.group)
        groups = groups_in(columns, self.group)
        refuse_shape(scale, scale.shape == (groups, words * per_word(4)))
        refuse_shape(zero, zero.shape == (groups, words))
        return words * per_word(4), columns

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        if kind == "scale":
            refuse_infinite(name, tensor)

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        numbers, zero = (evens_before_odds(tensors[component]) for component in ("numbers", "zero"))
        return Weight(
            numbers, IntGroups(4, self.group or numbers.shape[1]), tensors["scale"].float().T.contiguous(), zero
        )


def evens_before_odds(words: torch.Tensor) -> torch.Tensor:
    """The numbers in `words`, a row per output."""
    places = unpacked(words, 4).view(*words.shape, 2, 4)  # [inputs, words, parity, place]
    return places.permute(1, 3, 2, 0).flatten(0, 2).contiguous()


@dataclass(frozen=True, slots=True)
class GptqStored(NamedAfterModule):
    """GPTQ: packed along the inputs, a column per output; zero points are packed along the outputs.

    Version 1 of the format stores zero points less one. Checkpoints exist that are declared as version 1 and are not,
    so the zero points of symmetric weights are checked instead of believed: they are in the middle of the range.
    """

    bits: int
    group: int | None  # None: one scale per output
    symmetric: bool
    ordered: bool  # inputs are assigned to groups by `g_idx`
    less_one: bool  # version 1

    def __str__(self) -> str:
        return described(f"INT{self.bits}", self.group, "row")

    def shape(self, components: Components) -> tuple[int, ...]:
        numbers, scale, zero = required(components, "numbers", "scale", "zero")
        refuse_others(components, "numbers", "scale", "zero", "order")
        for component in (numbers, zero):
            refuse_dtype(component, WORD)
            refuse_shape(component, len(component.shape) == 2)
        refuse_dtype(scale, *SCALES)
        columns, rows = numbers.shape[0] * per_word(self.bits), numbers.shape[1]
        groups = groups_in(columns, self.group)
        refuse_shape(scale, scale.shape == (groups, rows))
        refuse_shape(zero, zero.shape == (groups, -(-rows // per_word(self.bits))))
        if self.ordered:
            required(components, "order")
        if order := components.get("order"):
            refuse_order(order, columns)
        return rows, columns

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        columns, rows = components["numbers"].shape[0] * per_word(self.bits), components["numbers"].shape[1]
        match kind:
            case "scale":
                refuse_infinite(name, tensor)
            case "zero":
                self._verify_zeros(name, unpacked(tensor, self.bits).flatten(1)[:, :rows])
            case "order" if self.ordered:
                refuse_outside(name, tensor, groups_in(columns, self.group))
            case "order":
                inputs = torch.arange(columns, device=tensor.device)
                if not torch.equal(tensor.long(), inputs // (self.group or columns)):
                    raise BrokenCheckpoint(f"tensor {name} reorders the inputs, and desc_act is false")

    def _verify_zeros(self, name: str, stored: torch.Tensor) -> None:
        middle, most = 1 << (self.bits - 1), (1 << self.bits) - 1
        if self.symmetric:
            known = {middle, middle - 1} if self.less_one else {middle}
            if not any(bool((stored == value).all()) for value in known):
                raise BrokenCheckpoint(f"tensor {name} has zero points other than {middle}, and sym is true")
        elif self.less_one and bool((stored == most).any()):
            raise BrokenCheckpoint(
                f"tensor {name} stores the zero point {most}, which the programs that read version 1 of GPTQ take "
                "for different numbers; convert the checkpoint to gptq_v2"
            )

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        numbers = unpacked(tensors["numbers"], self.bits).permute(1, 0, 2).flatten(1).contiguous()
        rows, columns = numbers.shape
        scale = tensors["scale"].float().T.contiguous()
        zero = self._zero(tensors["zero"], rows)
        if not self.ordered and columns % (self.group or columns) == 0:
            return Weight(numbers, IntGroups(self.bits, self.group or columns), scale, zero)
        order = tensors.get("order")
        if order is None:
            order = torch.arange(columns, device=numbers.device) // (self.group or columns)
        return scattered(numbers, scale, zero, order)

    def _zero(self, words: torch.Tensor, rows: int) -> torch.Tensor:
        stored = unpacked(words, self.bits).flatten(1)[:, :rows].T.contiguous()
        if self.symmetric:
            return torch.full_like(stored, 1 << (self.bits - 1))
        return stored + 1 if self.less_one else stored


@dataclass(frozen=True, slots=True)
class Mxfp4Stored:
    """gpt-oss: `NAME_blocks` [experts, rows, groups, 16] and the exponents of groups, `NAME_scales`.

    A byte has two numbers (e2m1), the first in the lower half. The weight is [experts, columns, rows], in bfloat16,
    which holds every such number exactly.
    """

    bits = 4

    def __str__(self) -> str:
        return "MXFP4"

    def component_of(self, name: str, dtype: torch.dtype) -> tuple[str, Kind] | None:
        endings: dict[str, Kind] = {"_blocks": "numbers", "_scales": "scale"}
        for ending, kind in endings.items():
            if name.endswith(ending):
                return name.removesuffix(ending), kind
        return None

    def shape(self, components: Components) -> tuple[int, ...]:
        blocks, scales = required(components, "numbers", "scale")
        for component in (blocks, scales):
            refuse_dtype(component, torch.uint8)
        if len(blocks.shape) != 4 or blocks.shape[3] != MX_BYTES or scales.shape != blocks.shape[:3]:
            found = f"{blocks.name} {list(blocks.shape)} and {scales.name} {list(scales.shape)}"
            raise BrokenCheckpoint(f"tensors {found} are not an MXFP4 weight")
        experts, rows, groups, size = blocks.shape
        return experts, 2 * groups * size, rows

    def verify(self, kind: Kind, name: str, tensor: torch.Tensor, components: Components) -> None:
        if (tensor == MX_NAN).any():
            raise BrokenCheckpoint(f"tensor {name} has scales that are NaN")

    def weight(self, tensors: Tensors, components: Components) -> Weight:
        return floating(mxfp4_numbers(tensors["numbers"], tensors["scale"]))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BYTES = 16  # per group
MX_BIAS, MX_NAN = 127, 255  # of the exponents


def mxfp4_numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers, [experts, columns, rows], as a view of the transposed tensor."""
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=1).to(blocks.device)
    experts, rows, groups, size = blocks.shape
    out = torch.empty(experts, rows, groups, 2 * size, dtype=torch.bfloat16, device=blocks.device)
    for i in range(experts):  # one at a time, because indices are eight times as large as the bytes
        exponents = scales[i].int() - MX_BIAS
        out[i] = torch.ldexp(pairs[blocks[i].long()].flatten(2), exponents[..., None])
    return out.flatten(2).transpose(1, 2)


# -- packing ---------------------------------------------------------------------------


def per_word(bits: int) -> int:
    return 32 // bits


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of each word, as bytes: [..., words] becomes [..., words, numbers per word]."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def scattered(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, order: torch.Tensor) -> Weight:
    """A weight in floating point whose column `i` has the scale and zero of group `order[i]`."""
    order = order.long()
    return floating(numbers.float().sub_(zero[:, order]).mul_(scale[:, order]))


def groups_in(columns: int, group: int | None) -> int:
    return 1 if group is None else -(-columns // group)


def described(what: str, group: int | None, otherwise: str) -> str:
    return f"{what} with a scale per " + (f"{group} columns" if group else otherwise)


# -- refusals --------------------------------------------------------------------------


def required(components: Components, *kinds: Kind) -> list[Component]:
    known = min(component.name for component in components.values())
    for kind in kinds:
        if kind not in components:
            raise BrokenCheckpoint(f"the checkpoint has tensor {known} and lacks the {NAMED[kind]} of that weight")
    return [components[kind] for kind in kinds]


NAMED: dict[Kind, str] = {
    "numbers": "numbers (weight, qweight or weight_packed)",
    "scale": "scales (scales, weight_scale or weight_scale_inv)",
    "zero": "zero points (qzeros or weight_zero_point)",
    "order": "order of its inputs (g_idx)",
    "shape": "shape (weight_shape)",
}


def refuse_others(components: Components, *kinds: Kind) -> None:
    for kind, component in components.items():
        if kind not in (*kinds, "skipped"):
            raise BrokenCheckpoint(
                f"tensor {component.name} has no place in a weight that quantization_config describes so"
            )


def refuse_dtype(component: Component, *known: torch.dtype) -> None:
    if component.dtype not in known:
        found, names = (
            ", ".join(str(dtype).removeprefix("torch.") for dtype in each) for each in ((component.dtype,), known)
        )
        raise BrokenCheckpoint(f"tensor {component.name} has dtype {found}; it must be one of {names}")


def refuse_shape(component: Component, fits: bool) -> None:
    if not fits:
        raise BrokenCheckpoint(
            f"tensor {component.name} has shape {list(component.shape)}, which does not fit the others of that weight"
        )


def refuse_group(numbers: Component, columns: int, group: int | None) -> None:
    if group is not None and columns % group:
        raise BrokenCheckpoint(f"tensor {numbers.name} is of {columns} inputs, which groups of {group} do not divide")


def refuse_order(order: Component, columns: int) -> None:
    refuse_dtype(order, torch.int32, torch.int64)
    refuse_shape(order, order.shape == (columns,))


def zero_of(components: Components, symmetric: bool) -> Component | None:
    """The zero points, which symmetric weights lack."""
    if symmetric:
        if zero := components.get("zero"):
            raise BrokenCheckpoint(f"tensor {zero.name} has zero points, and the weights are declared as symmetric")
        return None
    return required(components, "zero")[0]


def refuse_infinite(name: str, scale: torch.Tensor) -> None:
    if not bool(scale.isfinite().all()):
        raise BrokenCheckpoint(f"tensor {name} has scales that are infinite or NaN")


def refuse_outside(name: str, order: torch.Tensor, groups: int) -> None:
    if not bool(((order >= 0) & (order < groups)).all()):
        raise BrokenCheckpoint(f"tensor {name} names groups outside 0 to {groups - 1}")
