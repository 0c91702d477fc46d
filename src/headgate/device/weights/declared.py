"""Weights with what their trainer has declared about them: that they are changed tensors only, and their checksums.

Checksums are verified before the first write, so all tensors are held at once. For tensors that are not in memory already,
this needs room for the whole source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch

from headgate.device.weights.broadcast import CPU, MARGIN, BroadcastWeights
from headgate.device.weights.source import TensorInfo, WeightSource
from headgate.errors import BrokenCheckpoint, OutOfMemory
from headgate.layers.formats import Weight, floating_numbers


class DeclaredWeights:
    """A `WeightSource`. `partial`: the parameters that it lacks keep their values."""

    def __init__(
        self,
        source: WeightSource,
        *,
        partial: bool,
        checksum: Mapping[str, str],
        room: Callable[[torch.device], int],
    ) -> None:
        self.partial = partial
        self._source = source
        self._checksum = checksum
        self._room = room
        self._opened = ExitStack()

    def __repr__(self) -> str:
        return f"<DeclaredWeights{' partial' if self.partial else ''} {self._source!r}>"

    def __enter__(self) -> DeclaredWeights:
        if isinstance(self._source, AbstractContextManager):
            self._opened.enter_context(self._source)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, where)

    def metadata(self) -> Mapping[str, TensorInfo]:
        found = self._source.metadata()
        if unknown := self._checksum.keys() - found.keys():
            raise BrokenCheckpoint(f"there is a checksum for tensor {min(unknown)}, which has not been sent")
        if self._checksum and isinstance(self._source, BroadcastWeights):
            self._refuse_without_room(found)
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | Weight]]:
        if not self._checksum:
            yield from self._source
            return
        tensors = list(self._source)
        for name, tensor in tensors:
            promised = self._checksum.get(name)
            if promised is not None and (found := digest(numbers_of(tensor))) != promised.lower():
                raise BrokenCheckpoint(f"tensor {name} has SHA-256 {found}; {promised.lower()} was promised")
        yield from tensors

    def _refuse_without_room(self, found: Mapping[str, TensorInfo]) -> None:
        needed = sum(math.prod(info.shape) * info.dtype.itemsize for info in found.values()) * 1.05 + MARGIN
        if self._room(CPU) < needed:
            raise OutOfMemory(f"there is no room to verify checksums before loading ({int(needed) >> 20} MiB)")


def numbers_of(tensor: torch.Tensor | Weight) -> torch.Tensor:
    return floating_numbers(tensor) if isinstance(tensor, Weight) else tensor


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a tensor in row-major order."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
