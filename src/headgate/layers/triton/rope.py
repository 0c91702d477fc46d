"""Norms and rotates queries and keys, and writes keys and values to the paged cache.

One program handles one KV head and some tokens. The cache is `[blocks, kv heads, block_size, head size]`. Queries are
rotated in place. A token with a negative slot is padding: it is rotated but not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headgate.layers.backend import KV, Heads, Rotary
from headgate.layers.triton.launch import launch, overlap, wait_for_previous
from headgate.layers.triton.rounding import to_stored

# With `MANY` or more tokens, a program handles `TOGETHER` tokens, and waits for memory once for all of them.
MANY, TOGETHER = 1024, 8


def rope_and_write(
    qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rotary: Rotary, kv: KV, heads: Heads
) -> torch.Tensor:
    """Norm and rotate queries and keys, and write keys and values to `kv`.

    Returns queries `[T, heads, size]`, a view of `qkv`.
    """
    group, count = heads.query // heads.kv, len(qkv)
    together = TOGETHER if count >= MANY else 1
    if count:
        launch(
            rope_and_write_kernel,
            (heads.kv, triton.cdiv(count, together)),
            qkv,
            positions,
            slots,
            rotary.cos,
            rotary.sin,
            rotary.cos if rotary.q_norm is None else rotary.q_norm,
            rotary.cos if rotary.k_norm is None else rotary.k_norm,
            kv.k,
            kv.v,
            count,
            rotary.eps,
            NORMED=rotary.q_norm is not None,
            TOKENS=together,
            BLOCK_SIZE=kv.k.shape[2],
            KV_HEADS=heads.kv,
            GROUP=group,
            ROWS=triton.next_power_of_2(group + 1),
            SIZE=heads.size,
            HALF=triton.next_power_of_2(heads.size // 2),
            num_warps=1 if together == 1 else 4,
            **overlap(qkv),
        )
    return qkv.view(count, -1, heads.size)[:, : heads.query]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions", "slots"])
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
    count,
    eps,
    NORMED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    head, first_token = tl.program_id(0), tl.program_id(1).to(tl.int64) * TOKENS
    dtype: tl.constexpr = qkv.dtype.element_ty
    width: tl.constexpr = (GROUP + 2) * KV_HEADS * SIZE

    # The tile has, for each token, the queries of one KV head, followed by the key.
    line, column = tl.arange(0, TOKENS * ROWS)[:, None], tl.arange(0, HALF)[None, :]
    token, row = first_token + line // ROWS, line % ROWS
    is_key = row == GROUP
    known = token < count
    position = tl.load(positions + token, mask=known, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=known, other=-1).to(tl.int64)
    inside = (row <= GROUP) & known & (column < SIZE // 2)
    source_head = tl.where(is_key, KV_HEADS * GROUP + head, head * GROUP + row)
    at = qkv + token * width + source_head * SIZE + column
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
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    turned_first = (first * c - second * s).to(dtype)
    turned_second = (second * c + first * s).to(dtype)

    is_query = inside & (row < GROUP)
    tl.store(at, turned_first, mask=is_query)
    tl.store(at + SIZE // 2, turned_second, mask=is_query)
    is_stored_key = inside & is_key & (slot >= 0)
    key_at = k_cache + place_of(slot, head, KV_HEADS, BLOCK_SIZE) * SIZE + column
    tl.store(key_at, to_stored(turned_first, k_cache), mask=is_stored_key)
    tl.store(key_at + SIZE // 2, to_stored(turned_second, k_cache), mask=is_stored_key)

    token_v, column_v = first_token + tl.arange(0, TOKENS)[:, None], tl.arange(0, 2 * HALF)[None, :]
    slot_v = tl.load(slots + token_v, mask=token_v < count, other=-1).to(tl.int64)
    value_at = qkv + token_v * width + (KV_HEADS * (GROUP + 1) + head) * SIZE + column_v
    is_value = (column_v < SIZE) & (slot_v >= 0)
    value = tl.load(value_at, mask=is_value, other=0.0)
    place_v = place_of(slot_v, head, KV_HEADS, BLOCK_SIZE)
    tl.store(v_cache + place_v * SIZE + column_v, to_stored(value, v_cache), mask=is_value)


@triton.jit
def place_of(slot, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the index of the cache row for a slot and a head; a row holds one head of one token."""
    return ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
