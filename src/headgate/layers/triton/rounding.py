"""Rounds rows to eight bits (e4m3), with a scale per row that maps the row's largest number to the e4m3 maximum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.formats import FP8, FP8_LARGEST, FP8_LEAST_SCALE
from headgate.layers.triton.launch import launch, overlap, wait_for_previous

LARGEST = tl.constexpr(FP8_LARGEST)
LEAST = tl.constexpr(FP8_LEAST_SCALE)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the rows of `x` to eight bits; returns the rounded numbers and the scale of each row.

    Rounds like `formats.fp8_rows`, in one kernel; used for activations.
    """
    rows, columns = x.shape
    numbers, scale = torch.empty_like(x, dtype=FP8), torch.empty(rows, device=x.device)
    block = triton.next_power_of_2(columns)
    launch(
        round_rows_kernel,
        (rows,),
        x,
        numbers,
        scale,
        columns,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **overlap(x),
    )
    return numbers, scale


@triton.jit
def round_rows_kernel(x, numbers, scale, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    values = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, LEAST)
    tl.store(scale + row, largest)
    tl.store(numbers + row * columns + column, to_stored(values / largest, numbers), mask=column < columns)


@triton.jit
def to_stored(values, where):
    """Convert to the type that `where` points to.

    The eight-bit type has no infinity, so values are clamped to its largest number. NaN stays NaN: if it were
    clamped, the error would go unnoticed.
    """
    if where.dtype.element_ty == tl.float8e4nv:
        wide = values.to(tl.float32)
        values = tl.where(wide == wide, tl.minimum(tl.maximum(wide, -LARGEST), LARGEST), wide)
    return values.to(where.dtype.element_ty)
