"""Sleeping memory: tensors that keep their shape and place in the model while their pages go back to the machine.

What was in them is lost; awake again they are all zero. On the CPU their addresses stay valid all the time. On a GPU they
change, so whatever has remembered one (a graph) must forget it.
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
    """The memory of some tensors."""

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
        """OutOfMemory, and nothing taken, if someone else has it now."""
        devices = {storage.device for storage, _ in self._storages}
        for device in devices:
            if self.size > (free := free_bytes(device)):
                need = f"{self.size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free"
                raise OutOfMemory(f"waking needs {need}; free some and wake again")
        try:
            for storage, size in self._storages:
                if storage.device.type != "cpu":  # pages of the machine come by themselves when they are touched
                    storage.resize_(size)
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        except torch.OutOfMemoryError as error:
            self.give_back()
            raise OutOfMemory(f"the device has no room to wake: {error}") from error
        for device in devices:
            finish_copies(device)  # the zeros are there: transfers have streams of their own, and would be wiped out


def drop_pages(address: int, size: int) -> None:
    """Give whole pages of private memory back to the machine; they read as zeros until someone writes."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    whole = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    # The ends of the range share their pages with others, so they are only cleared.
    if first >= last or _libc.madvise(*whole, MADV_DONTNEED):
        ctypes.memset(address, 0, size)
    else:
        ctypes.memset(address, 0, first - address)
        ctypes.memset(last, 0, address + size - last)


_libc = ctypes.CDLL(None, use_errno=True)
