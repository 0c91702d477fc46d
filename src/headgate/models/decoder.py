"""The decoder shared by all families that a `ModelSpec` describes, and parts that other networks may use.

Hidden states are `[tokens, hidden]`, with the tokens of all slices one after another. The residual stream is one
tensor per step that every norm adds into. A layer is eight operations of the backend, if it has no norms of its own
results. The forward pass reads nothing from the device, so that it can be captured in a graph.

With several ranks, each has some heads and a part of the MLP; their results are summed twice per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Protocol

import torch

from headgate.layers.backend import KV, Backend, Rotary, Softmax
from headgate.layers.batch import Batch
from headgate.layers.expert_record import ExpertRecord
from headgate.layers.linear import Embedding, Linear, SummedLinear, Unembedding, cut
from headgate.layers.norm import Norm
from headgate.layers.parameter import Layer, WeightParameter, copied_to, rearranged, under
from headgate.layers.ranks import ALONE, Ranks, share
from headgate.layers.rotary import Rope
from headgate.models.mixture import Mixture
from headgate.models.mlp import MLP
from headgate.models.spec import AttentionSpec, Dense, Experts, LayerSpec, ModelSpec

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the rotary embedding; see `Rope.tables`


class Attention:
    def __init__(
        self, spec: ModelSpec, attention: AttentionSpec, backend: Backend, tables: Tables, ranks: Ranks
    ) -> None:
        self.backend = backend
        self.q_norm = norm_of(spec, backend, spec.head_dim) if attention.qk_norm else None
        self.k_norm = norm_of(spec, backend, spec.head_dim) if attention.qk_norm else None
        self.rotary = rotary_of(tables, self.q_norm, self.k_norm)
        self.ranks, self.heads = ranks, spec.heads
        self.softmax = Softmax(
            scale=spec.head_dim**-0.5 if attention.scale is None else attention.scale,
            window=attention.window,
            cap=attention.cap,
            sinks=torch.empty(spec.heads // ranks.size, device=backend.device) if attention.sinks else None,
        )
        self.order = row_order(attention.rope or spec.rope, spec.head_dim)
        self.whole_norm = WholeNorm(spec, backend, ranks) if attention.whole_qk_norm else None
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
        qkv = self.qkv(hidden)
        if self.whole_norm is not None:
            qkv = self.whole_norm(qkv)
        q = self.backend.rope_and_write(qkv, batch, self.rotary, kv)
        return self.out(self.backend.attention(q, kv, batch, self.softmax))

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        for name, parameter in self.qkv.parameters():
            yield name, parameter if name.startswith("v_proj") else self._ordered(parameter)
        yield from self.out.parameters()
        for prefix, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                for name, parameter in under(prefix, norm):
                    yield name, self._ordered(parameter)
        if self.whole_norm is not None:
            for name, parameter in self.whole_norm.parameters():
                yield name, self._ordered(parameter)
        if self.softmax.sinks is not None:
            write = cut(share(self.ranks, self.heads), copied_to(self.softmax.sinks))
            yield "sinks", WeightParameter((self.heads,), write, self.softmax.sinks)

    def _ordered(self, parameter: WeightParameter) -> WeightParameter:
        """A parameter with a row per dimension of some heads, in the order in which backends rotate dimensions."""
        if self.order is None:
            return parameter
        heads = torch.arange(0, parameter.shape[0], len(self.order))
        return rearranged(parameter, (heads[:, None] + self.order).flatten())


class WholeNorm:
    """Norms the queries of all heads together, and the keys. A rank has some heads and needs those of the others."""

    def __init__(self, spec: ModelSpec, backend: Backend, ranks: Ranks) -> None:
        self.ranks = ranks
        self.q = norm_of(spec, backend, spec.heads * spec.head_dim)
        self.k = norm_of(spec, backend, spec.kv_heads * spec.head_dim)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        mine = [share(self.ranks, len(norm.weight)) for norm in (self.q, self.k)]
        sizes = [part.stop - part.start for part in mine]
        q, k, v = torch.split(qkv, [*sizes, sizes[1]], dim=-1)
        q, k = (norm.alone(self.ranks.gather(x)) for norm, x in ((self.q, q), (self.k, k)))
        return torch.cat((q[:, mine[0]], k[:, mine[1]], v), dim=-1)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from under("q_norm", self.q)
        yield from under("k_norm", self.k)


def mlp_of(hidden: int, mlp: Dense | Experts, backend: Backend, ranks: Ranks) -> tuple[str, MLP | Mixture]:
    """The MLP of a layer, with its name in checkpoints."""
    match mlp:
        case Dense():
            return "mlp", MLP(hidden, mlp, backend, ranks)
        case Experts():
            return mlp.names.layer, Mixture(hidden, mlp, backend, ranks)


class DecoderLayer:
    def __init__(self, spec: ModelSpec, layer: LayerSpec, backend: Backend, tables: Tables, ranks: Ranks) -> None:
        self.norms = {name: norm_of(spec, backend, spec.hidden) for name in astuple(layer.norms) if name}
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            self.norms.get(name) for name in astuple(layer.norms)
        )
        self.multiplier = spec.residual_multiplier
        self.attention = Attention(spec, layer.attention, backend, tables, ranks)
        self.mlp_name, self.mlp = mlp_of(spec.hidden, layer.mlp, backend, ranks)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor, batch: Batch, kv: KV) -> torch.Tensor:
        hidden = self.attention(added(hidden, residual, self.before_attention), batch, kv)
        hidden = added(self._result(hidden, self.after_attention), residual, self.before_mlp)
        return self._result(self.mlp(hidden), self.after_mlp)

    def _result(self, hidden: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What attention or MLP adds to the residual stream."""
        hidden = hidden if norm is None else norm.alone(hidden)
        return hidden if self.multiplier == 1 else hidden.mul_(self.multiplier)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from under("self_attn", self.attention)
        yield from under(self.mlp_name, self.mlp)
        for name, norm in self.norms.items():
            yield from under(name, norm)


def added(hidden: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Add `hidden` into `residual`, in place; return the sum, normed if there is a norm."""
    return residual.add_(hidden) if norm is None else norm(hidden, residual)


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
        self.unused = spec.unused
        self.quantisation = spec.quantisation
        self.backend = backend
        # Rounded to the dtype, as in training.
        self.multiplier = torch.tensor(spec.embedding_multiplier, dtype=backend.dtype).item()
        self.unembedding = Unembedding(backend, spec.vocab, spec.hidden, ranks)
        self.embedding = self.unembedding if spec.tied else Embedding(backend, spec.vocab, spec.hidden, ranks)
        tables = {rope: tables_of(rope, spec, backend) for rope in spec.ropes}
        self.layers = [build_layer(spec, layer, backend, tables[spec.rope_of(layer)], ranks) for layer in spec.layers]
        self.norm = norm_of(spec, backend, spec.hidden)
        layout = spec.kv_layout
        self.places, self.caches = layout.places, layout.caches
        self.record: ExpertRecord | None = None

    def record_experts(self, record: ExpertRecord) -> None:
        """Write the experts of every token to `record`, from the next step on."""
        self.record = record
        for layer in self.layers:
            if isinstance(layer, DecoderLayer) and isinstance(layer.mlp, Mixture):
                layer.mlp.record = record

    def __call__(self, batch: Batch, kv: list[KV]) -> torch.Tensor:
        """Return the hidden states of all tokens, normed and ready for `logits`."""
        hidden = self.embedding.embed(batch.tokens)
        if self.multiplier != 1:
            hidden = hidden.mul_(self.multiplier)
        residual = torch.zeros_like(hidden)
        batches = batch.groups or (batch,)
        for layer, (group, cache) in zip(self.layers, self.places, strict=True):
            hidden = layer(hidden, residual, batches[group], kv[cache])
        if self.record is not None:
            self.record.write(batch.slots)
        return self.norm(hidden, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden` in float32, `[rows, vocab]`."""
        logits = self.unembedding(hidden)
        if self.spec.logits_divisor != 1:
            logits = logits.div_(self.spec.logits_divisor)
        cap = self.spec.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[KV]:
        """Allocate the caches of all layers, in the backend's layout."""
        return [self.backend.allocate_kv(num_blocks, block_size) for _ in range(self.caches)]

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.caches * self.backend.kv_bytes_per_block(block_size)

    def parameters(self) -> Iterator[tuple[str, WeightParameter]]:
        yield from under("model.embed_tokens", self.embedding)
        for i, layer in enumerate(self.layers):
            yield from under(f"model.layers.{i}", layer)
        yield from under("model.norm", self.norm)
        if not self.spec.tied:
            yield from under("lm_head", self.unembedding)


def tables_of(rope: Rope, spec: ModelSpec, backend: Backend) -> Tables:
    cos, sin = (table.to(backend.device) for table in rope.tables(spec.head_dim, spec.max_positions))
    return cos, sin


def row_order(rope: Rope, head_dim: int) -> torch.Tensor | None:
    """The order in which the rows of a head are stored; None: that of the checkpoint."""
    return rope.halves(head_dim) if rope.interleaved else None


def norm_of(spec: ModelSpec, backend: Backend, size: int) -> Norm:
    return Norm(backend, size, spec.rms_eps, wide=spec.wide_norms, offset=spec.norm_offset)


def rotary_of(tables: Tables, q_norm: Norm | None, k_norm: Norm | None) -> Rotary:
    """Return the rotation of one layer: the tables, which layers share, and the layer's own norms."""
    if q_norm is None or k_norm is None:
        return Rotary(*tables)
    return Rotary(*tables, q_norm.weight, k_norm.weight, q_norm.eps)
