"""Norms and rotates queries and keys, and writes keys and values to the paged cache.

One program handles one KV head of one token. The cache is `[blocks, kv heads, block_size, head size]`. Queries are
rotated in place. A token with a negative slot is padding: it is rotated but not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.backend import KV, Heads, Rotary
from headgate.layers.triton.elementwise import times_weight
from headgate.layers.triton.launch import launch, overlap, wait_for_previous
from headgate.layers.triton.rounding import to_stored


def rope_and_write(
    qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rotary: Rotary, kv: KV, heads: Heads
) -> torch.Tensor:
    """Norm and rotate queries and keys, and write keys and values to `kv`.

    Returns queries `[T, heads, size]`, a view of `qkv`.
    """
    group, count = heads.query // heads.kv, len(qkv)
    if count:
        launch(
            rope_and_write_kernel,
            (heads.kv, count),
            qkv,
            positions,
            slots,
            rotary.cos,
            rotary.sin,
            rotary.cos if rotary.q_norm is None else rotary.q_norm,
            rotary.cos if rotary.k_norm is None else rotary.k_norm,
            kv.k,
            kv.v,
            rotary.eps,
            NORMED=rotary.q_norm is not None,
            ROTATED=rotary.cos.shape[1],
            BLOCK_SIZE=kv.k.shape[2],
            KV_HEADS=heads.kv,
            GROUP=group,
            ROWS=triton.next_power_of_2(group),
            SIZE=heads.size,
            HALF=triton.next_power_of_2(heads.size // 2),
            num_warps=1,
            **overlap(qkv),
        )
    return qkv.view(count, -1, heads.size)[:, : heads.query]


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_and_write_kernel(
    qkv,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    eps,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    inside = column < SIZE // 2
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    # The dimensions that one column of the tile handles: a pair that is rotated, or two that are not.
    is_rotated = column < ROTATED // 2
    one, other = column, column + SIZE // 2
    if ROTATED < SIZE:
        one = tl.where(is_rotated, column, column + ROTATED // 2)
        other = tl.where(is_rotated, column + ROTATED // 2, column + SIZE // 2)
    c = tl.load(cos + position * ROTATED + column, mask=is_rotated, other=1.0)
    s = tl.load(sin + position * ROTATED + column, mask=is_rotated, other=0.0)
    in_token = qkv + token * ((GROUP + 2) * KV_HEADS * SIZE)
    wait_for_previous(PDL)

    query_at = in_token + (head * GROUP + row) * SIZE
    is_query = inside & (row < GROUP)
    first, second = load_normed(query_at, q_norm, one, other, is_query, inside, eps, NORMED, SIZE)
    tl.store(query_at + one, (first * c - second * s).to(qkv.dtype.element_ty), mask=is_query)
    tl.store(query_at + other, (second * c + first * s).to(qkv.dtype.element_ty), mask=is_query)

    if slot < 0:
        return
    cached = (((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * SIZE
    key_at = in_token + (KV_HEADS * GROUP + head) * SIZE
    first, second = load_normed(key_at, k_norm, one, other, inside, inside, eps, NORMED, SIZE)
    turned = (first * c - second * s).to(qkv.dtype.element_ty)
    tl.store(k_cache + cached + one, to_stored(turned, k_cache), mask=inside)
    turned = (second * c + first * s).to(qkv.dtype.element_ty)
    tl.store(k_cache + cached + other, to_stored(turned, k_cache), mask=inside)

    column = tl.arange(0, 2 * HALF)
    value = tl.load(in_token + (KV_HEADS * (GROUP + 1) + head) * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(v_cache + cached + column, to_stored(value, v_cache), mask=column < SIZE)


@triton.jit
def load_normed(at, weights, one, other, inside, known, eps, NORMED: tl.constexpr, SIZE: tl.constexpr):
    """Load the dimensions `one` and `other` of some heads, which are all of them, normed if the model does so."""
    dtype: tl.constexpr = at.dtype.element_ty
    first = tl.load(at + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps)
        weight_first = tl.load(weights + one, mask=known, other=0.0)
        weight_second = tl.load(weights + other, mask=known, other=0.0)
        first = times_weight(first * scale[:, None], weight_first, dtype)
        second = times_weight(second * scale[:, None], weight_second, dtype)
    return first, second
