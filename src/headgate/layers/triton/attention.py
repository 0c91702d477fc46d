"""Attention over the paged cache `[blocks, kv heads, block_size, head size]`. A tile has all queries of a KV head.

There are two kernels. `decode` is for slices of one query: the keys of a sequence are divided into `splits` ranges
that are reduced in parallel, and the program that finishes last combines the results. `prefill` is for slices of any
length: a tile of queries iterates over the keys before it. A step with both kinds of slices runs both kernels. The
softmax is computed in base two, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headgate.layers.backend import KV, Heads, Softmax
from headgate.layers.batch import Batch
from headgate.layers.triton.launch import launch, overlap, wait_for_previous

LOG2E = 1.4426950408889634
SPLITS = (1, 2, 4, 16, 64)
# The fewest keys for which a split is worthwhile; and how many programs keep a device busy, by bytes per number.
SPLIT_KEYS, BUSY = 32, {1: 1024, 2: 768, 4: 768}
LONG = 1024
# The assumed number of one-query slices in a step that also has longer slices.
FEW = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile size of a kernel: queries (times the heads of a group) by keys."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Program:
    """Launch parameters of the decode kernel, which reads one block of the cache at a time."""

    warps: int
    stages: int


LARGE_BLOCK = 16 * 2**10  # bytes of keys; with more, few programs would fit on a multiprocessor
STAGES = 6  # blocks of keys and values that a program has in flight


def decode_program(rows: int, block: torch.Tensor, roomy: bool) -> Program:
    """Return the settings that `benchmarks/gpu/kernels.py` found fastest on an H200.

    `roomy` devices have as much shared memory as an H200. A program has one warp for every 16 rows and 128 columns:
    warps that share a tile wait for each other, programs do not.
    """
    if block.dtype == torch.float32:
        return Program(4, 1)
    warps = max(1, rows // 16) * -(-block.shape[1] // 128)
    large = block.numel() * block.dtype.itemsize > LARGE_BLOCK
    return Program(warps, STAGES if roomy and not large else 2)


def prefill_tile(size: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    return Tile(64, 64, 4, 2) if size <= 128 else Tile(64, 32, 8, 2)


def splits_for(batch: int, kv_heads: int, max_context: int, itemsize: int) -> int:
    """Return the number of ranges to split each sequence into: a power of two, or 1 if there are enough sequences."""
    most = min(-(-max_context // SPLIT_KEYS), max(1, BUSY[itemsize] // (batch * kv_heads)))
    # Only a few values are allowed, because the kernel is compiled for each of them.
    return max(splits for splits in SPLITS if splits <= most)


def is_roomy(device: torch.device) -> bool:
    """Whether a program can use as much shared memory as on Hopper: 227 KiB."""
    if device.type != "cuda":
        return False
    # torch's type stubs lack this attribute.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)) >= 227 * 1024


class Scratch:
    """Memory in which a decode step combines its splits. Layers and steps run one after another and share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.roomy = is_roomy(device)
        self.partial = torch.empty(0, device=device)
        self.stats = torch.empty(0, device=device)
        self.counters = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []

    def reserve(self, batch: int, heads: Heads, splits: int) -> None:
        """Allocate enough memory for a step, before a graph is captured.

        Smaller memory from earlier calls is kept, because captured graphs point to it.
        """
        rows = batch * heads.query * splits
        if rows * heads.size > self.partial.numel():
            self._outgrown += (self.partial, self.stats)
            self.partial = torch.empty(rows * heads.size, device=self.device)
            self.stats = torch.empty(2 * rows, device=self.device)
        if batch * heads.kv > self.counters.numel():
            self._outgrown.append(self.counters)
            self.counters = torch.zeros(batch * heads.kv, dtype=torch.int32, device=self.device)


def decode(
    q: torch.Tensor,
    kv: KV,
    batch: Batch,
    softmax: Softmax,
    heads: Heads,
    scratch: Scratch,
    *,
    among: torch.Tensor | None = None,
    splits: int | None = None,
    program: Program | None = None,
) -> torch.Tensor:
    """Compute attention for the slices with exactly one query token each. Returns `[tokens, heads.query * heads.size]`.

    In a step that also has longer slices, `among` is the result of `prefill` for all tokens, and the rows of one-token
    slices are written into it.
    """
    slices = len(batch.context_lens)
    # Beside longer slices, one-query slices do not determine the duration, and a fixed split is compiled only once.
    likely, reach = (slices, batch.max_context) if among is None else (FEW, LONG + 1)
    splits = splits or splits_for(likely, heads.kv, reach, kv.k.dtype.itemsize)
    group = heads.query // heads.kv
    rows = max(16, triton.next_power_of_2(group))
    program = program or decode_program(rows, kv.k[0, 0], scratch.roomy)
    if splits > 1:
        scratch.reserve(slices, heads, splits)
    out = q.new_empty(slices, heads.query * heads.size) if among is None else among
    launch(
        decode_kernel,
        (heads.kv, splits, slices),
        q,
        kv.k,
        kv.v,
        batch.block_tables,
        batch.context_lens,
        batch.context_lens if batch.order is None else batch.order,
        batch.query_starts,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        *score_arguments(softmax, q),
        q.stride(0),
        batch.block_tables.stride(0),
        ORDERED=batch.order is not None,
        AMONG=among is not None,
        WINDOWED=softmax.window is not None,
        CAPPED=softmax.cap is not None,
        SINKS=softmax.sinks is not None,
        SPLITS=splits,
        KV_HEADS=heads.kv,
        GROUP=group,
        ROWS=rows,
        SIZE=heads.size,
        PADDED=triton.next_power_of_2(heads.size),
        BLOCK_SIZE=kv.k.shape[2],
        PRECISION="ieee",
        num_warps=program.warps,
        num_stages=program.stages,
        **overlap(q),
    )
    return out


def prefill(
    q: torch.Tensor,
    kv: KV,
    batch: Batch,
    softmax: Softmax,
    heads: Heads,
    *,
    singles: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute attention for slices of any length; returns `[T, heads * size]`.

    Slices of one query are skipped unless `singles`.
    """
    tile = tile or prefill_tile(heads.size, q.dtype)
    out = q.new_empty(len(q), heads.query * heads.size)
    group = heads.query // heads.kv
    rows = max(tile.rows, triton.next_power_of_2(group))
    queries = rows // group
    slices = len(batch.context_lens)
    # Each slice has at most one tile that is not full.
    tiles = len(q) // queries + slices
    launch(
        prefill_kernel,
        (heads.kv, tiles),
        q,
        kv.k,
        kv.v,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        out,
        slices,
        *score_arguments(softmax, q),
        q.stride(0),
        batch.block_tables.stride(0),
        WINDOWED=softmax.window is not None,
        CAPPED=softmax.cap is not None,
        SINKS=softmax.sinks is not None,
        SINGLES=singles,
        KV_HEADS=heads.kv,
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        SIZE=heads.size,
        PADDED=triton.next_power_of_2(heads.size),
        BLOCK_SIZE=kv.k.shape[2],
        KEYS=tile.keys,
        PRECISION="ieee",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(q),
    )
    return out


def score_arguments(softmax: Softmax, q: torch.Tensor) -> tuple[float, float, int, torch.Tensor]:
    """Return scale, cap, window and sinks for a kernel. Scores are in base two; see `scored`."""
    sinks = q if softmax.sinks is None else softmax.sinks
    if softmax.cap is None:
        return softmax.scale * LOG2E, 0.0, softmax.window or 0, sinks
    return softmax.scale / softmax.cap, softmax.cap * LOG2E, softmax.window or 0, sinks


@triton.jit
def scored(products, scale, cap, CAPPED: tl.constexpr):
    """Return the scores for products of queries and keys."""
    scores = products * scale
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0))  # cap * tanh(scores)
    return scores


@triton.jit
def with_sink(total, best, sink):
    """Return the sum of a softmax with one more score, in base e. `best` is the maximum of the other scores."""
    # The maximum of an empty context is minus infinity.
    return total + tl.exp2(sink * 1.4426950408889634 - tl.where(best == -float("inf"), 0.0, best))


@triton.jit
def key_rows(tables, position, head, seen, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr):
    """Return the addresses of the keys, and of the values, at some positions of a sequence."""
    block = tl.load(tables + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * SIZE


@triton.jit
def as_computed(query, cache):
    """Convert cached numbers for computation. Eight bits become float16 in one instruction, bfloat16 in several."""
    if cache.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    return query


@triton.jit
def load_block(at, seen, column, MASKED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load one block of keys or values, with zeros where it is not visible."""
    if MASKED:
        return tl.load(at, mask=seen[:, None] & (column < SIZE)[None, :], other=0.0)
    if SIZE < PADDED:
        return tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def attend(
    query,
    keys,
    values,
    seen,
    best,
    total,
    acc,
    scale,
    cap,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Update the running maximum, sum and average of a softmax with more keys."""
    scores = scored(tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION), scale, cap, CAPPED)
    if MASKED:
        scores = tl.where(seen[None, :], scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    fade = tl.exp2(best - new_best)
    total = total * fade + tl.sum(weights, 1)
    values = values.to(query.dtype)
    acc = acc * fade[:, None] + tl.dot(weights.to(query.dtype), values, input_precision=PRECISION)
    return new_best, total, acc


# Arguments that vary from step to step must not cause another compilation.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["tables", "contexts", "order", "query_starts"],
)
def decode_kernel(
    q,
    k,
    v,
    tables,
    contexts,
    order,
    query_starts,
    out,
    partial,
    stats,
    counters,
    scale,
    cap,
    window,
    sinks,
    q_stride,
    table_stride,
    ORDERED: tl.constexpr,
    AMONG: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads vary fastest: programs that run at the same time read adjacent memory.
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        sequence = tl.load(order + sequence)
    sequence = sequence.to(tl.int64)
    context = tl.load(contexts + sequence)
    token = sequence
    wait_for_previous(PDL)
    if AMONG:
        token = tl.load(query_starts + sequence).to(tl.int64)
        if tl.load(query_starts + sequence + 1) - token != 1:
            return
    first = 0
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    first_block, last_block = first // BLOCK_SIZE, tl.cdiv(context, BLOCK_SIZE)
    per_split = tl.cdiv(last_block - first_block, SPLITS)
    begin = first_block + split * per_split
    end = tl.minimum(begin + per_split, last_block)

    row, column, key = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, BLOCK_SIZE)
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    q_at = q + token * q_stride + (head * GROUP + row)[:, None] * SIZE + column[None, :]
    query = as_computed(tl.load(q_at, mask=inside, other=0.0), k)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    table = tables + sequence * table_stride
    within = key[:, None] * SIZE + column[None, :]
    # Fully visible blocks need no mask. The last block may be visible in part, and so may the first one of a window.
    whole = end if WINDOWED else tl.minimum(end, context // BLOCK_SIZE)
    for block in range(begin, whole):
        at = (tl.load(table + block).to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * SIZE)
        position = block * BLOCK_SIZE + key
        seen = (position >= first) & (position < context)
        keys = load_block(k + at + within, seen, column, WINDOWED, SIZE, PADDED)
        values = load_block(v + at + within, seen, column, WINDOWED, SIZE, PADDED)
        best, total, acc = attend(
            query, keys, values, seen, best, total, acc, scale, cap, WINDOWED, CAPPED, PRECISION
        )
    if (begin <= whole) & (whole < end):
        at = (tl.load(table + whole).to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * SIZE)
        seen = whole * BLOCK_SIZE + key < context
        keys = load_block(k + at + within, seen, column, True, SIZE, PADDED)
        values = load_block(v + at + within, seen, column, True, SIZE, PADDED)
        best, total, acc = attend(query, keys, values, seen, best, total, acc, scale, cap, True, CAPPED, PRECISION)

    out_at = out + (token * KV_HEADS + head) * GROUP * SIZE
    if SPLITS == 1:
        # A context of length 0 is padding; its result is zero.
        if SINKS:
            total = with_sink(total, best, tl.load(sinks + head * GROUP + row, mask=row < GROUP, other=0.0))
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_at + row[:, None] * SIZE + column[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        mine = (sequence * KV_HEADS + head) * GROUP * SPLITS
        slot = mine + row * SPLITS + split
        tl.store(partial + slot[:, None] * SIZE + column[None, :], acc, mask=inside)
        tl.store(stats + 2 * slot, best, mask=row < GROUP)
        tl.store(stats + 2 * slot + 1, total, mask=row < GROUP)
        tl.debug_barrier()  # all threads must have stored before one of them signals completion
        done = tl.atomic_add(counters + sequence * KV_HEADS + head, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.store(counters + sequence * KV_HEADS + head, 0)
            for member in tl.static_range(GROUP):
                combine(
                    partial,
                    stats,
                    sinks + head * GROUP + member,
                    out_at + member * SIZE,
                    mine + member * SPLITS,
                    SINKS,
                    SPLITS,
                    SIZE,
                    PADDED,
                )


@triton.jit
def combine(
    partial,
    stats,
    sink,
    out,
    first,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compute the result of one head from its splits, which other programs have just written."""
    slot, column = first + tl.arange(0, SPLITS), tl.arange(0, PADDED)
    best = tl.load(stats + 2 * slot, cache_modifier=".cg")
    total = tl.load(stats + 2 * slot + 1, cache_modifier=".cg")
    highest = tl.max(best, 0)
    # For padding, all splits are empty, and their maximum is minus infinity.
    share = tl.exp2(best - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(total * share, 0)
    if SINKS:
        total = with_sink(total, highest, tl.load(sink))
    parts = tl.load(
        partial + slot[:, None] * SIZE + column[None, :],
        mask=(column < SIZE)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    acc = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + column, acc.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def slice_of(tile, query_starts, slices, QUERIES: tl.constexpr):
    """Return the slice that contains `tile`, where all tiles of a slice except the last are full."""
    low, high = 0, slices
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["slices", "window", "table_stride"],
    do_not_specialize_on_alignment=["tables", "query_starts", "contexts"],
)
def prefill_kernel(
    q,
    k,
    v,
    tables,
    query_starts,
    contexts,
    out,
    slices,
    scale,
    cap,
    window,
    sinks,
    q_stride,
    table_stride,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SINGLES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    index = slice_of(tile, query_starts, slices, QUERIES)
    start = tl.load(query_starts + index)
    count = tl.load(query_starts + index + 1) - start
    first_query = (tile - (start // QUERIES + index)) * QUERIES
    if first_query >= count:
        return
    if not SINGLES and count == 1:
        return
    context = tl.load(contexts + index)

    row, column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    query_index = first_query + row // GROUP
    query_position = context - count + query_index
    used = (row < QUERIES * GROUP) & (query_index < count)
    inside = used[:, None] & (column < SIZE)[None, :]
    token = (start + query_index).to(tl.int64)
    head_at = (head * GROUP + row % GROUP) * SIZE
    query = as_computed(
        tl.load(q + (token * q_stride + head_at)[:, None] + column[None, :], mask=inside, other=0.0), k
    )
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    table = tables + index.to(tl.int64) * table_stride

    last = tl.minimum(context - count + first_query + QUERIES, context)
    first_tile = 0
    if WINDOWED:
        first_tile = tl.maximum(context - count + first_query - window + 1, 0) // KEYS
    for tile_index in range(first_tile, tl.cdiv(last, KEYS)):
        position = tile_index * KEYS + tl.arange(0, KEYS)
        known = position < last
        at = key_rows(table, position, head, known, KV_HEADS, BLOCK_SIZE, SIZE)
        keys = tl.load(k + at[None, :] + column[:, None], mask=known[None, :] & (column < SIZE)[:, None], other=0.0)
        values = tl.load(v + at[:, None] + column[None, :], mask=known[:, None] & (column < SIZE)[None, :], other=0.0)
        scores = scored(tl.dot(query, keys.to(query.dtype), input_precision=PRECISION), scale, cap, CAPPED)
        seen = position[None, :] <= query_position[:, None]
        if WINDOWED:
            seen = seen & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A query that has seen nothing yet, because its window starts later, must not become NaN.
        level = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(best - level)
        total = total * fade + tl.sum(weights, 1)
        values = values.to(query.dtype)
        acc = acc * fade[:, None] + tl.dot(weights.to(query.dtype), values, input_precision=PRECISION)
        best = new_best

    if SINKS:
        total = with_sink(total, best, tl.load(sinks + head * GROUP + row % GROUP, mask=used, other=0.0))
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + (token * (KV_HEADS * GROUP * SIZE) + head_at)[:, None] + column[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)
