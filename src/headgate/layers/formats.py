"""The number formats of weights: as received from a checkpoint or a trainer, and as stored on a device.

A `Weight` is a tensor together with its format. `Backend.pack` converts a weight to the format of the matrix that it
fills. Start-up and updates both use `pack`, and no other code converts matrices.
"""

from __future__ import annotations

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

WeightFormat = Floating | Fp8Rows | GgufBlocks


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model, or a part of one. A matrix has a row per output and a column per input."""

    numbers: torch.Tensor
    format: WeightFormat
    scale: torch.Tensor | None = None  # [rows]: multiplies the numbers of each row

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, which: slice | torch.Tensor) -> Weight:
        return Weight(self.numbers[which], self.format, None if self.scale is None else self.scale[which])

    def columns(self, which: slice) -> Weight:
        if isinstance(self.format, GgufBlocks):
            return columns_of_blocks(self, self.format, which)
        return replace(self, numbers=self.numbers[:, which])

    def to(self, device: torch.device) -> Weight:
        scale = None if self.scale is None else self.scale.to(device)
        return Weight(self.numbers.to(device), self.format, scale)


def floating(numbers: torch.Tensor) -> Weight:
    return Weight(numbers, Floating(numbers.dtype))


def floating_numbers(weight: Weight) -> torch.Tensor:
    """Return the numbers of a weight in floating point, which can be copied to a tensor of another dtype directly."""
    if isinstance(weight.format, GgufBlocks):
        return numbers_of_blocks(weight.numbers, weight.format)
    assert isinstance(weight.format, Floating), f"{weight.format} cannot be stored as floating-point numbers"
    return weight.numbers


def fp8_rows(weight: Weight) -> Weight:
    """Return the weight in eight bits. A weight that already has this format is not rounded again."""
    match weight.format:
        case Fp8Rows():
            return weight
        case Floating():
            wide = weight.numbers.float()
            scale = (wide.abs().amax(1) / FP8_LARGEST).clamp_(min=FP8_LEAST_SCALE)
            numbers = (wide / scale[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8)
            return Weight(numbers, Fp8Rows(), scale)
        case GgufBlocks():
            return fp8_rows(floating(floating_numbers(weight)))


def convertible(given: WeightFormat, stored: WeightFormat) -> bool:
    """Whether a weight in the format `given` can be packed into a matrix in the format `stored`."""
    match stored:
        case GgufBlocks(kind):
            return given == stored or (GGUF_BLOCKS[kind].rounds and not isinstance(given, Fp8Rows))
        case Fp8Rows():
            return True
        case Floating():
            return not isinstance(given, Fp8Rows)


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
