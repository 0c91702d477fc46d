"""What a dense decoder is, in numbers: all that the network, the cache and the scheduler need to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from headgate.errors import UnsupportedModel
from headgate.layers.rotary import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Valid once constructed."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    rms_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: how many tokens back it sees, itself included; None is all
    dtype: torch.dtype  # of the checkpoint
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the output matrix is the embedding
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise UnsupportedModel(f"a model with {field.name} = {value} makes no sense; it must be at least 1")
        if not 0 <= self.rms_eps < 1:
            raise UnsupportedModel(f"a model with rms_norm_eps = {self.rms_eps} makes no sense")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head size {self.head_dim} is odd, and rotary embedding turns pairs")
        if any(window is not None and window < 1 for window in self.windows):
            raise UnsupportedModel("a sliding window shorter than one token sees nothing")
        if len(self.windows) != self.layers:
            raise UnsupportedModel(f"{len(self.windows)} layer types are given for {self.layers} layers")

    @property
    def num_parameters(self) -> int:
        """Of all matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.intermediate * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden
