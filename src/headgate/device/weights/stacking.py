"""Tensors that a checkpoint or a trainer stores together although the model names them one by one.

Some families store queries, keys and values in one tensor, `qkv_proj`, and gate and up in another, `gate_up_proj`.
`transformers` 5 keeps the experts of a layer in two tensors, `experts.gate_up_proj` [experts, 2 * width, hidden] and
`experts.down_proj` [experts, hidden, width]; other trainers stack gate and up apart, or fuse them per expert. A model
expects one tensor per expert and matrix. `pieces_of` says which of those a stored tensor contains, and where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import NamedTuple

from headgate.layers.formats import Weight

# The rows of each part follow those of the one before.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}


class StoredPiece(NamedTuple):
    """The part of a stored tensor that is one tensor of the model."""

    name: str
    expert: int | None  # index in the first dimension; None: the tensor is not stacked
    rows: slice

    def of(self, weight: Weight) -> Weight:
        return (weight if self.expert is None else weight.rows(self.expert)).rows(self.rows)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        rows, *others = stored if self.expert is None else stored[1:]
        return (len(range(rows)[self.rows]), *others)


WHOLE = slice(None)


def pieces_of(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> list[StoredPiece]:
    """The tensors in `expected` that the stored tensor contains; itself, if it is none of several."""
    kind = ".bias" if name.endswith(".bias") else ".weight"
    row = len(shape) - (1 if kind == ".bias" else 2)  # the dimension of rows: 0, or 1 if experts are stacked
    if name in expected or row not in (0, 1):
        return [StoredPiece(name, None, WHOLE)]
    prefix, _, last = name.removesuffix(kind).rpartition(".")
    experts = [f"{prefix}.{i}." for i in range(shape[0])] if row else [f"{prefix}."]
    parts = FUSED.get(last, (last,))
    if not experts or not all(f"{experts[0]}{part}{kind}" in expected for part in parts):
        return [StoredPiece(name, None, WHOLE)]
    rows = rows_of([expected[f"{experts[0]}{part}{kind}"][0] for part in parts], shape[row])
    return [
        StoredPiece(f"{expert}{part}{kind}", i if row else None, rows[j])
        for i, expert in enumerate(experts)
        for j, part in enumerate(parts)
    ]


def rows_of(heights: list[int], total: int) -> list[slice]:
    """The rows of each part. A tensor of another height is divided evenly, and refused by the shape of its parts."""
    if sum(heights) != total:
        heights = [total // len(heights)] * len(heights)
    ends = list(accumulate(heights))
    return [slice(end - height, end) for end, height in zip(ends, heights, strict=True)]


def stacked_names(expected: Collection[str]) -> frozenset[str]:
    """Names, without `.weight`, of tensors that contain several of `expected`."""
    found = set()
    for name in expected:
        kind = ".bias" if name.endswith(".bias") else ""
        prefix, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        places = [prefix]
        above, _, last = prefix.rpartition(".")
        if last.isdecimal():
            places.append(above)
            found.add(f"{above}.{part}{kind}")
        found.update(f"{place}.{fused}{kind}" for place in places for fused, parts in FUSED.items() if part in parts)
    return frozenset(found)
