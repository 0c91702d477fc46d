"""The interface of a model: everything that the device package needs, independent of the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from headgate.layers.backend import KV, Backend
from headgate.layers.batch import Batch
from headgate.layers.expert_record import ExpertRecord
from headgate.layers.parameter import WeightParameter
from headgate.models.spec import ModelSpec


class Model(Protocol):
    """Runs steps and accepts weights."""

    def __call__(self, batch: Batch, kv: list[KV]) -> torch.Tensor:
        """Write the KV of the batch and return the hidden states [T, hidden] of all tokens, ready for `logits`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, vocab] of hidden states [R, hidden], in float32; the caller may overwrite them."""

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        """Yield the parameters with their checkpoint names."""


class Network(Model, Protocol):
    """A model with the information needed to size its cache and rows."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def backend(self) -> Backend: ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[KV]:
        """Allocate the caches that the layers share, in the backend's layout; see `kv_layout.py`."""

    def record_experts(self, record: ExpertRecord) -> None:
        """Write the experts of every token to `record`, from the next step on."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes per block, which has room for one group of layers."""
