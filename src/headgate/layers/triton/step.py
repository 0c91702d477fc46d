"""The two ends of a decode step on the device: from rows to the tensors of a batch, and from logits back to rows.

Both read and write fixed addresses only, so that a graph can hold them. What a step tells the device is `COLUMNS`
columns of int64, one entry per slice: its row (negative is padding), the position of its token, the block that its
table grows by at that position (negative is none), the bits of its temperature, and the key of its random stream; and,
not of the slice but of the place, which slice attention takes there (see `Batch.order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headgate.layers.batch import Batch
from headgate.layers.triton.draw import Finalists, find_finalists, winner_of
from headgate.layers.triton.launch import launch

COLUMNS = 6
TABLE_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Paging:
    """What the device remembers of every row."""

    tokens: torch.Tensor  # [rows, positions] int32
    tables: torch.Tensor  # [rows, blocks] int32
    block_size: int


@dataclass(frozen=True, slots=True)
class Told:
    """Of each slice, as `open_step` leaves it: how to draw its next token."""

    temperatures: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S] int64


def open_step(columns: torch.Tensor, paging: Paging, batch: Batch, told: Told) -> None:
    """Fill `batch` and `told` from `columns` [COLUMNS, S] and the rows; lengthen the tables that grow."""
    assert batch.order is not None
    launch(
        open_kernel,
        (columns.shape[1],),
        columns,
        paging.tokens,
        paging.tables,
        batch.tokens,
        batch.positions,
        batch.slots,
        batch.context_lens,
        batch.block_tables,
        batch.order,
        told.temperatures,
        told.keys,
        columns.shape[1],
        paging.tokens.stride(0),
        paging.tables.stride(0),
        batch.block_tables.stride(0),
        BLOCK_SIZE=paging.block_size,
        CHUNK=TABLE_CHUNK,
        num_warps=4,
    )


def close_step(
    columns: torch.Tensor,
    paging: Paging,
    logits: torch.Tensor,
    told: Told,
    finalists: Finalists,
    tokens: torch.Tensor,
) -> None:
    """Draw a token per slice into `tokens` [S], and append it to its row."""
    find_finalists(logits, told.temperatures, told.keys, finalists)
    launch(
        close_kernel,
        (len(logits),),
        columns,
        paging.tokens,
        finalists.sums,
        finalists.ids,
        tokens,
        len(logits),
        paging.tokens.stride(0),
        finalists.chunks,
        PADDED=triton.next_power_of_2(finalists.chunks),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["slices"])
def open_kernel(
    columns,
    row_tokens,
    row_tables,
    tokens,
    positions,
    slots,
    contexts,
    tables,
    order,
    temperatures,
    keys,
    slices,
    token_stride,
    row_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(columns + index)
    position = tl.load(columns + slices + index)
    grown = tl.load(columns + 2 * slices + index)
    tl.store(temperatures + index, tl.load(columns + 3 * slices + index).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(keys + index, tl.load(columns + 4 * slices + index))
    tl.store(order + index, tl.load(columns + 5 * slices + index).to(tl.int32))
    if row < 0:
        tl.store(tokens + index, 0)
        tl.store(positions + index, 0)
        tl.store(slots + index, -1)
        tl.store(contexts + index, 0)
    else:
        last = position // BLOCK_SIZE
        row_table = row_tables + row * row_table_stride
        block = grown
        if grown >= 0:
            tl.store(row_table + last, grown.to(tl.int32))
        else:
            block = tl.load(row_table + last).to(tl.int64)
        tl.store(tokens + index, tl.load(row_tokens + row * token_stride + position).to(tl.int64))
        tl.store(positions + index, position)
        tl.store(slots + index, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(contexts + index, (position + 1).to(tl.int32))
        table = tables + index.to(tl.int64) * table_stride
        for first in range(0, last + 1, CHUNK):
            entry = first + tl.arange(0, CHUNK)
            blocks = tl.load(row_table + entry, mask=entry < last, other=0)
            # The last entry may just have been written by another thread.
            tl.store(table + entry, tl.where(entry == last, block.to(tl.int32), blocks), mask=entry <= last)


@triton.jit(do_not_specialize=["slices"])
def close_kernel(columns, row_tokens, sums, ids, tokens, slices, token_stride, chunks, PADDED: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = winner_of(sums, ids, index, chunks, PADDED)
    tl.store(tokens + index, token.to(tl.int64))
    row = tl.load(columns + index)
    position = tl.load(columns + slices + index)
    tl.store(row_tokens + row * token_stride + position + 1, token, mask=row >= 0)
