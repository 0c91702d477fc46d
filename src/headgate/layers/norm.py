"""Root mean square norms: of the residual stream, and of what a layer adds to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headgate.layers.backend import Backend
from headgate.layers.parameter import WeightParameter, tensor_parameter


class Norm:
    def __init__(self, backend: Backend, size: int, eps: float) -> None:
        self.backend = backend
        self.weight = torch.empty(size, dtype=backend.dtype, device=backend.device)
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` into `residual`, in place, and return the norm of the sum."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x`."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield "weight", tensor_parameter(self.weight)
