"""Rotary position embedding: the angle of each position and dimension of a head.

A model states a base (`theta`) and possibly a way to scale the angles to a longer context. The tables are computed
once, in float32 as in `transformers`. The angles of distant positions are thereby rounded, and models were trained
with that rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions are divided by `factor`."""

    factor: float
    magnitude: float = 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones are unchanged, and those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    magnitude: float = 1.0

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        turns = self.original_positions * frequencies / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Like `Llama3Scaling`, but interpolates over dimensions, not frequencies; scales attention by `magnitude`."""

    factor: float
    original_positions: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_dimensions: bool = True

    def stretch(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        first, last = self._blended_dimensions(2 * len(frequencies), theta)
        blend = (torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first)
        blend = 1 - blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies

    def _blended_dimensions(self, head_dim: int, theta: float) -> tuple[float, float]:
        first = self._dimension_with_rotations(self.beta_fast, head_dim, theta)
        last = self._dimension_with_rotations(self.beta_slow, head_dim, theta)
        if self.whole_dimensions:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return first, last if last != first else last + 0.001  # avoids a division by zero

    def _dimension_with_rotations(self, times: float, head_dim: int, theta: float) -> float:
        """The dimension whose angle completes `times` rotations over the original context."""
        return head_dim * math.log(self.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def frequencies(self, head_dim: int) -> torch.Tensor:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        return self.scaling.stretch(frequencies, self.theta) if self.scaling else frequencies

    def tables(self, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, head_dim]`; both halves of a head have the same angles."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), self.frequencies(head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        magnitude = self.scaling.magnitude if self.scaling else 1.0
        return angles.cos() * magnitude, angles.sin() * magnitude
