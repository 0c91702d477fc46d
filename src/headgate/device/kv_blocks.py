"""KV blocks as bytes, for transfers: read directly from the cache on a CPU, through pinned memory on a GPU.

The backend defines what is inside a block. Engines exchange blocks only if the names of their layouts are equal. For
transfers between engines on the same GPU see `same_gpu.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from headgate.device.same_gpu import same_gpu_cache
from headgate.layers.backend import KV, Backend
from headgate.layers.expert_record import ExpertRecord
from headgate.transfer.transport import BlockMemory, Portion, SameGpuMemory, Words

SAMPLES, SAMPLE_BYTES = 64, 4096
SMALL_BYTES = 32 * 2**10  # pieces below this size: the fixed cost per piece exceeds the cost of copying it
PORTION_BYTES = 512 * 2**10  # small enough to stay in a core's cache while it is processed


def block_memory(kv: list[KV], backend: Backend, model: str, record: ExpertRecord | None = None) -> BlockMemory:
    """The cache of all layers, and `record`. `model` distinguishes checkpoints whose caches have the same shape."""
    layout = layout_name(kv, backend, model)
    tensors = [cache for layer in kv for cache in layer]
    if record is not None:
        layout += f", experts {record.ids.dtype} {list(record.ids.shape[1:])}"
        tensors.append(record.ids)
    return HostBlocks(tensors, layout) if backend.device.type == "cpu" else DeviceBlocks(tensors, layout)


def layout_name(kv: list[KV], backend: Backend, model: str) -> str:
    shapes = " ".join(f"{cache.dtype} {list(cache.shape[1:])}" for cache in kv[0])
    return f"{backend.kv_layout}, {backend.dtype}, {len(kv)} x {shapes}, {model}"


class HostBlocks:
    """A cache in host memory. Blocks are read in place, or copied if they are scattered in many small pieces."""

    same_gpu: SameGpuMemory | None = None

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
                np.take(part, index, axis=0, out=words, mode="clip")  # mode="clip" needs no temporary buffer
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
        """Groups of parts that form one portion each, for `count` blocks."""
        step = self._at_once(count)
        for start in range(0, len(self._parts), step):
            yield self._parts[start : start + step]

    def _stage(self, count: int) -> Words:
        """Staging memory for a portion, reused for all of them: fresh pages would cost as much as copying to them."""
        return np.empty((self._at_once(count), count * max(part.shape[1] for part in self._parts)), np.uint64)

    def _at_once(self, count: int) -> int:
        part_bytes = self.block_bytes // len(self._parts)
        return min(len(self._parts), max(1, PORTION_BYTES // (count * part_bytes)))

    def _scattered(self, spans: list[slice], count: int) -> bool:
        piece_bytes = self.block_bytes * count // (len(self._parts) * len(spans))
        return len(spans) > 1 and piece_bytes < SMALL_BYTES


def _places(parts: list[Words], stage: Words, count: int) -> Portion:
    """Views of `stage` for `count` blocks of each part."""
    rows = zip(parts, stage, strict=False)
    return [row[: count * part.shape[1]].reshape(count, part.shape[1]) for part, row in rows]


class DeviceBlocks:
    """A cache on a GPU. Copies run on a separate stream, so that copies and steps do not wait for each other.

    A block is lent after the step that filled it has landed, and written before any step uses it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        # As 64-bit words, because torch can neither gather nor scatter 8-bit numbers.
        self._parts = [tensor.flatten(1).view(torch.int64) for tensor in tensors]
        self.block_bytes = sum(part[0].nbytes for part in self._parts)
        self.same_gpu: SameGpuMemory | None = same_gpu_cache(tensors)
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
    """Ranges of consecutive blocks. Most sequences get consecutive blocks."""
    start = stop = blocks[0]
    for block in blocks:
        if block != stop:
            yield slice(start, stop)
            start = block
        stop = block + 1
    yield slice(start, stop)


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of samples of the files' bytes, which distinguishes checkpoints. It is the same on every machine."""
    digest = blake2b(digest_size=8)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(size * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
