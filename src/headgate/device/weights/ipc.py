"""Weights in the GPU memory of a trainer process, read in place by an engine on the same GPU.

Only handles are sent, as plain values. Their declared content is verified before any is opened, all are opened before
anything is written, and all are closed before the trainer is notified of completion. The trainer must keep its
tensors allocated and unchanged until then.

Only `export_storage`, `open_storage` and `gpu_of` use a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from headgate.device.memory import finish_copies
from headgate.device.weights.loading import DTYPES
from headgate.device.weights.source import TensorInfo, type_name
from headgate.errors import BrokenCheckpoint, SourceLost
from headgate.protocol.command import SharedMemorySource, SharedStorage, SharedTensor

NAMED = {type_name(dtype): dtype for dtype in DTYPES.values()}


# -- the device --------------------------------------------------------------------------


def export_storage(storage: torch.UntypedStorage) -> SharedStorage:
    share: Any = storage._share_cuda_
    return SharedStorage(*share())


def open_storage(shared: SharedStorage, device: int) -> torch.UntypedStorage:
    """The memory of the other process, mapped into this one until the result is dropped."""
    opening: Any = torch.UntypedStorage._new_shared_cuda
    opened: torch.UntypedStorage = opening(
        device,
        shared.handle,
        shared.size,
        shared.offset,
        shared.counter,
        shared.counter_offset,
        shared.event,
        shared.event_needed,
    )
    return opened


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, or "" if `device` is not one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


# -- the trainer's side ------------------------------------------------------------------


def shared(tensors: Mapping[str, torch.Tensor]) -> SharedMemorySource:
    """Handles of `tensors`, which must be on one GPU and contiguous."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise ValueError(f"the tensors must be on one GPU, not on {sorted(map(str, devices))}")
    finish_copies(device := devices.pop())
    storages: dict[int, SharedStorage] = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name} is not contiguous")
        if (at := tensor.untyped_storage().data_ptr()) not in storages:
            storages[at] = export_storage(tensor.untyped_storage())
    order = {at: index for index, at in enumerate(storages)}
    described = (describe(name, tensor, order) for name, tensor in tensors.items())
    return SharedMemorySource(gpu_of(device), tuple(storages.values()), tuple(described))


def describe(name: str, tensor: torch.Tensor, storages: Mapping[int, int]) -> SharedTensor:
    at, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
    return SharedTensor(name, type_name(tensor.dtype), tuple(tensor.shape), storages[at], start)


# -- the engine's side -------------------------------------------------------------------


class SharedWeights:
    """A `WeightSource`."""

    def __init__(
        self,
        source: SharedMemorySource,
        device: torch.device,
        mapped: Mapping[SharedStorage, torch.UntypedStorage] | None = None,
    ) -> None:
        """`mapped`: storages that are open already. Opening one twice would also release it twice in the trainer."""
        self.source = source
        self._device = device
        self._mapped = mapped or {}
        self.opened: list[torch.UntypedStorage] = []

    def __repr__(self) -> str:
        return f"<SharedWeights {len(self.source.tensors)} tensors on {self.source.gpu}>"

    def __enter__(self) -> SharedWeights:
        ours = gpu_of(self._device)
        if not ours or ours != (self.source.gpu or ours):
            raise BrokenCheckpoint(
                f"the tensors are on the GPU {self.source.gpu!r} and this engine is on {ours or 'a CPU'!r}; "
                "memory can be shared only on one GPU"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        finish_copies(self._device)  # copies read memory that is about to be unmapped
        self.opened.clear()

    def metadata(self) -> Mapping[str, TensorInfo]:
        return {tensor.name: self._checked(tensor) for tensor in self.source.tensors}

    def _checked(self, tensor: SharedTensor) -> TensorInfo:
        if (dtype := NAMED.get(tensor.dtype)) is None:
            raise BrokenCheckpoint(f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}")
        if not 0 <= tensor.storage < len(self.source.storages) or min(tensor.shape, default=0) < 0:
            raise BrokenCheckpoint(f"tensor {tensor.name} is not in a shared storage")
        room = self.source.storages[tensor.storage].size - tensor.start
        if tensor.start < 0 or tensor.start % dtype.itemsize or math.prod(tensor.shape) * dtype.itemsize > room:
            raise BrokenCheckpoint(f"tensor {tensor.name} is not within its storage")
        return TensorInfo(dtype, tensor.shape)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._open_all()
        for tensor in self.source.tensors:
            yield tensor.name, self._view(tensor)

    def _open_all(self) -> None:
        try:
            for storage in self.source.storages:
                mapped = self._mapped.get(storage)
                self.opened.append(open_storage(storage, self._device.index or 0) if mapped is None else mapped)
        except (RuntimeError, OSError) as error:
            raise SourceLost(f"the trainer's memory cannot be opened: {error}") from error

    def _view(self, tensor: SharedTensor) -> torch.Tensor:
        storage, info = self.opened[tensor.storage], self._checked(tensor)
        whole = torch.empty(0, dtype=info.dtype, device=storage.device).set_(storage)
        first = tensor.start // info.dtype.itemsize
        view: torch.Tensor = whole[first : first + math.prod(info.shape)].view(info.shape)
        return view
