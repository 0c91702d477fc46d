"""KV blocks as bytes, for transfers: straight from the cache on a CPU, through pinned memory on a GPU (or see `card.py`).

What is inside a block is its backend's business; engines exchange blocks only if the names of their layouts are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from headgate.device.same_gpu import card_of
from headgate.layers.backend import KV, Backend
from headgate.transfer.transport import BlockMemory, Portion, SameGpuMemory, Words

SAMPLES, SAMPLE_BYTES = 64, 4096
SMALL_BYTES = 32 * 2**10  # of a piece: what is done once for each costs more than copying it
PORTION_BYTES = 512 * 2**10  # stays in a core's own cache from one end of the work on it to the other


def block_memory(kv: list[KV], backend: Backend, model: str) -> BlockMemory:
    """The cache of all layers; `model` tells checkpoints apart whose caches look alike."""
    layout = layout_name(kv, backend, model)
    tensors = [cache for layer in kv for cache in layer]
    return HostBlocks(tensors, layout) if backend.device.type == "cpu" else DeviceBlocks(tensors, layout)


def layout_name(kv: list[KV], backend: Backend, model: str) -> str:
    shapes = " ".join(f"{cache.dtype} {list(cache.shape[1:])}" for cache in kv[0])
    return f"{backend.kv_layout}, {backend.dtype}, {len(kv)} x {shapes}, {model}"


class HostBlocks:
    """A cache in the memory of this process. Nothing is copied, but what lies in so many small pieces that it pays."""

    near: SameGpuMemory | None = None

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        self._parts = [words_of(tensor) for tensor in tensors]
        self.block_bytes: int = sum(part[0].nbytes for part in self._parts)

    def lend(self, blocks: Sequence[int]) -> Iterator[Portion]:
        if not self._scattered(spans := list(runs(blocks)), len(blocks)):
            yield from self._in_place(spans, len(blocks))
            return
        index, stage = np.array(blocks), self._stage(len(blocks))
        for parts in self._together(len(blocks)):
            portion = _places(parts, stage, len(blocks))
            for part, words in zip(parts, portion, strict=True):
                np.take(part, index, axis=0, out=words, mode="clip")  # which needs no buffer of its own
            yield portion

    def room(self, blocks: Sequence[int]) -> Iterator[Portion]:
        if not self._scattered(spans := list(runs(blocks)), len(blocks)):
            yield from self._in_place(spans, len(blocks))
            return
        index, stage = np.array(blocks), self._stage(len(blocks))
        for parts in self._together(len(blocks)):
            portion = _places(parts, stage, len(blocks))
            yield portion
            for part, words in zip(parts, portion, strict=True):
                part[index] = words

    def _in_place(self, spans: list[slice], count: int) -> Iterator[Portion]:
        for parts in self._together(count):
            yield [part[span] for part in parts for span in spans]

    def _together(self, count: int) -> Iterator[list[Words]]:
        """Parts that are a portion, of so many blocks."""
        step = self._at_once(count)
        for start in range(0, len(self._parts), step):
            yield self._parts[start : start + step]

    def _stage(self, count: int) -> Words:
        """Room for a portion. One piece for all of them: fresh pages would cost as much as copying to them."""
        return np.empty((self._at_once(count), count * max(part.shape[1] for part in self._parts)), np.uint64)

    def _at_once(self, count: int) -> int:
        part_bytes = self.block_bytes // len(self._parts)
        return min(len(self._parts), max(1, PORTION_BYTES // (count * part_bytes)))

    def _scattered(self, spans: list[slice], count: int) -> bool:
        piece_bytes = self.block_bytes * count // (len(self._parts) * len(spans))
        return len(spans) > 1 and piece_bytes < SMALL_BYTES


def _places(parts: list[Words], stage: Words, count: int) -> Portion:
    """Where in a stage so many blocks of each part lie."""
    rows = zip(parts, stage, strict=False)
    return [row[: count * part.shape[1]].reshape(count, part.shape[1]) for part, row in rows]


class DeviceBlocks:
    """A cache on a GPU. Copies have a stream of their own, so that they wait for no step and no step for them.

    A block is lent once the step that filled it has landed, and stored to before any step knows of it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        # As words: torch neither picks out nor stores numbers of eight bits.
        self._parts = [tensor.flatten(1).view(torch.int64) for tensor in tensors]
        self.block_bytes = sum(part[0].nbytes for part in self._parts)
        self.near: SameGpuMemory | None = card_of(tensors)
        self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    @torch.inference_mode()
    def lend(self, blocks: Sequence[int]) -> Iterator[Portion]:
        staged = self._stage(len(blocks))
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._parts[0].device)
            for part, stage in zip(self._parts, staged, strict=True):
                stage.copy_(part.index_select(0, index), non_blocking=True)
            self._stream.synchronize()
        return iter([[words_of(stage) for stage in staged]])

    def room(self, blocks: Sequence[int]) -> Iterator[Portion]:
        staged = self._stage(len(blocks))
        yield [words_of(stage) for stage in staged]
        self._store(blocks, staged)

    @torch.inference_mode()
    def _store(self, blocks: Sequence[int], staged: list[torch.Tensor]) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._parts[0].device)
            for part, stage in zip(self._parts, staged, strict=True):
                part.index_copy_(0, index, stage.to(part.device, non_blocking=True))
            self._stream.synchronize()

    def _stage(self, count: int) -> list[torch.Tensor]:
        return [torch.empty((count, part.shape[1]), dtype=part.dtype, pin_memory=True) for part in self._parts]


def words_of(tensor: torch.Tensor) -> Words:
    """The memory of a tensor on the host, `[blocks, words]`."""
    assert tensor.is_contiguous() and tensor[0].nbytes % 8 == 0
    words: Words = tensor.flatten(1).view(torch.uint8).numpy().view(np.uint64)
    return words


def runs(blocks: Sequence[int]) -> Iterator[slice]:
    """Neighbours together: most sequences get blocks that follow each other."""
    start = stop = blocks[0]
    for block in blocks:
        if block != stop:
            yield slice(start, stop)
            start = block
        stop = block + 1
    yield slice(start, stop)


def fingerprint(files: Iterable[Path]) -> str:
    """Tells checkpoints apart by samples of their bytes; the same files anywhere have the same."""
    digest = blake2b(digest_size=8)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(size * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
