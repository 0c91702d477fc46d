"""A mixture of experts: a router, the experts, and the MLP that all tokens share, if there is one.

With several ranks, each has a part of every expert's inner dimension, as with a dense MLP; every rank routes all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from headgate.layers.backend import Backend, ExpertMatrices
from headgate.layers.expert_record import ExpertRecord
from headgate.layers.formats import Weight, floating, floating_numbers
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
        self.router_bias = torch.empty(experts.count, device=backend.device) if experts.router_bias else None
        self.correction_bias = torch.empty(experts.count, device=backend.device) if experts.correction_bias else None
        self.correction_shape = experts.correction_bias
        self.gate = experts.gate
        self.experts = (InterleavedExperts if experts.interleaved else ExpertWeights)(hidden, experts, backend, ranks)
        self.shared = MLP(hidden, Dense(experts.shared), backend, ranks) if experts.shared else None
        self.shared_gate = Linear(backend, backend.matrix(1, hidden), {"": 1}) if experts.shared_gate else None
        self.names = experts.names
        self.record: ExpertRecord | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.backend.logits(hidden, self.router)
        if self.router_bias is not None:
            logits += self.router_bias
        routed = self.backend.route(logits, self.routing, self.correction_bias)
        if self.record is not None:
            self.record.note(routed.ids)
        out = self.backend.experts(hidden, self.experts.gate_up, self.experts.down, routed, self.gate)
        out = self.ranks.sum(out)
        return out if self.shared is None else out.add_(self._shared(self.shared, hidden))

    def _shared(self, mlp: MLP, hidden: torch.Tensor) -> torch.Tensor:
        out = mlp(hidden)
        return out if self.shared_gate is None else out.mul_(self.shared_gate(hidden).sigmoid_())

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        pack = partial(self.backend.pack, self.router, row=0)
        shape = (self.router.rows, self.router.columns)
        yield f"{self.names.router}.weight", WeightParameter(shape, pack, self.router.data)
        if self.router_bias is not None:
            yield f"{self.names.router}.bias", tensor_parameter(self.router_bias)
        if self.correction_bias is not None:
            yield self.names.correction_bias, tensor_parameter(self.correction_bias.view(self.correction_shape))
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
        if experts.bias:
            self.gate_up = replace(self.gate_up, bias=self._empty(experts.count, 2 * width))
            self.down_bias = self._empty(experts.count, hidden)
            if ranks.rank == 0:  # one rank adds it, so that the sum contains it once
                self.down = replace(self.down, bias=self.down_bias)

    def _empty(self, count: int, numbers: int) -> torch.Tensor:
        return torch.empty(count, numbers, dtype=self.backend.dtype, device=self.backend.device)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        rows, columns = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        width = self.mine.stop - self.mine.start
        for i in range(len(self.down.each)):
            for name, row in ((self.names.gate, 0), (self.names.up, width)):
                pack = partial(self._pack_rows, i, row)
                yield f"{i}.{name}.weight", self._parameter(self.gate_up, i, row, width, rows, pack)
            pack = partial(self._pack_columns, i)
            yield f"{i}.{self.names.down}.weight", self._parameter(self.down, i, 0, self.hidden, columns, pack)

    def _parameter(
        self,
        matrices: ExpertMatrices,
        expert: int,
        row: int,
        rows: int,
        shape: tuple[int, int],
        pack: Callable[[Weight], object],
    ) -> WeightParameter:
        matrix = matrices.each[expert]
        _, format = matrix.stored(row)
        keep = partial(self.backend.keep, matrix, row, rows)
        return WeightParameter(shape, pack, matrices.tensor_of(expert), None, format, keep)

    def _pack_rows(self, expert: int, row: int, weight: Weight) -> None:
        self.backend.pack_gate_up(self.gate_up.each[expert], weight.rows(self.mine), row)

    def _pack_columns(self, expert: int, weight: Weight) -> None:
        self.backend.pack(self.down.each[expert], weight.columns(self.mine), 0)


class InterleavedExperts(ExpertWeights):
    """Experts that a checkpoint stores as gpt-oss does, in one tensor per kind, with biases.

    Weights are `[experts, inputs, outputs]`; the outputs of gate and up take turns.
    """

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        count, hidden, width = len(self.down.each), self.hidden, self.intermediate
        shape = (count, hidden, 2 * width)
        yield "gate_up_proj", WeightParameter(shape, self._pack_gate_up, self.gate_up.tensor_of(0))
        yield "down_proj", WeightParameter((count, width, hidden), self._pack_down, self.down.tensor_of(0))
        assert self.gate_up.bias is not None
        yield "gate_up_proj_bias", WeightParameter((count, 2 * width), self._write_gate_up_bias, self.gate_up.bias)
        yield "down_proj_bias", tensor_parameter(self.down_bias)

    def _pack_gate_up(self, weight: Weight) -> None:
        for i, numbers in enumerate(floating_numbers(weight)):
            for first in (0, 1):  # gate, up
                rows = numbers[:, first::2][:, self.mine].T.contiguous()
                self.backend.pack_gate_up(self.gate_up.each[i], floating(rows), first * len(rows))

    def _pack_down(self, weight: Weight) -> None:
        for i, numbers in enumerate(floating_numbers(weight)):
            self.backend.pack(self.down.each[i], floating(numbers[self.mine].T.contiguous()), 0)

    def _write_gate_up_bias(self, weight: Weight) -> None:
        numbers = floating_numbers(weight)
        parts = (numbers[:, first::2][:, self.mine] for first in (0, 1))
        assert self.gate_up.bias is not None
        self.gate_up.bias.copy_(torch.cat(tuple(parts), dim=1))
