"""The first and the last kernel of a step.

The first fills the tensors of a batch from the rows; the last draws tokens from logits and appends them to the rows.
Both read and write fixed addresses only, so that a graph can contain them. The input of a decode step is `COLUMNS`
columns of int64, with one entry per slice: its row (negative for padding), the position of its token, the block that
is appended to its block table at that position (negative for none), the bits of two float32, and the key of its random
stream. The lower half of the bits is the temperature. The upper half is the factor of the logits whose softmax gives the
log-probability of the token, or 0 if that is not requested. The last column is a permutation: the order in which
attention processes slices (see `Batch.order`).

If slices may have several tokens, there are `MIXED_COLUMNS` columns: the row, the position of the first token, the
number of tokens, their start in the batch; the row again if the slice samples (negative if not), the position of the
last token; then temperature and factor, key and order as above. Padding has no tokens, and starts where the last slice
ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headgate.layers.batch import Batch
from headgate.layers.triton.draw import Finalists, find_finalists, normaliser_of, winner_of
from headgate.layers.triton.launch import launch

COLUMNS, MIXED_COLUMNS, CLOSING_COLUMN = 6, 9, 4
TABLE_CHUNK, TOKEN_CHUNK = 512, 256


@dataclass(frozen=True, slots=True)
class Paging:
    """The state of every row on the device."""

    tokens: torch.Tensor  # [rows, positions] int32
    tables: torch.Tensor  # [rows, blocks] int32
    block_size: int


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """How to draw the next token of each slice, as set by `open_step`."""

    temperatures: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S] int64
    factors: torch.Tensor  # [S] float32; 0: no log-probability


def open_step(columns: torch.Tensor, paging: Paging, batch: Batch, draw_inputs: DrawInputs) -> None:
    """Fill `batch` and `draw_inputs` from `columns` [COLUMNS, S] and the rows; append new blocks to block tables."""
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
        draw_inputs.temperatures,
        draw_inputs.keys,
        draw_inputs.factors,
        columns.shape[1],
        paging.tokens.stride(0),
        paging.tables.stride(0),
        batch.block_tables.stride(0),
        BLOCK_SIZE=paging.block_size,
        CHUNK=TABLE_CHUNK,
        num_warps=4,
    )


def open_mixed_step(
    columns: torch.Tensor, paging: Paging, batch: Batch, draw_inputs: DrawInputs, last: torch.Tensor
) -> None:
    """Like `open_step`, from `columns` [MIXED_COLUMNS, S]. Sets `last` [S] to each slice's last token's index."""
    assert batch.order is not None
    slices, tokens = columns.shape[1], len(batch.tokens)
    launch(
        open_slices_kernel,
        (slices,),
        columns,
        paging.tables,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.order,
        draw_inputs.temperatures,
        draw_inputs.keys,
        draw_inputs.factors,
        last,
        slices,
        paging.tables.stride(0),
        batch.block_tables.stride(0),
        BLOCK_SIZE=paging.block_size,
        CHUNK=TABLE_CHUNK,
        num_warps=4,
    )
    launch(
        open_tokens_kernel,
        (triton.cdiv(tokens, TOKEN_CHUNK),),
        columns,
        paging.tokens,
        paging.tables,
        batch.tokens,
        batch.positions,
        batch.slots,
        tokens,
        slices,
        paging.tokens.stride(0),
        paging.tables.stride(0),
        BLOCK_SIZE=paging.block_size,
        CHUNK=TOKEN_CHUNK,
        HALVINGS=slices.bit_length(),
        num_warps=4,
    )


def close_step(
    columns: torch.Tensor,
    paging: Paging,
    logits: torch.Tensor,
    draw_inputs: DrawInputs,
    finalists: Finalists,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
) -> None:
    """Draw a token per slice into `tokens` [S], and append it to its row. Its log-probability goes to `logprobs` [S]."""
    find_finalists(logits, draw_inputs.temperatures, draw_inputs.keys, draw_inputs.factors, finalists)
    launch(
        close_kernel,
        (len(logits),),
        columns,
        paging.tokens,
        logits,
        draw_inputs.factors,
        finalists.sums,
        finalists.ids,
        finalists.peaks,
        finalists.masses,
        tokens,
        logprobs,
        len(logits),
        logits.stride(0),
        paging.tokens.stride(0),
        finalists.chunks,
        PADDED=triton.next_power_of_2(finalists.chunks),
        num_warps=1,
    )


@triton.jit
def store_draw_inputs(columns, index, slices, temperatures, keys, factors, order):
    """Store the last three columns, which all kinds of steps have."""
    bits = tl.load(columns + index)
    tl.store(temperatures + index, bits.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(factors + index, (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(keys + index, tl.load(columns + slices + index))
    tl.store(order + index, tl.load(columns + 2 * slices + index).to(tl.int32))


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
    factors,
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
    store_draw_inputs(columns + 3 * slices, index, slices, temperatures, keys, factors, order)
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
            # The last entry is not read, because another thread may be writing it; `block` has its value.
            tl.store(table + entry, tl.where(entry == last, block.to(tl.int32), blocks), mask=entry <= last)


@triton.jit(do_not_specialize=["slices"])
def close_kernel(
    columns,
    row_tokens,
    logits,
    factors,
    sums,
    ids,
    peaks,
    masses,
    tokens,
    logprobs,
    slices,
    stride,
    token_stride,
    chunks,
    PADDED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = winner_of(sums, ids, index, chunks, PADDED)
    tl.store(tokens + index, token.to(tl.int64))
    factor = tl.load(factors + index)
    if factor > 0:
        logit = tl.load(logits + index * stride + token).to(tl.float32)
        tl.store(logprobs + index, logit * factor - normaliser_of(peaks, masses, index, chunks, PADDED))
    row = tl.load(columns + index)
    position = tl.load(columns + slices + index)
    tl.store(row_tokens + row * token_stride + position + 1, token, mask=row >= 0)


@triton.jit(do_not_specialize=["slices"])
def open_slices_kernel(
    columns,
    row_tables,
    query_starts,
    contexts,
    tables,
    order,
    temperatures,
    keys,
    factors,
    last,
    slices,
    row_table_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(columns + index)
    position = tl.load(columns + slices + index)
    count = tl.load(columns + 2 * slices + index)
    start = tl.load(columns + 3 * slices + index)
    store_draw_inputs(columns + 6 * slices, index, slices, temperatures, keys, factors, order)
    tl.store(query_starts + index, start.to(tl.int32))
    # The end of this slice. For all but the last slice, the next slice stores the same value as its start.
    tl.store(query_starts + index + 1, (start + count).to(tl.int32))
    tl.store(last + index, tl.maximum(start + count - 1, 0))
    context = tl.where(row < 0, 0, position + count)
    tl.store(contexts + index, context.to(tl.int32))
    table = tables + index.to(tl.int64) * table_stride
    blocks = tl.cdiv(context, BLOCK_SIZE)
    for first in range(0, blocks, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        known = entry < blocks
        tl.store(table + entry, tl.load(row_tables + row * row_table_stride + entry, mask=known, other=0), mask=known)


@triton.jit(do_not_specialize=["count", "slices"])
def open_tokens_kernel(
    columns,
    row_tokens,
    row_tables,
    tokens,
    positions,
    slots,
    count,
    slices,
    token_stride,
    row_table_stride,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    starts = columns + 3 * slices
    total = tl.load(starts + slices - 1) + tl.load(columns + 3 * slices - 1)
    # Find the last slice that starts at or before the token, by binary search.
    low, high = tl.zeros_like(index), tl.zeros_like(index) + slices
    for _ in tl.static_range(HALVINGS):
        middle = (low + high) // 2
        before = tl.load(starts + middle, mask=middle < slices, other=2**40) <= index
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    real = (index < count) & (index < total)
    row = tl.load(columns + low, mask=real, other=0)
    offset = index - tl.load(starts + low, mask=real, other=0)
    position = tl.load(columns + slices + low, mask=real, other=0) + offset
    token = tl.load(row_tokens + row * token_stride + position, mask=real, other=0)
    block = tl.load(row_tables + row * row_table_stride + position // BLOCK_SIZE, mask=real, other=0)
    inside = index < count
    tl.store(tokens + index, tl.where(real, token, 0).to(tl.int64), mask=inside)
    tl.store(positions + index, tl.where(real, position, 0), mask=inside)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + index, tl.where(real, slot, -1), mask=inside)
