"""Where the tensors of a checkpoint go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from headgate.layers.formats import Weight, floating_numbers


@dataclass(frozen=True, slots=True)
class WeightParameter:
    """A place in the model that one checkpoint tensor of `shape` fills; it may be a part of something fused."""

    shape: tuple[int, ...]
    write: Callable[[Weight], object]
    home: torch.Tensor  # what it lies in, perhaps with others


class Layer(Protocol):
    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        """By the names of the checkpoint."""


def plain(tensor: torch.Tensor) -> WeightParameter:
    return WeightParameter(tuple(tensor.shape), copied_to(tensor), tensor)


def copied_to(tensor: torch.Tensor) -> Callable[[Weight], object]:
    """Writes a weight that is kept as floating-point numbers."""
    return lambda weight: tensor.copy_(floating_numbers(weight))


def under(prefix: str, layer: Layer) -> Iterator[tuple[str, WeightParameter]]:
    return ((f"{prefix}.{name}", parameter) for name, parameter in layer.parameters())
