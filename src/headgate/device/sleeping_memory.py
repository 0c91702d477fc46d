"""Sleeping memory: tensors keep their shape and their place in the model while their pages are returned to the
system.

Their content is lost; after waking they are zero. On the CPU their addresses stay valid. On a GPU addresses change,
so anything that stores one (a graph) must drop it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

from headgate.device.memory import GIB, finish_copies, free_bytes
from headgate.errors import OutOfMemory

MADV_DONTNEED = 4


class Sleeper:
    """The memory of a set of tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]

    @property
    def size(self) -> int:
        return sum(size for _, size in self._storages)

    def give_back(self) -> None:
        for storage, size in self._storages:
            if storage.device.type == "cpu":
                drop_pages(storage.data_ptr(), size)
            else:
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def take_again(self) -> None:
        """Raises OutOfMemory, with nothing allocated, if the memory is no longer available."""
        devices = {storage.device for storage, _ in self._storages}
        for device in devices:
            if self.size > (free := free_bytes(device)):
                need = f"{self.size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free"
                raise OutOfMemory(f"waking needs {need}; free some memory and wake again")
        try:
            for storage, size in self._storages:
                if storage.device.type != "cpu":  # host pages are allocated by the system when they are touched
                    storage.resize_(size)
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        except torch.OutOfMemoryError as error:
            self.give_back()
            raise OutOfMemory(f"the device has no room to wake: {error}") from error
        for device in devices:
            # so that the zeros land now and do not overwrite a transfer, which runs on its own stream
            finish_copies(device)


def drop_pages(address: int, size: int) -> None:
    """Return whole pages of private memory to the system; they read as zeros until written."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    whole = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    # The pages at both ends of the range are shared with other data, so they are only cleared.
    if first >= last or _libc.madvise(*whole, MADV_DONTNEED):
        ctypes.memset(address, 0, size)
    else:
        ctypes.memset(address, 0, first - address)
        ctypes.memset(last, 0, address + size - last)


_libc = ctypes.CDLL(None, use_errno=True)
