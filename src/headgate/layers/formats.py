"""The number formats of weights: as received from a checkpoint or a trainer, and as stored on a device.

A `Weight` is a tensor together with its format. `Backend.pack` converts a weight to the format of the matrix that it
fills. Start-up and updates both use `pack`, and no other code converts matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


WeightFormat = Floating | Fp8Rows


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
        return replace(self, numbers=self.numbers[:, which])

    def to(self, device: torch.device) -> Weight:
        scale = None if self.scale is None else self.scale.to(device)
        return Weight(self.numbers.to(device), self.format, scale)


def floating(numbers: torch.Tensor) -> Weight:
    return Weight(numbers, Floating(numbers.dtype))


def floating_numbers(weight: Weight) -> torch.Tensor:
    """Return the numbers of a floating-point weight, which can be copied to a tensor of another dtype directly."""
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
