"""Tensors that a checkpoint or a trainer stores together although the model names them one by one.

`transformers` 5 keeps the experts of a layer in two tensors, `experts.gate_up_proj` [experts, 2 * width, hidden] and
`experts.down_proj` [experts, hidden, width]; other trainers stack gate and up apart, or fuse them per expert. A model
expects one tensor per expert and matrix. `pieces_of` says which of those a stored tensor contains, and where.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}  # the first half of the rows, and the second


class StoredPiece(NamedTuple):
    """The part of a stored tensor that is one tensor of the model."""

    name: str
    expert: int | None  # index in the first dimension; None: the tensor is not stacked
    rows: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if self.expert is None else tensor[self.expert])[self.rows]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        rows, *others = stored if self.expert is None else stored[1:]
        return (len(range(rows)[self.rows]), *others)


WHOLE = slice(None)


def pieces_of(name: str, shape: tuple[int, ...], expected: Collection[str]) -> list[StoredPiece]:
    """The tensors in `expected` that the stored tensor contains; itself, if it is none of several."""
    if name in expected or len(shape) not in (2, 3):
        return [StoredPiece(name, None, WHOLE)]
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    experts = [f"{prefix}.{i}." for i in range(shape[0])] if len(shape) == 3 else [f"{prefix}."]
    parts = FUSED.get(last, (last,))
    if not all(f"{experts[0] if experts else prefix}{part}.weight" in expected for part in parts):
        return [StoredPiece(name, None, WHOLE)]
    height = shape[-2] // len(parts)
    return [
        StoredPiece(f"{expert}{part}.weight", i if len(shape) == 3 else None, slice(j * height, (j + 1) * height))
        for i, expert in enumerate(experts)
        for j, part in enumerate(parts)
    ]


def stacked_names(expected: Collection[str]) -> frozenset[str]:
    """Names, without `.weight`, of tensors that contain several of `expected`."""
    found = set()
    for name in expected:
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        places = [prefix]
        above, _, last = prefix.rpartition(".")
        if last.isdecimal():
            places.append(above)
            found.add(f"{above}.{part}")
        found.update(f"{place}.{fused}" for place in places for fused, parts in FUSED.items() if part in parts)
    return frozenset(found)
