"""KV blocks as bytes, for transfers: straight from the cache on a CPU, through pinned memory on a GPU.

What is inside a block is its backend's business; engines exchange blocks only if the names of their layouts are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from headgate.layers.backend import KV, Backend
from headgate.transfer.transport import BlockMemory, Parts, Words

SAMPLES, SAMPLE_BYTES = 64, 4096
SMALL_BYTES = 32 * 2**10  # of a piece: what is done once for each costs more than copying it


def block_memory(kv: list[KV], backend: Backend, model: str) -> BlockMemory:
    """The cache of all layers; `model` tells checkpoints apart whose caches look alike."""
    layout = layout_name(kv, backend, model)
    tensors = [cache for layer in kv for cache in layer]
    return HostBlocks(tensors, layout) if backend.device.type == "cpu" else DeviceBlocks(tensors, layout)


def layout_name(kv: list[KV], backend: Backend, model: str) -> str:
    shapes = " ".join(str(list(cache.shape[1:])) for cache in kv[0])
    return f"{backend.kv_layout}, {backend.dtype}, {len(kv)} x {shapes}, {model}"


class HostBlocks:
    """A cache in the memory of this process. Nothing is copied, but what lies in so many small pieces that it pays."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        self._parts = [words_of(tensor) for tensor in tensors]
        self.block_bytes = sum(part[0].nbytes for part in self._parts)

    def lend(self, blocks: Sequence[int]) -> Parts:
        if self._scattered(spans := list(runs(blocks)), len(blocks)):
            return [[part[list(blocks)]] for part in self._parts]
        return self._in_place(spans)

    def room(self, blocks: Sequence[int]) -> Parts:
        if self._scattered(spans := list(runs(blocks)), len(blocks)):
            return [[np.empty((len(blocks), part.shape[1]), part.dtype)] for part in self._parts]
        return self._in_place(spans)

    def store(self, blocks: Sequence[int], parts: Parts) -> None:
        if self._scattered(list(runs(blocks)), len(blocks)):
            for part, (words,) in zip(self._parts, parts, strict=True):
                part[list(blocks)] = words

    def _in_place(self, spans: list[slice]) -> Parts:
        return [[part[span] for span in spans] for part in self._parts]

    def _scattered(self, spans: list[slice], count: int) -> bool:
        piece_bytes = self.block_bytes * count // (len(self._parts) * len(spans))
        return len(spans) > 1 and piece_bytes < SMALL_BYTES


class DeviceBlocks:
    """A cache on a GPU. Copies have a stream of their own, so that they wait for no step and no step for them.

    A block is lent once the step that filled it has landed, and stored to before any step knows of it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        self.layout = layout
        self._tensors = tensors
        self.block_bytes = sum(tensor[0].nbytes for tensor in tensors)
        self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    @torch.inference_mode()
    def lend(self, blocks: Sequence[int]) -> Parts:
        staged = self._stage(len(blocks))
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._tensors[0].device)
            for tensor, stage in zip(self._tensors, staged, strict=True):
                stage.copy_(tensor.index_select(0, index), non_blocking=True)
            self._stream.synchronize()
        return [[words_of(stage)] for stage in staged]

    def room(self, blocks: Sequence[int]) -> Parts:
        return [[words_of(stage)] for stage in self._stage(len(blocks))]

    @torch.inference_mode()
    def store(self, blocks: Sequence[int], parts: Parts) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self._tensors[0].device)
            for tensor, (words,) in zip(self._tensors, parts, strict=True):
                staged = (
                    torch.from_numpy(words.view(np.uint8)).view(tensor.dtype).view(len(blocks), *tensor.shape[1:])
                )
                tensor.index_copy_(0, index, staged.to(tensor.device, non_blocking=True))
            self._stream.synchronize()

    def _stage(self, count: int) -> list[torch.Tensor]:
        return [
            torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True) for tensor in self._tensors
        ]


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
