"""Tensors that a checkpoint or a trainer stores together although the model names them one by one.

`transformers` 5 keeps the experts of a layer in two tensors, `experts.gate_up_proj` [experts, 2 * width, hidden] and
`experts.down_proj` [experts, hidden, width]; other trainers stack gate and up apart, or fuse them per expert. A model
expects one tensor per expert and matrix. `pieces_of` says which of those a stored tensor contains, and where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}  # the first half of the rows, and the second


class Piece(NamedTuple):
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


def pieces_of(name: str, shape: tuple[int, ...], expected: Collection[str]) -> list[Piece]:
    """The tensors in `expected` that the stored tensor contains; itself, if it is none of several."""
    if name in expected or len(shape) not in (2, 3):
        return [Piece(name, None, WHOLE)]
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    experts = [f"{prefix}.{i}." for i in range(shape[0])] if len(shape) == 3 else [f"{prefix}."]
    parts = FUSED.get(last, (last,))
    if not all(f"{experts[0] if experts else prefix}{part}.weight" in expected for part in parts):
        return [Piece(name, None, WHOLE)]
    height = shape[-2] // len(parts)
    return [
        Piece(f"{expert}{part}.weight", i if len(shape) == 3 else None, slice(j * height, (j + 1) * height))
        for i, expert in enumerate(experts)
        for j, part in enumerate(parts)
    ]


def pieces_in(stored: Mapping[str, tuple[int, ...]], expected: Collection[str]) -> Iterator[tuple[str, Piece]]:
    """Every piece of every stored tensor, with the name of that tensor."""
    for name, shape in stored.items():
        for piece in pieces_of(name, shape, expected):
            yield name, piece
