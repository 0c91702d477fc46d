"""Mixtures of experts: the choice of each token's experts, and the computation of their MLPs one expert at a time.

Backends that have no kernels of their own for this use these functions. `compute_one_by_one` reads the experts of each
token on the host, so it cannot be captured in a graph. It reads only the weights of experts that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headgate.layers.backend import ClampedGate, Routed, Routing


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
    """`logits` [T, experts] float32. `bias` [experts] takes part in the choice, not in the weights."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    if routing.groups > 1:
        chosen_by = within_best_groups(chosen_by, routing)
    ids = chosen_by.topk(routing.top, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.normalised:
        weights = weights / (in_order(weights)[:, None] + 1e-20)
    return Routed(ids.int(), weights * routing.scale)


def within_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores of experts in the best groups, and minus infinity for the others. Two experts represent a group."""
    by_group = scores.view(len(scores), routing.groups, -1)
    best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~kept[..., None], -torch.inf).view_as(scores)


def in_order(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension in a fixed order: a library's order may depend on the number of rows."""
    total = values[:, 0]
    for i in range(1, values.shape[1]):
        total = total + values[:, i]
    return total


def clamped(pair: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
    """Apply the gate to the results of gate and up, which are side by side."""
    gated, up = pair.chunk(2, dim=-1)
    gated, up = gated.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (up + 1) * (gated * torch.sigmoid(gated * gate.alpha))


def compute_one_by_one(
    x: torch.Tensor, routed: Routed, count: int, mlp: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """`mlp` computes rows with one of `count` experts."""
    top = routed.ids.shape[1]
    chosen = routed.ids.flatten().long()
    pairs = chosen.argsort(stable=True)  # of token and expert, grouped by expert
    counts = torch.bincount(chosen, minlength=count).tolist()
    out = x.new_empty(len(chosen), x.shape[1])
    for expert, mine in enumerate(torch.split(pairs, counts)):
        if len(mine):
            out[mine] = mlp(x[mine // top], expert)
    return combined(out.view(len(x), top, -1), routed.weights)


def combined(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, in float32 and in the order of the choice."""
    total = out[:, 0].float() * weights[:, :1]
    for i in range(1, out.shape[1]):
        total += out[:, i].float() * weights[:, i : i + 1]
    return total.to(out.dtype)
