"""Rotary position embedding: the angle of each position and dimension of a head.

A model states a base (`theta`) and possibly a way to scale the angles to a longer context. The tables are computed
once, in float32 as in `transformers`. The angles of distant positions are thereby rounded, and models were trained
with that rounding.

Backends rotate dimension `i` together with the dimension half of the rotated part later. A checkpoint that rotates
neighbours (`interleaved`) is rearranged when it is loaded: `halves` is the order of its rows within a head.
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
class LongScaling:
    """Each period is multiplied by a factor of its own, which depends on the length of the served context.

    `transformers` chooses between the factors anew for every sequence, by its current length. Keys that are cached
    would then be invalid once a sequence grows, so here the choice is made once, for the longest context.
    """

    short: tuple[float, ...]  # if no position is beyond the original context
    long: tuple[float, ...]
    original_positions: int
    magnitude: float

    def is_long(self, positions: int) -> bool:
        return positions > self.original_positions

    def factors(self, positions: int) -> torch.Tensor:
        return torch.tensor(self.long if self.is_long(positions) else self.short, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongScaling | None = None
    fraction: float = 1.0  # the part of a head that is rotated, from its first dimension on
    interleaved: bool = False  # the checkpoint rotates dimensions 0 and 1 together, 2 and 3, ...

    def dimensions(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int, positions: int) -> torch.Tensor:
        """Return a frequency per pair of dimensions, for contexts of up to `positions` tokens."""
        rotated = self.dimensions(head_dim)
        periods = self.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        match self.scaling:
            case None:
                return 1.0 / periods
            case LongScaling() as scaling:
                return 1.0 / (scaling.factors(positions) * periods)
            case scaling:
                return scaling.stretch(1.0 / periods, self.theta)

    def halves(self, head_dim: int) -> torch.Tensor:
        """Return the order of a head's dimensions in which both members of a pair are half the rotated part apart."""
        rotated = self.dimensions(head_dim)
        order = torch.arange(head_dim)
        return torch.cat((order[:rotated:2], order[1:rotated:2], order[rotated:]))

    def tables(self, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, rotated dimensions]`; both halves have the same angles."""
        frequencies = self.frequencies(head_dim, positions)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        magnitude = self.scaling.magnitude if self.scaling else 1.0
        return angles.cos() * magnitude, angles.sin() * magnitude


NO_ROPE = Rope(1.0, fraction=0.0)  # the position of a token has no effect on its queries and keys
