"""The reference backend, in torch, for any device. Other backends are compared with it.

It rounds where `transformers` does. Matrices are `[rows, columns]`, the cache is
`[blocks, block_size, kv heads, head size]`. `DeterministicTorchBackend` achieves batch invariance the slow way: every
reduction covers one row, with a shape that depends only on the position of that row's token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from headgate.layers.backend import (
    KV,
    Activation,
    ClampedGate,
    ExpertMatrices,
    Heads,
    Matrix,
    Rotary,
    Routed,
    Routing,
    Softmax,
)
from headgate.layers.batch import Batch
from headgate.layers.experts import clamped, compute_one_by_one, route
from headgate.layers.formats import Floating, Weight, WeightFormat, floating_numbers

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class TorchBackend:
    name = "torch"
    kv_layout = "tokens, heads"

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
        self.device = device
        self.dtype = dtype
        self.heads = heads

    def matrix(self, rows: int, columns: int) -> Matrix:
        return self.vocabulary(rows, columns)

    def vocabulary(self, rows: int, columns: int) -> Matrix:
        data = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return Matrix(data, rows, columns, Floating(self.dtype))

    def keep(self, matrix: Matrix, row: int, rows: int, format: WeightFormat) -> None:
        """Matrices have the dtype of the backend, or the format that was chosen for all of them."""

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        matrix.data[row : row + len(weight)].copy_(floating_numbers(weight))

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, matrix.data, bias)

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return self.linear(x, matrix, None).float()

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return F.embedding(tokens, matrix.data)

    def gate_up_matrix(self, intermediate: int, columns: int) -> Matrix:
        return self.matrix(2 * intermediate, columns)

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        self.pack(matrix, weight, row)

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        gate, up = self.linear(x, matrix, bias).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def expert_matrices(self, count: int, rows: int, columns: int) -> ExpertMatrices:
        return ExpertMatrices(tuple(self.matrix(rows, columns) for _ in range(count)))

    def expert_gate_up_matrices(self, count: int, intermediate: int, columns: int) -> ExpertMatrices:
        return ExpertMatrices(tuple(self.gate_up_matrix(intermediate, columns) for _ in range(count)))

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
        return route(logits, routing, bias)

    def experts(
        self,
        x: torch.Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        routed: Routed,
        gate: ClampedGate | None = None,
    ) -> torch.Tensor:
        def mlp(rows: torch.Tensor, expert: int) -> torch.Tensor:
            first, bias = gate_up.each[expert], gate_up.bias_of(expert)
            inner = self.gate_up(rows, first, bias) if gate is None else self.clamped_gate_up(rows, first, bias, gate)
            return self.linear(inner, down.each[expert], down.bias_of(expert))

        return compute_one_by_one(x, routed, len(down.each), mlp)

    def clamped_gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, gate: ClampedGate
    ) -> torch.Tensor:
        return clamped(self.linear(x, matrix, bias), gate)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        shape = (num_blocks, block_size, self.heads.kv, self.heads.size)
        return KV(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * block_size * self.heads.kv * self.heads.size * self.dtype.itemsize

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        return KV(kv.k[blocks], kv.v[blocks])

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        for cache, new in zip(kv, content, strict=True):
            cache[blocks] = new.to(cache)

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        heads = self.heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, heads.size), [heads.query, heads.kv, heads.kv], dim=1)
        if rotary.q_norm is not None and rotary.k_norm is not None:
            q, k = self.rms_norm(q, rotary.q_norm, rotary.eps), self.rms_norm(k, rotary.k_norm, rotary.eps)
        cos, sin = (table[batch.positions, None].to(qkv.dtype) for table in (rotary.cos, rotary.sin))
        kv.k.flatten(0, 1)[batch.slots] = rotate(k, cos, sin)
        kv.v.flatten(0, 1)[batch.slots] = v
        return rotate(q, cos, sin)

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, softmax: Softmax) -> torch.Tensor:
        out = torch.empty_like(q)
        for span in self.spans(batch):
            first = span.first_visible(softmax.window, kv.k.shape[1])
            k, v = gather(kv, span.blocks, first, span.end)
            mask = visible(span, softmax.window, q.device)[:, first:]
            out[span.rows] = attend(q[span.rows], k, v, mask, softmax)
        return out.flatten(1)

    def spans(self, batch: Batch) -> Iterator[Span]:
        """Yield the parts that are computed separately: here one per slice, all its queries against all its keys."""
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for i, end in enumerate(contexts):
            yield Span(slice(starts[i], starts[i + 1]), batch.block_tables[i], end)


class DeterministicTorchBackend(TorchBackend):
    name = "torch, deterministic"

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return row_by_row(lambda row: F.linear(row, matrix.data, bias), x)

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        gate, up = self.linear(x, matrix, bias).chunk(2, dim=-1)
        return row_by_row(ACTIVATIONS[activation], gate) * up

    def clamped_gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, gate: ClampedGate
    ) -> torch.Tensor:
        return row_by_row(lambda row: clamped(row, gate), self.linear(x, matrix, bias))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return row_by_row(lambda row: rms_norm(row, weight, eps), x)

    def spans(self, batch: Batch) -> Iterator[Span]:
        """Yield one query at a time, against exactly the keys up to it: the shape depends only on its position."""
        for whole in super().spans(batch):
            count = whole.rows.stop - whole.rows.start
            for i in range(count):
                row = whole.rows.start + i
                yield Span(slice(row, row + 1), whole.blocks, whole.end - count + i + 1)


@dataclass(frozen=True, slots=True)
class Span:
    """The queries `rows` of a batch: the last positions before `end` of the sequence in `blocks`."""

    rows: slice
    blocks: torch.Tensor
    end: int

    def first_visible(self, window: int | None, block_size: int) -> int:
        """The start of the first block that a query sees. Those before it may belong to other sequences by now."""
        first_query = self.end - (self.rows.stop - self.rows.start)
        return 0 if window is None else max(0, first_query - window + 1) // block_size * block_size


def row_by_row(operation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply `operation` to each row separately, because the order of a library's sums may depend on the alignment."""
    if len(x) == 0:
        return operation(x)
    return torch.stack([operation(row.clone(memory_format=torch.contiguous_format)) for row in x])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype) if weight.dtype == torch.float32 else wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def gather(kv: KV, blocks: torch.Tensor, start: int, end: int) -> KV:
    """The keys and values of positions `start` to `end - 1`; `start` is that of a block."""
    size = kv.k.shape[1]
    used = blocks[start // size : -(-end // size)]
    return KV(kv.k[used].flatten(0, 1)[: end - start], kv.v[used].flatten(0, 1)[: end - start])


def visible(span: Span, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys each query sees, as `[queries, keys]`."""
    queries = torch.arange(span.end - (span.rows.stop - span.rows.start), span.end, device=device)[:, None]
    keys = torch.arange(span.end, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if softmax.cap is not None or softmax.sinks is not None:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return (key_weights(q, k, mask, softmax).to(v.dtype) @ v)[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def key_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Return the weights `[1, heads, queries, keys]` in float32, step by step."""
    scores = q.float() @ k.float().transpose(-1, -2) * softmax.scale
    if softmax.cap is not None:
        scores = (scores / softmax.cap).tanh() * softmax.cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if softmax.sinks is None:
        return scores.softmax(-1)
    sinks = softmax.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
