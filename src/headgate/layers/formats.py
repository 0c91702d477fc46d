"""The number formats of weights: as received from a checkpoint or a trainer, and as stored on a device.

A `Weight` is a tensor together with its format. `Backend.pack` converts a weight to the format of the matrix that it
fills. Start-up and updates both use `pack`, and no other code converts matrices. How checkpoints store these formats
is the subject of `layers/stored.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_LEAST_SCALE = 1e-12  # not zero, so that a row of zeros has a valid scale


@dataclass(frozen=True, slots=True)
class Floating:
    """Numbers of a floating-point type, unchanged."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Eight-bit numbers (e4m3). A float32 scale per row maps the row's largest number to the largest e4m3 number."""


@dataclass(frozen=True, slots=True)
class IntGroups:
    """Whole numbers from 0 on, of `bits` bits, each in a byte of its own.

    `columns` consecutive columns of a row share a scale and a zero: a weight is `(number - zero) * scale`.
    """

    bits: int
    columns: int


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Blocks as in a GGUF file: the numbers of a row are the bytes of its blocks, each of which has its own scale."""

    kind: str  # a key of GGUF_BLOCKS

    @property
    def columns(self) -> int:
        """Columns per block."""
        return GGUF_BLOCKS[self.kind].columns

    def bytes_of(self, columns: int) -> int:
        """The size of a row of so many columns."""
        return columns // self.columns * GGUF_BLOCKS[self.kind].size


class GgufBlock(NamedTuple):
    """One kind of block."""

    columns: int
    size: int  # bytes
    rounds: bool = (
        False  # whether floating-point numbers can be converted to it, by a rule that always gives the same
    )


GGUF_BLOCKS = {
    "Q4_0": GgufBlock(32, 18, rounds=True),
    "Q4_1": GgufBlock(32, 20, rounds=True),
    "Q5_0": GgufBlock(32, 22, rounds=True),
    "Q5_1": GgufBlock(32, 24, rounds=True),
    "Q8_0": GgufBlock(32, 34, rounds=True),
    "Q2_K": GgufBlock(256, 84),
    "Q3_K": GgufBlock(256, 110),
    "Q4_K": GgufBlock(256, 144),
    "Q5_K": GgufBlock(256, 176),
    "Q6_K": GgufBlock(256, 210),
}

WeightFormat = Floating | Fp8Rows | IntGroups | GgufBlocks


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, or a part of one. A matrix has a row per output and a column per input."""

    numbers: torch.Tensor
    format: WeightFormat
    scale: torch.Tensor | None = None  # float32: [rows] of Fp8Rows, [rows, groups] of IntGroups
    zero: torch.Tensor | None = None  # like the scale, of IntGroups only

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, which: slice | int | torch.Tensor) -> Weight:
        """Some rows. Of stacked matrices: some matrices, or one."""
        return self._each(lambda tensor: tensor[which])

    def columns(self, which: slice) -> Weight:
        match self.format:
            case GgufBlocks() as blocks:
                return columns_of_blocks(self, blocks, which)
            case IntGroups(columns=size):
                return columns_of_groups(self, size, which)
            case _:
                return replace(self, numbers=self.numbers[:, which])

    def to(self, device: torch.device) -> Weight:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
        scale, zero = (None if part is None else change(part) for part in (self.scale, self.zero))
        return Weight(change(self.numbers), self.format, scale, zero)


def floating(numbers: torch.Tensor) -> Weight:
    return Weight(numbers, Floating(numbers.dtype))


def floating_numbers(weight: Weight) -> torch.Tensor:
    """Return the numbers that a weight of any format stands for, in a floating-point type."""
    match weight.format:
        case Floating():
            return weight.numbers
        case Fp8Rows():
            assert weight.scale is not None
            return weight.numbers.float().mul_(weight.scale[..., None])
        case IntGroups(columns=size):
            assert weight.scale is not None and weight.zero is not None
            numbers = weight.numbers.float()
            grouped = numbers.view(*numbers.shape[:-1], -1, size)
            grouped.sub_(weight.zero[..., None]).mul_(weight.scale[..., None])
            return numbers
        case GgufBlocks() as blocks:
            return numbers_of_blocks(weight.numbers, blocks)


def fp8_rows(weight: Weight) -> Weight:
    """Return the weight in eight bits. A weight that already has this format is not rounded again."""
    if isinstance(weight.format, Fp8Rows):
        return weight
    wide = floating_numbers(weight).float()
    scale = (wide.abs().amax(1) / FP8_LARGEST).clamp_(min=FP8_LEAST_SCALE)
    numbers = (wide / scale[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8)
    return Weight(numbers, Fp8Rows(), scale)


def convertible(given: WeightFormat, stored: WeightFormat) -> bool:
    """Whether a weight in the format `given` can be packed into a matrix in the format `stored`."""
    return not isinstance(stored, GgufBlocks) or given == stored or GGUF_BLOCKS[stored.kind].rounds


def gguf_blocks(weight: Weight, format: GgufBlocks) -> Weight:
    """Return the weight in blocks. A weight that already has this format is unchanged, bit for bit."""
    if weight.format == format:
        return weight
    import gguf  # takes 150 ms

    wide = floating_numbers(weight).float().cpu().contiguous().numpy()
    return Weight(torch.from_numpy(gguf.quantize(wide, gguf.GGMLQuantizationType[format.kind])), format)


def numbers_of_blocks(blocks: torch.Tensor, format: GgufBlocks) -> torch.Tensor:
    """Return the numbers of rows of blocks, in float32."""
    import gguf  # takes 150 ms

    return torch.from_numpy(gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[format.kind]))


def columns_of_blocks(weight: Weight, format: GgufBlocks, which: slice) -> Weight:
    """Return some columns: in the same format if they are whole blocks, otherwise in float32."""
    first, last, _ = which.indices(weight.numbers.shape[1] // GGUF_BLOCKS[format.kind].size * format.columns)
    if first % format.columns or last % format.columns:
        return floating(floating_numbers(weight)[:, which])
    return replace(weight, numbers=weight.numbers[:, format.bytes_of(first) : format.bytes_of(last)])


def columns_of_groups(weight: Weight, size: int, which: slice) -> Weight:
    """Return some columns: in the same format if they are whole groups, otherwise in float32."""
    first, last, _ = which.indices(weight.numbers.shape[1])
    if first % size or last % size:
        return floating(floating_numbers(weight)[:, which])
    groups = slice(first // size, last // size)
    scale, zero = (None if part is None else part[:, groups] for part in (weight.scale, weight.zero))
    return Weight(weight.numbers[:, which], weight.format, scale, zero)
