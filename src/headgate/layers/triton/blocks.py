"""Copies whole KV blocks between the cache of all layers and one buffer, in one launch.

The cache has one tensor, a *part*, for the keys and one for the values of each layer; the buffer is
`[parts, capacity, words]`. Each program copies one part of one block and sums the words that it has copied, as a
checksum. Data is read only once, so the sum covers exactly the words that were written, even if another process
writes to the source at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from headgate.layers.triton.launch import launch

CHUNK = 1024


def gather_blocks(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Fill `place` `[parts, blocks, words]` with blocks of `parts` `[*, words]`.

    Returns the sum of the words of each block of each part.
    """
    return copy_blocks(parts, index, place, gather=True)


def scatter_blocks(parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Fill blocks of `parts` from `place`. Returns the sum of the words of each block of each part."""
    return copy_blocks(parts, index, place, gather=False)


def copy_blocks(
    parts: Sequence[torch.Tensor], index: torch.Tensor, place: torch.Tensor, *, gather: bool
) -> torch.Tensor:
    assert place.stride(1) == place.shape[2] and place.stride(2) == 1 and place.dtype == torch.int64
    # Addresses are read each time, because memory that was released during sleep has new ones.
    addresses = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64).to(place.device)
    sums = torch.empty(place.shape[:2], dtype=torch.int64, device=place.device)
    launch(
        copy_kernel,
        (place.shape[1], place.shape[0]),
        place,
        addresses,
        index,
        sums,
        place.stride(0),
        WORDS=place.shape[2],
        GATHER=gather,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return sums


@triton.jit
def copy_kernel(
    place, addresses, index, sums, part_stride, WORDS: tl.constexpr, GATHER: tl.constexpr, CHUNK: tl.constexpr
):
    block, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    address = tl.load(addresses + part).to(tl.pointer_type(tl.int64))
    cache = tl.multiple_of(address, 16) + tl.load(index + block) * WORDS  # torch aligns allocations to at least this
    piece = place + part * part_stride + block * WORDS
    total = tl.zeros([CHUNK], dtype=tl.int64)
    for start in range(0, WORDS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < WORDS
        if GATHER:
            values = tl.load(cache + at, mask=inside, other=0)
            tl.store(piece + at, values, mask=inside)
        else:
            values = tl.load(piece + at, mask=inside, other=0)
            tl.store(cache + at, values, mask=inside)
        total += values
    tl.store(sums + part * tl.num_programs(0) + block, tl.sum(total, 0))
