"""KV between engines on one GPU: slots of device memory that the other process reads where they lie.

What is shared are slots of our own, never the cache: sleep gives the memory of the cache back, which no other process may
hold on to then, and whoever may read a slot shall not be able to read all the KV there is. Blocks are copied into a slot by
one engine and out of it by the other, at the speed of the device; a copy is over when its method returns. What was copied
is added up while it is, so a slot that changed in between is noticed.

Everything here belongs to the transport's thread. Besides the copies themselves, only `ipc` touches a device.
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
    """What another process must know to read our slots."""

    card: str
    storage: SharedStorage
    slots: int
    blocks: int  # in each


class SameGpuCache:
    """The cache `tensors` of this engine on a GPU that other engines may be on too."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = tensors[0].device
        self._parts = [tensor.flatten(1).view(torch.int64) for tensor in tensors]
        self._words = self._parts[0].shape[1]
        self._gather, self._scatter = copies(self._device)
        self._shelf: SameGpuShelf | None = None
        self._has_room = True
        self._copying: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._device.type == "cuda":
            # Of its own, and before others: copies are short, and would wait behind every kernel of a long step.
            stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            self._copying = lambda: torch.cuda.stream(stream)
        self.name = ipc.gpu_of(self._device)

    @property
    def block_bytes(self) -> int:
        return len(self._parts) * self._words * 8

    def shelf(self) -> Shelf | None:
        """Laid out when it is first asked for, and kept; None if the device had no room for it then."""
        if self._shelf is None and self._has_room:
            shape = self._shape(SLOTS, max(1, SLOT_BYTES // self.block_bytes))
            try:
                with self._copying():
                    memory = torch.empty(shape, dtype=torch.int64, device=self._device)
                    self._shelf = SameGpuShelf(self, memory)
            except RuntimeError as error:  # out of memory is one too
                self._has_room = False
                log.warning("engines on this GPU fetch KV by way of the host: %s", error)
        return self._shelf

    def open(self, shown: bytes) -> ShelfReader:
        """Another engine's slots; OSError if they are not for us."""
        try:
            theirs = msgspec.msgpack.decode(shown, type=SharedSlots)
        except msgspec.DecodeError as error:
            raise OSError(str(error)) from error
        if not self.name or theirs.card != self.name:
            raise OSError(f"they are on the GPU {theirs.card!r}, and we on {self.name!r}")
        return SameGpuReader(self, self._mapped(theirs), theirs.slots, theirs.blocks)

    def _mapped(self, theirs: SharedSlots) -> torch.Tensor:
        shape = self._shape(theirs.slots, theirs.blocks)
        if min(shape) < 1 or theirs.storage.size != 8 * torch.Size(shape).numel():
            raise OSError(f"{theirs.slots} slots of {theirs.blocks} blocks are not what is shared")
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
            sums = copy(self._parts, index, slot[:, : len(blocks)]).cpu()  # which waits for it
        return blake2b(sums.numpy().tobytes(), digest_size=CHECKSUM_BYTES).digest()


def card_of(tensors: Sequence[torch.Tensor]) -> SameGpuCache | None:
    """None for a cache whose blocks are not of one size in all layers."""
    sizes = {tensor[0].nbytes for tensor in tensors}
    return SameGpuCache(tensors) if len(sizes) == 1 and not sizes.pop() % 8 else None


class SameGpuShelf:
    def __init__(self, card: SameGpuCache, memory: torch.Tensor) -> None:
        self._card = card
        self._memory = memory
        self.slots, self.blocks = memory.shape[0], memory.shape[2]
        self.shown = msgspec.msgpack.encode(
            SharedSlots(card.name, ipc.export_storage(memory.untyped_storage()), self.slots, self.blocks)
        )

    def put(self, slot: int, blocks: Sequence[int]) -> bytes:
        return self._card.put(blocks, self._memory[slot])


class SameGpuReader:
    def __init__(self, card: SameGpuCache, memory: torch.Tensor, slots: int, blocks: int) -> None:
        self._card = card
        self._memory = memory
        self.slots, self.blocks = slots, blocks

    def take(self, slot: int, blocks: Sequence[int]) -> bytes:
        return self._card.take(blocks, self._memory[slot])


# -- the copies --------------------------------------------------------------------------


def copies(device: torch.device) -> tuple[Copy, Copy]:
    """How blocks are gathered and scattered on `device`."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return gather, scatter
    from headgate.layers.triton.blocks import gather_blocks, scatter_blocks

    return gather_blocks, scatter_blocks


def gather(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    for part, room in zip(parts, place, strict=True):
        torch.index_select(part, 0, index, out=room)
    return place.sum(-1)


def scatter(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    taken = place.clone()  # what is added up is what is stored, whatever becomes of the slot meanwhile
    for part, words in zip(parts, taken, strict=True):
        part.index_copy_(0, index, words)
    return taken.sum(-1)
