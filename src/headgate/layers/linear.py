"""Matrix products. A matrix may contain several checkpoint tensors, and a rank may hold only a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from headgate.layers.backend import Activation, Backend, Matrix
from headgate.layers.formats import Weight
from headgate.layers.parameter import WeightParameter, copied_to, tensor_parameter
from headgate.layers.ranks import ALONE, Ranks, share


class Linear:
    """One matrix product for all `parts` (name to number of rows); the outputs of the parts are adjacent.

    With several ranks, each has its share of the rows of every part, and computes that share of the outputs.
    """

    def __init__(
        self, backend: Backend, matrix: Matrix, parts: Mapping[str, int], *, bias: bool = False, ranks: Ranks = ALONE
    ) -> None:
        assert sum(parts.values()) == matrix.rows * ranks.size
        self.backend = backend
        self.matrix = matrix
        self.parts = parts
        self.ranks = ranks
        self.bias = torch.empty(matrix.rows, dtype=backend.dtype, device=backend.device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.linear(x, self.matrix, self.bias)

    def pack(self, row: int, weight: Weight) -> None:
        self.backend.pack(self.matrix, weight, row)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        row = 0
        for name, rows in self.parts.items():
            mine = share(self.ranks, rows)
            yield f"{name}.weight", self._rows(mine, rows, row)
            end = row + mine.stop - mine.start
            if self.bias is not None:
                place = self.bias[row:end]
                yield f"{name}.bias", WeightParameter((rows,), cut(mine, copied_to(place)), place)
            row = end

    def _rows(self, mine: slice, rows: int, row: int) -> WeightParameter:
        return matrix_rows(self.backend, self.matrix, rows, mine, row, cut(mine, partial(self.pack, row)))


class GateUp(Linear):
    """Two parts, gate and up: computes `activation(gate) * up`. Its matrix is a `gate_up_matrix`."""

    activation: Activation = "silu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.gate_up(x, self.matrix, self.bias, self.activation)

    def pack(self, row: int, weight: Weight) -> None:
        self.backend.pack_gate_up(self.matrix, weight, row)


class SummedLinear:
    """A product whose inputs are spread over ranks like the outputs of a `Linear`: each rank has some columns."""

    def __init__(
        self, backend: Backend, matrix: Matrix, name: str, *, bias: bool = False, ranks: Ranks = ALONE
    ) -> None:
        self.backend = backend
        self.matrix = matrix
        self.name = name
        self.ranks = ranks
        self.bias = torch.empty(matrix.rows, dtype=backend.dtype, device=backend.device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.ranks.rank == 0 else None  # one rank adds it, so that the sum contains it once
        return self.ranks.sum(self.backend.linear(x, self.matrix, bias))

    def pack(self, weight: Weight) -> None:
        columns = share(self.ranks, self.matrix.columns * self.ranks.size)
        self.backend.pack(self.matrix, weight.columns(columns), 0)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        rows, whole = self.matrix.rows, (self.matrix.rows, self.matrix.columns * self.ranks.size)
        parameter = matrix_rows(self.backend, self.matrix, rows, slice(0, rows), 0, self.pack)
        yield f"{self.name}.weight", replace(parameter, shape=whole)
        if self.bias is not None:
            yield f"{self.name}.bias", tensor_parameter(self.bias)


class Embedding:
    """The token embedding. With several ranks, each has the rows of some tokens."""

    def __init__(self, backend: Backend, vocab: int, hidden: int, ranks: Ranks = ALONE) -> None:
        self.backend = backend
        self.ranks = ranks
        self.vocab = vocab
        self.mine = share(ranks, vocab)
        self.matrix = backend.vocabulary(self.mine.stop - self.mine.start, hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens, self.mine, self.ranks, lambda ids: self.backend.embed(ids, self.matrix))

    def pack(self, weight: Weight) -> None:
        self.backend.pack(self.matrix, weight, 0)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        write = cut(self.mine, self.pack)
        yield "weight", matrix_rows(self.backend, self.matrix, self.vocab, self.mine, 0, write)


class Unembedding:
    """Computes logits from hidden states. With tied embeddings, its matrix is also the embedding."""

    def __init__(self, backend: Backend, vocab: int, hidden: int, ranks: Ranks = ALONE) -> None:
        self.backend = backend
        self.ranks = ranks
        self.vocab = vocab
        self.mine = share(ranks, vocab)
        # Every rank has the same number of rows, so that logits can be gathered; excess rows at the end are cut off.
        self.matrix = backend.vocabulary(-(-vocab // ranks.size), hidden)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ranks.gather(self.backend.logits(hidden, self.matrix))[:, : self.vocab]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens, self.mine, self.ranks, lambda ids: self.backend.embed(ids, self.matrix))

    def pack(self, weight: Weight) -> None:
        self.backend.pack(self.matrix, weight, 0)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        parameter = matrix_rows(self.backend, self.matrix, self.vocab, self.mine, 0, cut(self.mine, self.pack))
        yield "weight", replace(parameter, keep=partial(self.backend.keep, self.matrix, 0, self.matrix.rows))


def matrix_rows(
    backend: Backend, matrix: Matrix, rows: int, mine: slice, row: int, write: Callable[[Weight], object]
) -> WeightParameter:
    """The parameter of `rows` rows of which `matrix` has those in `mine`, from `row` on."""
    tensor, format = matrix.stored(row)
    keep = partial(backend.keep, matrix, row, mine.stop - mine.start)
    return WeightParameter((rows, matrix.columns), write, tensor, matrix.scale, format, keep)


def cut(rows: slice, write: Callable[[Weight], object]) -> Callable[[Weight], object]:
    """Return a function that writes only these rows of a weight."""
    return lambda weight: write(weight.rows(rows))


def look_up(
    tokens: torch.Tensor, mine: slice, ranks: Ranks, embed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the embeddings of `tokens`; this rank has the embeddings of the token ids in `mine`."""
    if ranks.size == 1:
        return embed(tokens)
    known = (tokens >= mine.start) & (tokens < mine.stop)
    rows = embed(torch.where(known, tokens - mine.start, 0))
    # One rank has the row and all others have zeros, so the sum is exact.
    return ranks.sum(rows.masked_fill(~known[:, None], 0))
