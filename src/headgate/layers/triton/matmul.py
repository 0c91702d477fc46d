"""Our own matrix products, used in two cases.

One is a few rows, where reading weights takes all the time. The other is deterministic mode, with any number of rows,
where a row's bits must not depend on the number of rows.

A program owns some rows of the matrix and iterates over their columns, so every weight is read once, in order, and no
two programs add to the same number. The gate of an MLP is applied in the same program that computes its two halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headgate.layers.backend import Activation, Matrix
from headgate.layers.triton.elementwise import activated
from headgate.layers.triton.launch import launch, overlap, wait_for_previous

MAX_ROWS = 16
# Reading a matrix of at most `SMALL` numbers takes no longer than a launch; for such a matrix, our product is faster
# than the library's up to `MAX_ROWS_SMALL` rows.
SMALL, MAX_ROWS_SMALL = 7 * 2**20, 64
# A narrower product has too few programs to keep the device busy.
MIN_WIDTH = 2048
# Numbers of programs that keep the device busy.
BUSY, VERY_BUSY = 96, 200


@dataclass(frozen=True, slots=True)
class Cut:
    """The tiling of a product: rows of the matrix and of `x` per program, and columns per iteration."""

    rows: int
    columns: int
    warps: int
    stages: int
    tokens: int = MAX_ROWS


def cut_for(count: int, rows: int, columns: int, gated: bool) -> Cut:
    """Return the tiling that `benchmarks/gpu/kernels.py` found fastest on an H200."""
    if count > MAX_ROWS:
        return Cut(64, 64 if gated else 128, 4, 4, tokens=32)
    if gated:
        return Cut(32, 128, 4, 3) if rows > 8192 else Cut(32, 256, 4, 5)
    return Cut(64, 256, 4, 5) if columns > 2048 else Cut(32, 128, 4, 5)


def invariant_cut(count: int, rows: int, dtype: torch.dtype, roomy: bool = True) -> Cut:
    """Return one of a few tilings that all sum in the same order.

    They do because they use the same matrix instruction, of 64 rows by 16 columns. The largest tiling needs the
    shared memory of `roomy` devices; the others fit in 99 KiB.
    """
    if dtype == torch.float32:
        return Cut(64, 32, 4, 2, tokens=16 if count <= 16 else 64)
    if count <= MAX_ROWS:
        return Cut(64, 128, 4, 5)
    if roomy and programs(count, rows, LARGE) >= VERY_BUSY:
        return LARGE
    # The largest tiling that is at least half full and keeps the device busy.
    return next((cut for cut in (WIDE, MIDDLE) if programs(count, rows, cut) >= BUSY), NARROW)


LARGE = Cut(128, 64, 8, 4, tokens=256)
WIDE = Cut(64, 64, 8, 4, tokens=128)
MIDDLE, NARROW = Cut(64, 128, 4, 4, tokens=64), Cut(64, 128, 4, 4, tokens=32)


def programs(count: int, rows: int, cut: Cut) -> int:
    """The number of programs with this tiling, not counting those that are mostly padding."""
    return -(-rows // cut.rows) * ((count + cut.tokens // 2) // cut.tokens)


def small_linear(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    *,
    gated: Activation | None = None,
    cut: Cut | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ matrix.T + bias` of contiguous rows; with `gated`, the activation of the first half times the second half."""
    count, columns = x.shape
    rows = matrix.rows // 2 if gated else matrix.rows
    cut = cut or cut_for(count, rows, columns, gated is not None)
    out = x.new_empty(count, rows, dtype=out_dtype or x.dtype)
    launch(
        linear_kernel,
        (triton.cdiv(rows, cut.rows), triton.cdiv(count, cut.tokens)),
        x,
        matrix.data,
        matrix.data if bias is None else bias,
        matrix.data if matrix.scale is None else matrix.scale,
        out,
        count,
        rows,
        COLUMNS=columns,
        BIASED=bias is not None,
        SCALED=matrix.scale is not None,
        GATED=gated is not None,
        GELU=gated == "gelu_tanh",
        TOKENS=cut.tokens,
        ROWS=cut.rows,
        STEP=cut.columns,
        PRECISION="ieee",
        num_warps=cut.warps,
        num_stages=cut.stages,
        **overlap(x),
    )
    return out


def vector_cut(columns: int) -> Cut:
    if columns <= 1024:
        return Cut(2, max(triton.next_power_of_2(columns), 16), 4, 1)
    return Cut(2, 2048, 8 if columns <= 2048 else 4, 1)


def vector_linear(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    *,
    gated: Activation | None = None,
    cut: Cut | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Like `small_linear`, for a single row: no matrix units, and all of a program's loads in flight at once."""
    columns = x.shape[1]
    rows = matrix.rows // 2 if gated else matrix.rows
    cut = cut or vector_cut(columns)
    out = x.new_empty(1, rows, dtype=out_dtype or x.dtype)
    launch(
        vector_linear_kernel,
        (triton.cdiv(rows, cut.rows),),
        x,
        matrix.data,
        matrix.data if bias is None else bias,
        matrix.data if matrix.scale is None else matrix.scale,
        out,
        rows,
        COLUMNS=columns,
        BIASED=bias is not None,
        SCALED=matrix.scale is not None,
        GATED=gated is not None,
        GELU=gated == "gelu_tanh",
        ROWS=cut.rows,
        STEP=cut.columns,
        num_warps=cut.warps,
        **overlap(x),
    )
    return out


@triton.jit
def vector_linear_kernel(
    x,
    weight,
    bias,
    scale,
    out,
    rows,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned = row < rows
    sums = tl.zeros([ROWS, STEP], tl.float32)
    gated_sums = tl.zeros([ROWS, STEP], tl.float32)
    at = weight + row[:, None].to(tl.int64) * COLUMNS
    for first in tl.static_range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < COLUMNS
        mask = owned[:, None] & inside[None, :]
        w = tl.load(at + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_at = at + rows.to(tl.int64) * COLUMNS
            u = tl.load(up_at + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if first == 0:
            wait_for_previous(PDL)  # the first weights are already being loaded
        numbers = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums += w.to(tl.float32) * numbers
        if GATED:
            gated_sums += u.to(tl.float32) * numbers
    acc = tl.sum(sums, 1)
    if SCALED:
        acc *= tl.load(scale + row, mask=owned, other=0.0)
    if BIASED:
        acc += tl.load(bias + row, mask=owned, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(gated_sums, 1)
        if SCALED:
            other *= tl.load(scale + rows + row, mask=owned, other=0.0)
        if BIASED:
            other += tl.load(bias + rows + row, mask=owned, other=0.0).to(tl.float32)
        acc = activated(acc, GELU) * other
    tl.store(out + row, acc.to(out.dtype.element_ty), mask=owned)


@triton.jit(do_not_specialize=["count"])
def linear_kernel(
    x,
    weight,
    bias,
    scale,
    out,
    count,
    rows,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    owned = row < rows
    weight_at = weight + row[:, None].to(tl.int64) * COLUMNS
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    other = tl.zeros([ROWS, TOKENS], tl.float32)
    wait_for_previous(PDL)
    for first in range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < COLUMNS
        mask = owned[:, None] & inside[None, :]
        w = tl.load(weight_at + column[None, :], mask=mask, other=0.0)
        taken = inside[:, None] & (token < count)[None, :]
        rows_in = tl.load(x + token[None, :] * COLUMNS + column[:, None], mask=taken, other=0.0)
        acc = tl.dot(w.to(rows_in.dtype), rows_in, acc, input_precision=PRECISION)
        if GATED:
            u = tl.load(weight_at + rows.to(tl.int64) * COLUMNS + column[None, :], mask=mask, other=0.0)
            other = tl.dot(u.to(rows_in.dtype), rows_in, other, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scale + row, mask=owned, other=0.0)[:, None]
        if GATED:
            other *= tl.load(scale + rows + row, mask=owned, other=0.0)[:, None]
    if BIASED:
        acc += tl.load(bias + row, mask=owned, other=0.0).to(tl.float32)[:, None]
        if GATED:
            other += tl.load(bias + rows + row, mask=owned, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activated(acc, GELU) * other
    mask = owned[:, None] & (token < count)[None, :]
    tl.store(out + token[None, :] * rows + row[:, None], acc.to(out.dtype.element_ty), mask=mask)
