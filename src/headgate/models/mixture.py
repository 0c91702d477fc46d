"""A mixture of experts: a router, the experts, and the MLP that all tokens share, if there is one.

With several ranks, each has a part of every expert's inner dimension, as with a dense MLP; every rank routes all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headgate.layers.backend import Backend, ExpertMatrices
from headgate.layers.formats import Weight
from headgate.layers.linear import Linear
from headgate.layers.parameter import WeightParameter, tensor_parameter, under
from headgate.layers.ranks import Ranks, share
from headgate.models.mlp import MLP
from headgate.models.spec import Dense, Experts


class Mixture:
    def __init__(self, hidden: int, experts: Experts, backend: Backend, ranks: Ranks) -> None:
        self.backend = backend
        self.routing = experts.routing
        self.ranks = ranks
        # The router's scores decide which experts run, so its weights are never quantised.
        self.router = backend.vocabulary(experts.count, hidden)
        self.bias = torch.empty(experts.count, device=backend.device) if experts.correction_bias else None
        self.experts = ExpertWeights(hidden, experts, backend, ranks)
        self.shared = MLP(hidden, Dense(experts.shared), backend, ranks) if experts.shared else None
        self.shared_gate = Linear(backend, backend.matrix(1, hidden), {"": 1}) if experts.shared_gate else None
        self.names = experts.names

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.backend.route(self.backend.logits(hidden, self.router), self.routing, self.bias)
        out = self.ranks.sum(self.backend.experts(hidden, self.experts.gate_up, self.experts.down, routed))
        return out if self.shared is None else out.add_(self._shared(self.shared, hidden))

    def _shared(self, mlp: MLP, hidden: torch.Tensor) -> torch.Tensor:
        out = mlp(hidden)
        return out if self.shared_gate is None else out.mul_(self.shared_gate(hidden).sigmoid_())

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        pack = partial(self.backend.pack, self.router, row=0)
        yield "gate.weight", WeightParameter((self.router.rows, self.router.columns), pack, self.router.data)
        if self.bias is not None:
            yield self.names.bias, tensor_parameter(self.bias)
        yield from under("experts", self.experts)
        if self.shared is not None:
            yield from under(self.names.shared, self.shared)
        if self.shared_gate is not None:
            for name, parameter in self.shared_gate.parameters():
                yield f"{self.names.shared}_gate{name}", parameter


class ExpertWeights:
    """The matrices of all experts, or one rank's part of each."""

    def __init__(self, hidden: int, experts: Experts, backend: Backend, ranks: Ranks) -> None:
        self.backend = backend
        self.names = experts.names
        self.hidden, self.intermediate = hidden, experts.intermediate
        self.mine = share(ranks, experts.intermediate)
        width = self.mine.stop - self.mine.start
        self.gate_up: ExpertMatrices = backend.expert_gate_up_matrices(experts.count, width, hidden)
        self.down: ExpertMatrices = backend.expert_matrices(experts.count, hidden, width)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        rows, columns = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        width = self.mine.stop - self.mine.start
        for i in range(len(self.down.each)):
            gate_up, down = self.gate_up.tensor_of(i), self.down.tensor_of(i)
            for name, row in ((self.names.gate, 0), (self.names.up, width)):
                yield f"{i}.{name}.weight", WeightParameter(rows, partial(self._pack_rows, i, row), gate_up)
            yield f"{i}.{self.names.down}.weight", WeightParameter(columns, partial(self._pack_columns, i), down)

    def _pack_rows(self, expert: int, row: int, weight: Weight) -> None:
        self.backend.pack_gate_up(self.gate_up.each[expert], weight.rows(self.mine), row)

    def _pack_columns(self, expert: int, weight: Weight) -> None:
        self.backend.pack(self.down.each[expert], weight.columns(self.mine), 0)
