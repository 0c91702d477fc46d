"""Norms and gates: one pass over memory, one program per row or part of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.backend import Activation
from headgate.layers.triton.launch import launch, overlap, wait_for_previous

GATE_BLOCK = 1024


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` into `residual`, in place, and return the norm of the sum. Both are contiguous, `[rows, columns]`."""
    return launch_norm(x, residual, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each row of `x`, `[rows, columns]` with contiguous columns."""
    return launch_norm(x, None, weight, eps)


def launch_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = x.shape
    out = x.new_empty(rows, columns)
    if rows:
        block = triton.next_power_of_2(columns)
        launch(
            rms_norm_kernel,
            (rows,),
            x,
            x if residual is None else residual,
            weight,
            out,
            columns,
            x.stride(0),
            eps,
            ADDED=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **overlap(x),
        )
    return out


def gate_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`activation(gate) * up` of contiguous `[rows, gate and up side by side]`."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    if rows:
        grid = (rows, triton.cdiv(columns, GATE_BLOCK))
        gelu = activation == "gelu_tanh"
        launch(gate_mul_kernel, grid, gate_up, out, columns, GELU=gelu, BLOCK=GATE_BLOCK, num_warps=4, **overlap(out))
    return out


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, columns, stride, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    scales = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    wide = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        wide += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        # The norm is computed from the rounded value that the residual stream holds.
        held = wide.to(residual.dtype.element_ty)
        tl.store(residual + at, held, mask=inside)
        wide = held.to(tl.float32)
    wide *= 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    scaled = times_weight(wide, scales, out.dtype.element_ty)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def times_weight(normed, weight, dtype: tl.constexpr):
    """Multiply what a norm gives by its weight, which is rounded to `dtype` first unless the weight is wider."""
    if weight.dtype == tl.float32:
        return normed * weight
    return normed.to(dtype).to(tl.float32) * weight


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """`silu`, or `gelu` in its `tanh` approximation."""
    x = gate
    if GELU:
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-x))


@triton.jit
def gate_mul_kernel(gate_up, out, columns, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (activated(gate, GELU) * up).to(out.dtype.element_ty), mask=inside)
