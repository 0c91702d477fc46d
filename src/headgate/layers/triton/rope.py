"""Queries and keys normed and turned, keys and values into the paged cache: one program per token and KV head.

The cache is `[blocks, kv heads, block_size, head size]`. Queries are turned in place. A token whose slot is negative
is padding: it is turned and written nowhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.backend import KV, Heads, Rotary
from headgate.layers.triton.launch import launch, overlap, wait_for_previous


def rope_and_write(
    qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rotary: Rotary, kv: KV, heads: Heads
) -> torch.Tensor:
    """Queries `[T, heads, size]`, a view of `qkv`."""
    group = heads.query // heads.kv
    if len(qkv):
        launch(
            rope_and_write_kernel,
            (heads.kv, len(qkv)),
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
            BLOCK_SIZE=kv.k.shape[2],
            KV_HEADS=heads.kv,
            GROUP=group,
            ROWS=triton.next_power_of_2(group + 1),
            SIZE=heads.size,
            HALF=triton.next_power_of_2(heads.size // 2),
            num_warps=1,
            **overlap(qkv),
        )
    return qkv.view(len(qkv), -1, heads.size)[:, : heads.query]


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
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty

    # The queries of the group, and under them their key.
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    is_key = row == GROUP
    inside = (row <= GROUP) & (column < SIZE // 2)
    source_head = tl.where(is_key, KV_HEADS * GROUP + head, head * GROUP + row)
    at = qkv + token * ((GROUP + 2) * KV_HEADS * SIZE) + source_head * SIZE + column
    wait_for_previous(PDL)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps)
        weight_first = tl.load(tl.where(is_key, k_norm + column, q_norm + column), mask=inside, other=0.0)
        weight_second = tl.load(
            tl.where(is_key, k_norm + SIZE // 2 + column, q_norm + SIZE // 2 + column), mask=inside, other=0.0
        )
        first = (first * scale[:, None]).to(dtype).to(tl.float32) * weight_first
        second = (second * scale[:, None]).to(dtype).to(tl.float32) * weight_second
    angle = position * SIZE + column
    c = tl.load(cos + angle, mask=column < SIZE // 2, other=0.0)
    s = tl.load(sin + angle, mask=column < SIZE // 2, other=0.0)
    turned_first = (first * c - second * s).to(dtype)
    turned_second = (second * c + first * s).to(dtype)

    is_query = inside & (row < GROUP)
    tl.store(at, turned_first, mask=is_query)
    tl.store(at + SIZE // 2, turned_second, mask=is_query)
    place = ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    # Blocks, not scalars, are compared: the interpreter of some Triton versions makes numbers of scalar masks.
    is_stored_key = inside & is_key & (tl.zeros_like(column) + slot >= 0)
    key_at = k_cache + place * SIZE + column + tl.zeros_like(row)
    tl.store(key_at, turned_first, mask=is_stored_key)
    tl.store(key_at + SIZE // 2, turned_second, mask=is_stored_key)

    column_v = tl.arange(0, 2 * HALF)
    value_at = qkv + token * ((GROUP + 2) * KV_HEADS * SIZE) + (KV_HEADS * (GROUP + 1) + head) * SIZE + column_v
    value = tl.load(value_at, mask=column_v < SIZE, other=0.0)
    tl.store(v_cache + place * SIZE + column_v, value, mask=(column_v < SIZE) & (tl.zeros_like(column_v) + slot >= 0))
