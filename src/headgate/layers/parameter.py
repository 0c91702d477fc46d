"""The parameters of a model, into which checkpoint tensors are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headgate.layers.formats import Weight, WeightFormat, floating_numbers


@dataclass(frozen=True, slots=True)
class WeightParameter:
    """The destination of one checkpoint tensor of `shape`; it may be a part of a fused matrix."""

    shape: tuple[int, ...]
    write: Callable[[Weight], object]
    tensor: torch.Tensor  # the tensor of the model that holds it, possibly together with other parameters
    scale: torch.Tensor | None = None  # the scales of the rows, if the matrix is quantised
    format: WeightFormat | None = None  # how it is stored; None: in the floating-point type of `tensor`
    keep: Callable[[WeightFormat], object] | None = None  # stores it in this format, if the backend computes with it


class Layer(Protocol):
    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        """Yield the parameters with their checkpoint names."""


def tensor_parameter(tensor: torch.Tensor) -> WeightParameter:
    return WeightParameter(tuple(tensor.shape), copied_to(tensor), tensor)


def copied_to(tensor: torch.Tensor) -> Callable[[Weight], object]:
    """Return a function that copies a floating-point weight to `tensor`."""
    return lambda weight: tensor.copy_(floating_numbers(weight))


def rearranged(parameter: WeightParameter, order: torch.Tensor) -> WeightParameter:
    """Return the same parameter for a checkpoint tensor whose rows are to be written in another order."""
    return replace(parameter, write=lambda weight: parameter.write(weight.rows(order.to(weight.numbers.device))))


def under(prefix: str, layer: Layer) -> Iterator[tuple[str, WeightParameter]]:
    return ((f"{prefix}.{name}", parameter) for name, parameter in layer.parameters())
