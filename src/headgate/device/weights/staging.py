"""The parts of an update that are collected beside the weights in service.

Parts are kept in the memory of the model's device if a second copy of the model fits there, otherwise in host memory;
if it fits nowhere, a part is refused and the weights in service are unchanged. A complete collection is a
`WeightSource`, so it is verified and written like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from headgate.device.weights.loading import (
    CONVERTIBLE,
    DTYPES,
    harmless,
    refuse_dtype,
    refuse_shape,
    refuse_unexpected,
)
from headgate.device.weights.source import TensorInfo, type_name
from headgate.device.weights.stacking import pieces_of, stacked_names
from headgate.errors import BrokenCheckpoint, OutOfMemory
from headgate.layers.formats import floating, floating_numbers
from headgate.models.quantisation import Quantisation
from headgate.protocol.command import Collected, TensorSpec

CPU = torch.device("cpu")
MARGIN = 256 * 2**20  # bytes that staging leaves free
MOST_PACKED = 2  # bytes of a number in a quantised weight, with its scales
DTYPE_NAMES = {type_name(dtype): dtype for dtype in DTYPES.values()}

Shapes = Mapping[str, tuple[int, ...]]
Tensors = list[tuple[str, torch.Tensor]]


def dtype_of(name: str) -> torch.dtype:
    """The dtype with torch's name, with or without `torch.`."""
    if (dtype := DTYPE_NAMES.get(name.removeprefix("torch."))) is None:
        raise BrokenCheckpoint(f"the dtype {name!r} is unknown; use one of {', '.join(DTYPE_NAMES)}")
    return dtype


def info_of(spec: TensorSpec) -> TensorInfo:
    if min(spec.shape, default=0) < 0:
        raise BrokenCheckpoint(f"tensor {spec.name} has the shape {list(spec.shape)}")
    return TensorInfo(dtype_of(spec.dtype), spec.shape)


class StagedWeights:
    """A `WeightSource`. Only the thread of the step loop changes it, until it is loaded."""

    def __init__(
        self,
        expected: Shapes,
        device: torch.device,
        room: Callable[[torch.device], int],
        quantisation: Quantisation | None = None,
    ) -> None:
        self._expected = expected
        self._quantisation = quantisation
        self._device = device
        self._room = room
        self._place: torch.device | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()  # names as sent; a tensor may contain several of the model's
        self._covered: set[str] = set()  # the model's names
        self._stacked = stacked_names(expected)

    def __repr__(self) -> str:
        return f"<StagedWeights {len(self._tensors)} of {len(self._expected)} tensors>"

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._arrived

    def wants(self, name: str) -> bool:
        weight = self._weight_of(name) or name
        return weight in self._expected or weight.removesuffix(".weight") in self._stacked

    def _weight_of(self, name: str, dtype: torch.dtype = torch.float32) -> str | None:
        """The quantised weight that a tensor is a component of. Numbers may have the name of the weight itself."""
        found = None if self._quantisation is None else self._quantisation.component_of(name, dtype)
        return None if found is None else found[0]

    def verify(self, tensors: Sequence[TensorSpec]) -> None:
        """Raise BrokenCheckpoint if the model has no place for one of `tensors`."""
        refuse_unexpected(each.name for each in tensors if not self.wants(each.name) and not harmless(each.name))
        for each in tensors:
            # The components of a quantised weight may come one by one, and are verified together when they are loaded.
            dtype = dtype_of(each.dtype)
            if self.wants(each.name) and self._weight_of(each.name, dtype) is None:
                refuse_dtype(each.name, dtype)
                self._verify_pieces(each.name, each.shape)

    def _verify_pieces(self, name: str, shape: tuple[int, ...]) -> None:
        pieces = pieces_of(name, shape, self._expected)
        refuse_unexpected(piece.name for piece in pieces if piece.name not in self._expected)
        for piece in pieces:
            refuse_shape(piece.name, self._expected[piece.name], shape if piece.name == name else piece.shape(shape))

    def place(self, dtype: torch.dtype) -> torch.device:
        """Where parts are kept; decided for the whole model when its first part arrives."""
        if self._place is None:
            itemsize = dtype.itemsize if dtype in CONVERTIBLE else MOST_PACKED
            needed = sum(map(math.prod, self._expected.values())) * itemsize * 1.05 + MARGIN
            places = [place for place in (self._device, CPU) if self._room(place) >= needed]
            if not places:
                raise OutOfMemory(f"there is no room for a second copy of the weights ({int(needed) >> 20} MiB)")
            self._place = places[0]
        return self._place

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._arrived.add(name)
            weight = self._weight_of(name, tensor.dtype)
            pieces = pieces_of(weight or name, tuple(tensor.shape), self._expected)
            self._covered.update(piece.name for piece in pieces)
            if weight is not None:  # components are kept as sent until they are loaded
                self._tensors[name] = tensor
                continue
            for piece in pieces:
                self._tensors[piece.name] = (
                    tensor if piece.name == name else floating_numbers(piece.of(floating(tensor)))
                )

    def state(self) -> Collected:
        missing = self._expected.keys() - self._covered
        return Collected(len(self._tensors), len(missing), min(missing, default=""), str(self._place or self._device))

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]
