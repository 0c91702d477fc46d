"""What a source of weights offers: a folder, shared memory, a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from headgate.layers.formats import Weight, WeightFormat


class TensorInfo(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    format: WeightFormat | None = None  # if the numbers are not stored as `dtype`, which has room for them


class WeightSource(Protocol):
    """A source that is a context manager is entered while weights are loaded from it, and its exit receives the error,
    if any.
    """

    def metadata(self) -> Mapping[str, TensorInfo]:
        """Every tensor that iteration will yield."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | Weight]]:
        """Each tensor once, in any order, on any device. A tensor is valid until the next one is requested.

        A tensor whose info has a format is yielded as a weight in this format.
        """


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
