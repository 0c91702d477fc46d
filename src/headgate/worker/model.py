"""What the worker needs of a network."""

from __future__ import annotations

from typing import Protocol

import torch

from headgate.layers.backend import KV
from headgate.layers.batch import Batch
from headgate.worker.weights import Loadable


class Model(Loadable, Protocol):
    def __call__(self, batch: Batch, kv: list[KV]) -> torch.Tensor:
        """Hidden states [T, hidden]; writes the KV of the batch."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of some hidden states [R, hidden]: [R, vocab] float32, the caller's to spoil."""
