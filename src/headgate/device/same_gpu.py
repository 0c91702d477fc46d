"""KV transfer between engines on one GPU, through slots of device memory that the other process can read.

The engine shares a *shelf*: a few slots of extra device memory, never the cache itself. Sleep releases the memory of
the cache, so no other process may have it mapped; and a process that may read a slot must not be able to read all KV.
One engine copies blocks into a slot and the other copies them out, at the speed of the device; a copy is complete
when its method returns. Both compute a checksum while they copy, which detects a slot that changed in between.

Everything here runs on the transport's thread. Apart from the copies, only `ipc` uses a device.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b

import msgspec
import torch

from headgate.device.weights import ipc
from headgate.protocol.command import SharedStorage
from headgate.transfer.frames import CHECKSUM_BYTES
from headgate.transfer.transport import Shelf, ShelfReader

log = logging.getLogger(__name__)

SLOTS, SLOT_BYTES = 8, 32 * 2**20

Copy = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


class SharedSlots(msgspec.Struct, frozen=True, array_like=True):
    """What another process needs in order to read our slots."""

    gpu_id: str
    storage: SharedStorage
    slots: int
    blocks: int  # per slot


class SameGpuCache:
    """The KV cache `tensors` of this engine, on a GPU that other engines may share."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = tensors[0].device
        self._parts = [tensor.flatten(1).view(torch.int64) for tensor in tensors]
        self._words = self._parts[0].shape[1]
        self._gather, self._scatter = copies(self._device)
        self._shelf: SameGpuShelf | None = None
        self._has_room = True
        self._copying: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._device.type == "cuda":
            # A separate, high-priority stream: copies are short, and would wait behind every kernel of a long step.
            stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._copying = lambda: torch.cuda.stream(stream)
        self.gpu_id = ipc.gpu_of(self._device)

    @property
    def block_bytes(self) -> int:
        return len(self._parts) * self._words * 8

    def shelf(self) -> Shelf | None:
        """Our shelf, allocated on first use and kept. None if the device had no room for it then."""
        if self._shelf is None and self._has_room:
            shape = self._shape(SLOTS, max(1, SLOT_BYTES // self.block_bytes))
            try:
                with self._copying():
                    memory = torch.empty(shape, dtype=torch.int64, device=self._device)
                    self._shelf = SameGpuShelf(self, memory)
            except RuntimeError as error:  # out of memory is a RuntimeError too
                self._has_room = False
                log.warning("engines on this GPU fetch KV through host memory: %s", error)
        return self._shelf

    def open(self, descriptor: bytes) -> ShelfReader:
        """Open another engine's slots. Raises OSError if this engine cannot read them."""
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=SharedSlots)
        except msgspec.DecodeError as error:
            raise OSError(str(error)) from error
        if not self.gpu_id or theirs.gpu_id != self.gpu_id:
            raise OSError(f"the slots are on GPU {theirs.gpu_id!r}; this engine is on {self.gpu_id!r}")
        return SameGpuReader(self, self._mapped(theirs), theirs.slots, theirs.blocks)

    def _mapped(self, theirs: SharedSlots) -> torch.Tensor:
        shape = self._shape(theirs.slots, theirs.blocks)
        if min(shape) < 1 or theirs.storage.size != 8 * torch.Size(shape).numel():
            raise OSError(f"{theirs.slots} slots of {theirs.blocks} blocks do not match the shared memory")
        try:
            storage = ipc.open_storage(theirs.storage, self._device.index or 0)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        return torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage).view(shape)

    def _shape(self, slots: int, blocks: int) -> tuple[int, int, int, int]:
        return slots, len(self._parts), blocks, self._words

    def put(self, blocks: Sequence[int], slot: torch.Tensor) -> bytes:
        return self._copy(self._gather, blocks, slot)

    def take(self, blocks: Sequence[int], slot: torch.Tensor) -> bytes:
        return self._copy(self._scatter, blocks, slot)

    @torch.inference_mode()
    def _copy(self, copy: Copy, blocks: Sequence[int], slot: torch.Tensor) -> bytes:
        with self._copying():
            index = torch.tensor(blocks, dtype=torch.int64).to(self._device)
            sums = copy(self._parts, index, slot[:, : len(blocks)]).cpu()  # waits for the copy
        return blake2b(sums.numpy().tobytes(), digest_size=CHECKSUM_BYTES).digest()


def same_gpu_cache(tensors: Sequence[torch.Tensor]) -> SameGpuCache | None:
    """The shareable cache, or None if blocks do not have the same size in all layers."""
    sizes = {tensor[0].nbytes for tensor in tensors}
    return SameGpuCache(tensors) if len(sizes) == 1 and not sizes.pop() % 8 else None


class SameGpuShelf:
    def __init__(self, cache: SameGpuCache, memory: torch.Tensor) -> None:
        self._cache = cache
        self._memory = memory
        self.slots, self.blocks = memory.shape[0], memory.shape[2]
        self.descriptor = msgspec.msgpack.encode(
            SharedSlots(cache.gpu_id, ipc.export_storage(memory.untyped_storage()), self.slots, self.blocks)
        )

    def put(self, slot: int, blocks: Sequence[int]) -> bytes:
        return self._cache.put(blocks, self._memory[slot])


class SameGpuReader:
    def __init__(self, cache: SameGpuCache, memory: torch.Tensor, slots: int, blocks: int) -> None:
        self._cache = cache
        self._memory = memory
        self.slots, self.blocks = slots, blocks

    def take(self, slot: int, blocks: Sequence[int]) -> bytes:
        return self._cache.take(blocks, self._memory[slot])


# -- the copies --------------------------------------------------------------------------


def copies(device: torch.device) -> tuple[Copy, Copy]:
    """The functions that gather and scatter blocks on `device`."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return gather, scatter
    from headgate.layers.triton.blocks import gather_blocks, scatter_blocks

    return gather_blocks, scatter_blocks


def gather(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    for part, room in zip(parts, place, strict=True):
        torch.index_select(part, 0, index, out=room)
    return place.sum(-1)


def scatter(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    taken = place.clone()  # the sum covers exactly what is stored, even if the slot changes meanwhile
    for part, words in zip(parts, taken, strict=True):
        part.index_copy_(0, index, words)
    return taken.sum(-1)
