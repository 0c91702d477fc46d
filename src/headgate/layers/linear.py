"""Matrix products, whose rows may come from several tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from headgate.layers.backend import Backend, Matrix
from headgate.layers.parameter import Parameter, plain


class Linear:
    """One product for all `parts` (name to number of rows), whose outputs lie side by side."""

    def __init__(self, backend: Backend, matrix: Matrix, parts: Mapping[str, int], *, bias: bool = False) -> None:
        assert sum(parts.values()) == matrix.rows
        self.backend = backend
        self.matrix = matrix
        self.parts = parts
        self.bias = torch.empty(matrix.rows, dtype=backend.dtype, device=backend.device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.linear(x, self.matrix, self.bias)

    def pack(self, row: int, weight: torch.Tensor) -> None:
        self.backend.pack(self.matrix, weight, row)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        row = 0
        for name, rows in self.parts.items():
            yield f"{name}.weight", Parameter((rows, self.matrix.columns), partial(self.pack, row), self.matrix.data)
            if self.bias is not None:
                yield f"{name}.bias", plain(self.bias[row : row + rows])
            row += rows


class GateUp(Linear):
    """Two parts, the gate and what it gates: `silu(gate) * up`. Its matrix is a `gate_up_matrix`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.gate_up(x, self.matrix, self.bias)

    def pack(self, row: int, weight: torch.Tensor) -> None:
        self.backend.pack_gate_up(self.matrix, weight, row)


class Embedding:
    def __init__(self, backend: Backend, vocab: int, hidden: int) -> None:
        self.weight = torch.empty(vocab, hidden, dtype=backend.dtype, device=backend.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", plain(self.weight)


class Unembedding:
    """From hidden states to logits. Its matrix can serve as the embedding too, for models that tie the two."""

    def __init__(self, backend: Backend, vocab: int, hidden: int) -> None:
        self.backend = backend
        self.matrix = backend.matrix(vocab, hidden)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.backend.logits(hidden, self.matrix)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.backend.embed(tokens, self.matrix)

    def pack(self, weight: torch.Tensor) -> None:
        self.backend.pack(self.matrix, weight, 0)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", Parameter((self.matrix.rows, self.matrix.columns), self.pack, self.matrix.data)
