"""Mixtures of experts: the choice of experts, and the products of rows with the weights of their experts.

A *pair* is a token and one of its experts; pair `t * top + i` is token `t` with its `i`th expert. Up to `FEW_PAIRS`
pairs, a program multiplies one pair with some rows of its expert. With more, pairs are grouped: `group_pairs` lays them
out by expert, in groups of at most `TOKENS` pairs of one expert, and a program multiplies one group. The number of
groups depends on the choice of experts, so a launch has as many programs as there can be groups, and those without a
group return at once. This way a launch can be captured in a graph.

A pair's result depends on its own row alone. Which other pairs are in its group does not change the order of its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headgate.layers.backend import ClampedGate, ExpertMatrices, Routed, Routing
from headgate.layers.triton.launch import launch, overlap, wait_for_previous

FEW_PAIRS = 32
AT_ONCE = 128  # pairs that one program can group
PLACED = 32  # pairs per program of `count_kernel` and `place_kernel`


@dataclass(frozen=True, slots=True)
class GroupCut:
    """The tiling of a product of groups: rows of the weight and pairs per program, columns per step."""

    rows: int
    columns: int
    tokens: int
    warps: int
    stages: int
    bulk: bool = False  # the copy engine of the device loads tiles


# The fastest tilings on an H200 for experts of Qwen3-30B-A3B's size (`benchmarks/gpu/experts.py`): up to how many pairs
# per expert, and the tilings of gate and up, and of down. Both have the same number of pairs per group.
TILINGS = (
    (8, GroupCut(64, 128, 16, 4, 3), GroupCut(64, 128, 16, 4, 3)),
    (24, GroupCut(64, 64, 32, 4, 4), GroupCut(64, 128, 32, 4, 3)),
    (48, GroupCut(64, 64, 64, 4, 4), GroupCut(128, 64, 64, 4, 3)),
    (128, GroupCut(128, 64, 128, 8, 4, bulk=True), GroupCut(128, 64, 128, 8, 3, bulk=True)),
    (float("inf"), GroupCut(128, 64, 128, 8, 3, bulk=True), GroupCut(128, 64, 128, 8, 3, bulk=True)),
)


def cuts_for(pairs: int, experts: int, dtype: torch.dtype, roomy: bool) -> tuple[GroupCut, GroupCut]:
    gate_up, down = next((gate_up, down) for most, gate_up, down in TILINGS if pairs <= most * experts)
    return fitted(gate_up, dtype, roomy), fitted(down, dtype, roomy)


def fitted(cut: GroupCut, dtype: torch.dtype, roomy: bool) -> GroupCut:
    """A tiling that fits in the shared memory of the device: 99 KiB, or more if it is `roomy`."""
    if dtype == torch.float32:
        return GroupCut(64, 32, min(cut.tokens, 64), 4, 2)
    return cut if roomy else GroupCut(64, 64, cut.tokens, 4, 2)


# For any number of pairs, so that every pair is summed in the same order.
INVARIANT = GroupCut(64, 64, 32, 4, 3), GroupCut(64, 64, 32, 4, 3)


@dataclass(frozen=True, slots=True)
class PairCut:
    """The tiling of a product of one pair: rows of the weight per program, columns per step."""

    rows: int
    columns: int
    warps: int


GATE_UP_PAIR, DOWN_PAIR = PairCut(2, 1024, 2), PairCut(4, 256, 8)


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs by expert. Group `g` is `pairs[g * tokens :][: sizes[g]]`, all of expert `experts[g]`."""

    pairs: torch.Tensor
    experts: torch.Tensor
    sizes: torch.Tensor


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
    """Like `layers.experts.route`."""
    count, experts = logits.shape
    ids = torch.empty(count, routing.top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(count, routing.top, device=logits.device)
    if count:
        launch(
            route_kernel,
            (count,),
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            experts,
            routing.scale,
            TOP=routing.top,
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            SIGMOID=routing.scores == "sigmoid",
            NORMALISED=routing.normalised,
            BIASED=bias is not None,
            BLOCK=triton.next_power_of_2(experts // routing.groups) * triton.next_power_of_2(routing.groups),
            MEMBERS=triton.next_power_of_2(experts // routing.groups),
            num_warps=1,
            **overlap(logits),
        )
    return Routed(ids, weights)


def compute(
    x: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    routed: Routed,
    gate: ClampedGate | None = None,
    *,
    roomy: bool = True,
) -> torch.Tensor:
    pairs = routed.ids.numel()
    if pairs <= FEW_PAIRS:
        return multiply_down(multiply_gate_up(x, gate_up, routed, gate), down, routed)
    return compute_grouped(x, gate_up, down, routed, gate, cuts_for(pairs, len(down.each), x.dtype, roomy))


def compute_grouped(
    x: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    routed: Routed,
    gate: ClampedGate | None,
    cuts: tuple[GroupCut, GroupCut],
) -> torch.Tensor:
    pairs, (first, second) = routed.ids.numel(), cuts
    if not pairs:
        return torch.empty_like(x)
    groups = group_pairs(routed.ids, len(down.each), first.tokens)
    inner = x.new_empty(len(groups.pairs), down.each[0].columns)
    multiply_groups(x, gate_up, groups, first, inner, top=routed.ids.shape[1], gated=True, gate=gate)
    outer = x.new_empty(pairs, down.each[0].rows)
    multiply_groups(inner, down, groups, second, outer, top=1, gated=False)
    return combine(outer, routed.weights)


def group_pairs(ids: torch.Tensor, experts: int, tokens: int) -> Groups:
    """Groups of at most `tokens` pairs."""
    pairs = ids.numel()
    most = min(pairs, pairs // tokens + experts)
    groups = Groups(*(ids.new_empty(size) for size in (most * tokens, most, most)))
    found = groups.pairs, groups.experts, groups.sizes
    constants = {"TOKENS": tokens, "EXPERTS": triton.next_power_of_2(experts)}
    if pairs <= AT_ONCE:
        block = max(triton.next_power_of_2(pairs), 64)
        settings = constants | {"BLOCK": block, "MOST": triton.next_power_of_2(most), "num_warps": 8}
        launch(group_few_kernel, (1,), ids, *found, pairs, most, experts, **settings, **overlap(ids))
        return groups
    counts, ranks = ids.new_zeros(experts), ids.new_empty(pairs)
    programs = triton.cdiv(pairs, PLACED)
    launch(count_kernel, (programs,), ids, counts, ranks, pairs, BLOCK=PLACED, num_warps=1)
    settings = constants | {"BLOCK": PLACED, "num_warps": 4}
    grid = (max(programs, triton.cdiv(most, PLACED)),)
    launch(place_kernel, grid, ids, counts, ranks, *found, pairs, most, experts, **settings)
    return groups


def multiply_groups(
    x: torch.Tensor,
    matrices: ExpertMatrices,
    groups: Groups,
    cut: GroupCut,
    out: torch.Tensor,
    *,
    top: int,
    gated: bool,
    gate: ClampedGate | None = None,
) -> None:
    """The product of each pair's row with the weight of its expert.

    If `gated`, rows are in the order of tokens and `out` is in the order of `groups.pairs`; else the reverse.
    """
    weight, scales = stacked(matrices)
    rows, columns = out.shape[1], x.shape[1]
    bulk = cut.bulk and weight.dtype == x.dtype and columns * x.itemsize % 16 == 0
    launch(
        groups_kernel,
        (triton.cdiv(rows, cut.rows), len(groups.experts)),
        out,
        tiles(x, cut.tokens, cut.columns) if bulk and not gated else x,
        tiles(weight.view(-1, columns), cut.rows, cut.columns) if bulk else weight,
        weight if scales is None else scales,
        weight if matrices.bias is None else matrices.bias,
        groups.pairs,
        groups.experts,
        groups.sizes,
        rows,
        *gate_arguments(gate),
        COLUMNS=columns,
        TOP=top,
        SCALED=scales is not None,
        BIASED=matrices.bias is not None,
        CLAMPED=gate is not None,
        GATED=gated,
        BULK=bulk,
        TOKENS=cut.tokens,
        ROWS=cut.rows,
        STEP=cut.columns,
        EVEN=columns % cut.columns == 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **overlap(x),
    )


def tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def combine(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    count, top = weights.shape
    columns = out.shape[1]
    total = out.new_empty(count, columns)
    block = min(triton.next_power_of_2(columns), 1024)
    grid = (count, triton.cdiv(columns, block))
    launch(combine_kernel, grid, out, weights, total, columns, TOP=top, BLOCK=block, num_warps=4, **overlap(out))
    return total


def multiply_gate_up(
    x: torch.Tensor,
    matrices: ExpertMatrices,
    routed: Routed,
    gate: ClampedGate | None = None,
    cut: PairCut = GATE_UP_PAIR,
) -> torch.Tensor:
    """The gated product of every pair, one pair per program."""
    weight, scales = stacked(matrices)
    rows, columns = weight.shape[1] // 2, weight.shape[2]
    pairs, top = routed.ids.numel(), routed.ids.shape[1]
    out = x.new_empty(pairs, rows)
    if pairs:
        launch(
            pair_gate_up_kernel,
            (triton.cdiv(rows, cut.rows), pairs),
            x,
            weight,
            weight if scales is None else scales,
            weight if matrices.bias is None else matrices.bias,
            out,
            routed.ids,
            rows,
            *gate_arguments(gate),
            COLUMNS=columns,
            TOP=top,
            SCALED=scales is not None,
            BIASED=matrices.bias is not None,
            CLAMPED=gate is not None,
            ROWS=cut.rows,
            STEP=min(triton.next_power_of_2(columns), cut.columns),
            num_warps=cut.warps,
            **overlap(x),
        )
    return out


def multiply_down(
    x: torch.Tensor, matrices: ExpertMatrices, routed: Routed, cut: PairCut = DOWN_PAIR
) -> torch.Tensor:
    """The weighted sum of the products of a token's pairs, one token per program."""
    weight, scales = stacked(matrices)
    rows, columns = weight.shape[1], weight.shape[2]
    count, top = routed.ids.shape
    out = x.new_empty(count, rows)
    if count:
        launch(
            pair_down_kernel,
            (triton.cdiv(rows, cut.rows), count),
            x,
            weight,
            weight if scales is None else scales,
            weight if matrices.bias is None else matrices.bias,
            out,
            routed.ids,
            routed.weights,
            rows,
            COLUMNS=columns,
            TOP=top,
            PADDED=triton.next_power_of_2(top),
            SCALED=scales is not None,
            BIASED=matrices.bias is not None,
            ROWS=cut.rows,
            STEP=min(triton.next_power_of_2(columns), cut.columns),
            num_warps=cut.warps,
            **overlap(x),
        )
    return out


def stacked(matrices: ExpertMatrices) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert matrices.stacked is not None, "these kernels find the weight of an expert by its number"
    return matrices.stacked, matrices.scales


def gate_arguments(gate: ClampedGate | None) -> tuple[float, float]:
    return (0.0, 0.0) if gate is None else (gate.alpha, gate.limit)


@triton.jit
def gated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    experts,
    scale,
    TOP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place `g * MEMBERS + i` is member `i` of group `g`; places beyond the members of a group have no expert."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    members = experts // GROUPS
    expert = place // MEMBERS * members + place % MEMBERS
    known = (place % MEMBERS < members) & (place // MEMBERS < GROUPS)
    wait_for_previous(PDL)
    values = tl.load(logits + token * experts + expert, mask=known, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    chosen_by = scores
    if BIASED:
        chosen_by += tl.load(bias + expert, mask=known, other=0.0)
    chosen_by = tl.where(known, chosen_by, float("-inf"))
    if GROUPS > 1:
        chosen_by = within_best_groups(chosen_by, members, GROUPS, TOP_GROUPS, BLOCK, MEMBERS)
    total = 0.0
    for i in tl.static_range(TOP):
        best = tl.argmax(chosen_by, 0)
        weight = tl.sum(tl.where(place == best, scores, 0.0), 0)
        total += weight
        tl.store(ids + token * TOP + i, (best // MEMBERS * members + best % MEMBERS).to(tl.int32))
        tl.store(weights + token * TOP + i, weight * scale)
        chosen_by = tl.where(place == best, float("-inf"), chosen_by)
    if NORMALISED:
        tl.debug_barrier()
        for i in tl.static_range(TOP):
            weight = tl.load(weights + token * TOP + i)
            tl.store(weights + token * TOP + i, weight / (total + 1e-20))


@triton.jit
def within_best_groups(
    scores, members, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr
):
    """Scores outside the best groups become minus infinity. Two experts represent a group."""
    by_group = tl.reshape(scores, [BLOCK // MEMBERS, MEMBERS])
    member, group = tl.arange(0, MEMBERS), tl.arange(0, BLOCK // MEMBERS)
    first = tl.argmax(by_group, 1)
    group_score = tl.max(by_group, 1)
    second = tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), by_group), 1)
    if members > 1:
        group_score += second
    group_score = tl.where(group < GROUPS, group_score, float("-inf"))
    kept = tl.zeros([BLOCK // MEMBERS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(group_score, 0)
        kept = tl.where(group == best, 1, kept)
        group_score = tl.where(group == best, float("-inf"), group_score)
    return tl.reshape(tl.where(kept[:, None] == 1, by_group, float("-inf")), [BLOCK])


@triton.jit(do_not_specialize=["pairs", "most"])
def group_few_kernel(
    ids,
    placed,
    group_experts,
    group_sizes,
    pairs,
    most,
    experts,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program compares all pairs with each other, which for a few of them is faster than several launches."""
    wait_for_previous(PDL)
    pair, expert = tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    inside = pair < pairs
    mine = tl.load(ids + pair, mask=inside, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, pairs, 16):
        other = first + tl.arange(0, 16)
        theirs = tl.load(ids + other, mask=other < pairs, other=-1)
        before = (mine[:, None] == theirs[None, :]) & (other[None, :] < pair[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
        count += tl.sum((expert[:, None] == theirs[None, :]).to(tl.int32), 1)
    groups = (count + TOKENS - 1) // TOKENS
    starts = tl.cumsum(groups, 0) - groups
    tl.store(placed + tl.gather(starts, mine, 0) * TOKENS + rank, pair, mask=inside)
    for i in range(tl.max(groups, 0)):
        tl.store(group_experts + starts + i, expert, mask=i < groups)
        tl.store(group_sizes + starts + i, tl.minimum(count - i * TOKENS, TOKENS), mask=i < groups)
    group = tl.arange(0, MOST)
    tl.store(group_sizes + group, 0, mask=(group >= tl.sum(groups, 0)) & (group < most))


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, ranks, pairs, BLOCK: tl.constexpr):
    """A pair's rank is the number of pairs of its expert that were counted before it."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids + pair, mask=inside, other=0)
    rank = tl.atomic_add(counts + expert, 1, mask=inside)
    tl.store(ranks + pair, rank, mask=inside)


@triton.jit(do_not_specialize=["pairs", "most"])
def place_kernel(
    ids,
    counts,
    ranks,
    placed,
    group_experts,
    group_sizes,
    pairs,
    most,
    experts,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    groups = (count + TOKENS - 1) // TOKENS
    ends = tl.cumsum(groups, 0)
    starts = ends - groups  # the first group of each expert
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    inside = number < pairs
    mine = tl.load(ids + number, mask=inside, other=0)
    rank = tl.load(ranks + number, mask=inside, other=0)
    first = tl.sum(tl.where(mine[:, None] == expert[None, :], starts[None, :], 0), 1)
    tl.store(placed + first * TOKENS + rank, number, mask=inside)

    inside = number < most
    owner = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    owned = owner[:, None] == expert[None, :]
    before = (number - tl.sum(tl.where(owned, starts[None, :], 0), 1)) * TOKENS
    size = tl.sum(tl.where(owned, count[None, :], 0), 1) - before
    used = owner < experts
    tl.store(group_experts + number, tl.where(used, owner, 0), mask=inside)
    tl.store(group_sizes + number, tl.where(used, tl.minimum(size, TOKENS), 0), mask=inside)


@triton.jit
def groups_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    placed,
    group_experts,
    group_sizes,
    rows,
    alpha,
    limit,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    GATED: tl.constexpr,
    BULK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    group = tl.program_id(1)
    size = tl.load(group_sizes + group)
    if size == 0:
        return
    expert = tl.load(group_experts + group)
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    owned = row < rows
    place = tl.arange(0, TOKENS)
    taken = place < size
    in_order = group.to(tl.int64) * TOKENS + place
    pair = tl.load(placed + in_order, mask=taken, other=0).to(tl.int64)
    height = 2 * rows if GATED else rows
    weight_row = expert * height
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    other = tl.zeros([ROWS, TOKENS], tl.float32)
    if not BULK:
        # Rows past the end of the weight are read from row 0 and never stored, which is faster than masked loads.
        weight_at = weight + (weight_row.to(tl.int64) + tl.where(owned, row, 0)[:, None]) * COLUMNS
        up_at = weight_at + rows.to(tl.int64) * COLUMNS
    if GATED or not BULK:
        source = pair // TOP if GATED else in_order
        x_at = x + source[None, :] * COLUMNS
    for first in range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < COLUMNS
        if BULK and not GATED:
            numbers = x.load([group * TOKENS, first]).T
        elif EVEN:
            numbers = tl.load(x_at + column[:, None], mask=taken[None, :], other=0.0)
        else:
            numbers = tl.load(x_at + column[:, None], mask=inside[:, None] & taken[None, :], other=0.0)
        if BULK:
            w = weight.load([weight_row + first_row, first])
        elif EVEN:
            w = tl.load(weight_at + column[None, :])
        else:
            w = tl.load(weight_at + column[None, :], mask=inside[None, :], other=0.0)
        acc = tl.dot(w.to(numbers.dtype), numbers, acc, input_precision="ieee")
        if GATED:
            if BULK:
                u = weight.load([weight_row + rows + first_row, first])
            elif EVEN:
                u = tl.load(up_at + column[None, :])
            else:
                u = tl.load(up_at + column[None, :], mask=inside[None, :], other=0.0)
            other = tl.dot(u.to(numbers.dtype), numbers, other, input_precision="ieee")
    if SCALED:
        acc *= tl.load(scale + weight_row + row, mask=owned, other=0.0)[:, None]
        if GATED:
            other *= tl.load(scale + weight_row + rows + row, mask=owned, other=0.0)[:, None]
    if BIASED:
        acc += tl.load(bias + weight_row + row, mask=owned, other=0.0).to(tl.float32)[:, None]
        if GATED:
            other += tl.load(bias + weight_row + rows + row, mask=owned, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated(acc, other, alpha, limit, CLAMPED)
    result = acc.to(out.dtype.element_ty)
    target = in_order if GATED else pair
    if BULK:  # through shared memory, for long writes
        tl.store(out + target[:, None] * rows + row[None, :], result.T, mask=taken[:, None] & owned[None, :])
    else:
        tl.store(out + target[None, :] * rows + row[:, None], result, mask=owned[:, None] & taken[None, :])


@triton.jit
def combine_kernel(out, weights, total, columns, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP):
        pair = token * TOP + i
        value = tl.load(out + pair * columns + column, mask=inside, other=0.0).to(tl.float32)
        acc += value * tl.load(weights + pair)
    tl.store(total + token * columns + column, acc.to(total.dtype.element_ty), mask=inside)


@triton.jit
def pair_gate_up_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    ids,
    rows,
    alpha,
    limit,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned = row < rows
    wait_for_previous(PDL)
    first_row = tl.load(ids + pair).to(tl.int64) * 2 * rows
    gate_at = weight + (first_row + row[:, None]) * COLUMNS
    up_at = gate_at + rows.to(tl.int64) * COLUMNS
    gates = tl.zeros([ROWS, STEP], tl.float32)
    ups = tl.zeros([ROWS, STEP], tl.float32)
    for first in tl.static_range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        inside = column < COLUMNS
        mask = owned[:, None] & inside[None, :]
        g = tl.load(gate_at + column[None, :], mask=mask, other=0.0)
        u = tl.load(up_at + column[None, :], mask=mask, other=0.0)
        numbers = tl.load(x + pair // TOP * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        gates += g.to(tl.float32) * numbers
        ups += u.to(tl.float32) * numbers
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if SCALED:
        gate *= tl.load(scale + first_row + row, mask=owned, other=0.0)
        up *= tl.load(scale + first_row + rows + row, mask=owned, other=0.0)
    if BIASED:
        gate += tl.load(bias + first_row + row, mask=owned, other=0.0).to(tl.float32)
        up += tl.load(bias + first_row + rows + row, mask=owned, other=0.0).to(tl.float32)
    result = gated(gate, up, alpha, limit, CLAMPED)
    tl.store(out + pair * rows + row, result.to(out.dtype.element_ty), mask=owned)


@triton.jit
def pair_down_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    ids,
    weights,
    rows,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    PADDED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """All experts of a token at once: row `i * ROWS + j` of the tile is row `j` of the `i`th expert."""
    token = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, PADDED * ROWS)
    row, chosen = tl.program_id(0) * ROWS + place % ROWS, place // ROWS
    owned = (row < rows) & (chosen < TOP)
    wait_for_previous(PDL)
    pair = token * TOP + chosen
    expert_row = tl.load(ids + pair, mask=owned, other=0).to(tl.int64) * rows + row
    sums = tl.zeros([PADDED * ROWS, STEP], tl.float32)
    for first in tl.static_range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        mask = owned[:, None] & (column < COLUMNS)[None, :]
        w = tl.load(weight + expert_row[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0)
        numbers = tl.load(x + pair[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0)
        sums += w.to(tl.float32) * numbers.to(tl.float32)
    result = tl.sum(sums, 1)
    if SCALED:
        result *= tl.load(scale + expert_row, mask=owned, other=0.0)
    if BIASED:
        result += tl.load(bias + expert_row, mask=owned, other=0.0).to(tl.float32)
    # Rounded as the product of a single expert would be.
    result = result.to(out.dtype.element_ty).to(tl.float32)
    result *= tl.load(weights + pair, mask=owned, other=0.0)
    total = tl.sum(tl.reshape(result, [PADDED, ROWS]), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * rows + row, total.to(out.dtype.element_ty), mask=row < rows)
