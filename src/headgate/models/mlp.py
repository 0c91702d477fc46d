"""The MLP that all tokens of a layer share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headgate.layers.backend import Backend
from headgate.layers.linear import GateUp, SummedLinear
from headgate.layers.parameter import WeightParameter
from headgate.layers.ranks import Ranks
from headgate.models.spec import Dense


class MLP:
    def __init__(self, hidden: int, mlp: Dense, backend: Backend, ranks: Ranks) -> None:
        intermediate = mlp.intermediate
        self.gate_up = GateUp(
            backend,
            backend.gate_up_matrix(intermediate // ranks.size, hidden),
            {"gate_proj": intermediate, "up_proj": intermediate},
            bias=mlp.bias,
            ranks=ranks,
        )
        self.gate_up.activation = mlp.activation
        inputs = backend.matrix(hidden, intermediate // ranks.size)
        self.down = SummedLinear(backend, inputs, "down_proj", bias=mlp.bias, ranks=ranks)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(hidden))

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from self.gate_up.parameters()
        yield from self.down.parameters()
