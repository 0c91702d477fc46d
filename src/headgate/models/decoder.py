"""The decoder shared by Llama, Mistral, Qwen2 and Qwen3, and parts that other networks may use.

Hidden states are `[tokens, hidden]`, with the tokens of all slices one after another. The residual stream is one
tensor per step that every norm adds into. A layer is eight operations of the backend. The forward pass reads nothing
from the device, so that it can be captured in a graph.

With several ranks, each has some heads and a part of the MLP; their results are summed twice per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from headgate.layers.backend import KV, Backend, Rotary
from headgate.layers.batch import Batch
from headgate.layers.linear import Embedding, Linear, SummedLinear, Unembedding
from headgate.layers.norm import Norm
from headgate.layers.parameter import Layer, WeightParameter, tensor_parameter, under
from headgate.layers.ranks import ALONE, Ranks
from headgate.models.mixture import Mixture
from headgate.models.mlp import MLP
from headgate.models.spec import AttentionSpec, Dense, Experts, LayerSpec, ModelSpec

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the rotary embedding; see `Rope.tables`


class Attention:
    def __init__(
        self, spec: ModelSpec, attention: AttentionSpec, backend: Backend, tables: Tables, ranks: Ranks
    ) -> None:
        self.backend = backend
        self.rotary = rotary_of(spec, attention, backend, tables)
        self.window = attention.window
        self.scale = spec.head_dim**-0.5
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = Linear(
            backend,
            backend.matrix((q + 2 * kv) // ranks.size, spec.hidden),
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=attention.qkv_bias,
            ranks=ranks,
        )
        inputs = backend.matrix(spec.hidden, q // ranks.size)
        self.out = SummedLinear(backend, inputs, "o_proj", bias=attention.out_bias, ranks=ranks)

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: KV) -> torch.Tensor:
        q = self.backend.rope_and_write(self.qkv(hidden), batch, self.rotary, kv)
        return self.out(self.backend.attention(q, kv, batch, self.scale, self.window))

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from self.qkv.parameters()
        yield from self.out.parameters()
        if self.rotary.q_norm is not None and self.rotary.k_norm is not None:
            yield "q_norm.weight", tensor_parameter(self.rotary.q_norm)
            yield "k_norm.weight", tensor_parameter(self.rotary.k_norm)


def mlp_of(hidden: int, mlp: Dense | Experts, backend: Backend, ranks: Ranks) -> tuple[str, MLP | Mixture]:
    """The MLP of a layer, with its name in checkpoints."""
    match mlp:
        case Dense():
            return "mlp", MLP(hidden, mlp, backend, ranks)
        case Experts():
            return mlp.names.layer, Mixture(hidden, mlp, backend, ranks)


class DecoderLayer:
    def __init__(self, spec: ModelSpec, layer: LayerSpec, backend: Backend, tables: Tables, ranks: Ranks) -> None:
        self.input_norm = Norm(backend, spec.hidden, spec.rms_eps)
        self.attention = Attention(spec, layer.attention, backend, tables, ranks)
        self.attention_norm = Norm(backend, spec.hidden, spec.rms_eps)
        self.mlp_name, self.mlp = mlp_of(spec.hidden, layer.mlp, backend, ranks)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor, batch: Batch, kv: KV) -> torch.Tensor:
        hidden = self.attention(self.input_norm(hidden, residual), batch, kv)
        return self.mlp(self.attention_norm(hidden, residual))

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from under("input_layernorm", self.input_norm)
        yield from under("self_attn", self.attention)
        yield from under("post_attention_layernorm", self.attention_norm)
        yield from under(self.mlp_name, self.mlp)


class NetworkLayer(Layer, Protocol):
    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor, batch: Batch, kv: KV) -> torch.Tensor:
        """Compute one layer. `hidden` is yet to be added to `residual`, and so is the returned tensor."""


BuildLayer = Callable[[ModelSpec, LayerSpec, Backend, Tables, Ranks], NetworkLayer]


class Decoder:
    """A stack of layers between an embedding and the output matrix. `build_layer` allows other kinds of layers."""

    def __init__(
        self, spec: ModelSpec, backend: Backend, ranks: Ranks = ALONE, *, build_layer: BuildLayer = DecoderLayer
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.unembedding = Unembedding(backend, spec.vocab, spec.hidden, ranks)
        self.embedding = self.unembedding if spec.tied else Embedding(backend, spec.vocab, spec.hidden, ranks)
        cos, sin = (table.to(backend.device) for table in spec.rope.tables(spec.head_dim, spec.max_positions))
        self.layers = [build_layer(spec, layer, backend, (cos, sin), ranks) for layer in spec.layers]
        self.norm = Norm(backend, spec.hidden, spec.rms_eps)

    def __call__(self, batch: Batch, kv: list[KV]) -> torch.Tensor:
        """Return the hidden states of all tokens, normed and ready for `logits`."""
        hidden = self.embedding.embed(batch.tokens)
        residual = torch.zeros_like(hidden)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, residual, batch, layer_kv)
        return self.norm(hidden, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden` in float32, `[rows, vocab]`."""
        return self.unembedding(hidden)

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[KV]:
        """Allocate the cache of each layer, in the backend's layout."""
        return [self.backend.allocate_kv(num_blocks, block_size) for _ in self.layers]

    def kv_bytes_per_block(self, block_size: int) -> int:
        return len(self.layers) * self.backend.kv_bytes_per_block(block_size)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from under("model.embed_tokens", self.embedding)
        for i, layer in enumerate(self.layers):
            yield from under(f"model.layers.{i}", layer)
        yield from under("model.norm", self.norm)
        if not self.spec.tied:
            yield from under("lm_head", self.unembedding)


def rotary_of(spec: ModelSpec, attention: AttentionSpec, backend: Backend, tables: Tables) -> Rotary:
    """Return the rotation of one layer: the tables, which all layers share, and the layer's own norms."""
    if not attention.qk_norm:
        return Rotary(*tables)
    q_norm, k_norm = torch.empty(2, spec.head_dim, dtype=backend.dtype, device=backend.device)
    return Rotary(*tables, q_norm, k_norm, spec.rms_eps)
