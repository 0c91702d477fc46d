"""Root mean square norms: of the residual stream, and of what a layer adds to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headgate.layers.backend import Backend
from headgate.layers.formats import Weight, floating_numbers
from headgate.layers.parameter import WeightParameter


class Norm:
    """`offset` is added to the weight of the checkpoint. A `wide` weight multiplies before the result is rounded."""

    def __init__(self, backend: Backend, size: int, eps: float, *, wide: bool = False, offset: float = 0.0) -> None:
        self.backend = backend
        self.weight = torch.empty(size, dtype=torch.float32 if wide else backend.dtype, device=backend.device)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` into `residual`, in place, and return the norm of the sum."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield "weight", WeightParameter(tuple(self.weight.shape), self._write, self.weight)

    def _write(self, weight: Weight) -> None:
        self.weight.copy_(floating_numbers(weight))
        if self.offset:
            self.weight.add_(self.offset)
