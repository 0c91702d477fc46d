"""The backend that uses our C++ kernels, for float32 and bfloat16 on x86.

Every kernel is batch-invariant, so this backend is always deterministic. The kernels define the layouts of matrices
and of the cache.
"""

from __future__ import annotations

import math

import torch

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
from headgate.layers.cpu import Kernels
from headgate.layers.cpu.kernels import LANES, kv_block_shapes
from headgate.layers.formats import Floating, Weight, floating_numbers


class CpuBackend:
    device = torch.device("cpu")
    kv_layout = f"cpu, {LANES} lanes"

    def __init__(self, kernels: Kernels, dtype: torch.dtype, heads: Heads) -> None:
        self.name = f"cpu, {kernels.isa}"
        self.kernels = kernels
        self.dtype = dtype
        self.heads = heads

    def matrix(self, rows: int, columns: int) -> Matrix:
        return Matrix(self.kernels.empty_packed(rows, columns, self.dtype), rows, columns, Floating(self.dtype))

    def vocabulary(self, rows: int, columns: int) -> Matrix:
        return self.matrix(rows, columns)

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        self.kernels.pack_into(matrix.data, floating_numbers(weight).cpu(), row)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return self.kernels.linear(x, matrix.data, matrix.rows, bias)

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return self.kernels.linear(x, matrix.data, matrix.rows, None, torch.float32)

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return self.kernels.unpack_rows(matrix.data, tokens, matrix.columns)

    def gate_up_matrix(self, intermediate: int, columns: int) -> Matrix:
        packed = self.kernels.empty_packed_pair(intermediate, columns, self.dtype)
        return Matrix(packed, 2 * intermediate, columns, Floating(self.dtype))

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        self.kernels.pack_pair_into(matrix.data, floating_numbers(weight).cpu(), 0, "up" if row else "gate")

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        gated = self.kernels.linear_silu_mul if activation == "silu" else self.kernels.linear_gelu_mul
        return gated(x, matrix.data, matrix.rows // 2, bias)

    def expert_matrices(self, count: int, rows: int, columns: int) -> ExpertMatrices:
        return self._stack(self.kernels.empty_packed_experts(count, rows, columns, self.dtype), rows, columns)

    def expert_gate_up_matrices(self, count: int, intermediate: int, columns: int) -> ExpertMatrices:
        stack = self.kernels.empty_packed_expert_pairs(count, intermediate, columns, self.dtype)
        return self._stack(stack, 2 * intermediate, columns)

    def _stack(self, stack: torch.Tensor, rows: int, columns: int) -> ExpertMatrices:
        return ExpertMatrices(tuple(Matrix(each, rows, columns, Floating(self.dtype)) for each in stack), stack)

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
        ids, weights = self.kernels.route(
            logits,
            bias,
            top=routing.top,
            sigmoid=routing.scores == "sigmoid",
            normalised=routing.normalised,
            scale=routing.scale,
            groups=routing.groups,
            top_groups=routing.top_groups,
        )
        return Routed(ids, weights)

    def experts(
        self,
        x: torch.Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        routed: Routed,
        gate: ClampedGate | None = None,
    ) -> torch.Tensor:
        assert gate_up.stacked is not None and down.stacked is not None
        return self.kernels.experts(
            x,
            gate_up.stacked,
            down.stacked,
            down.each[0].columns,
            routed.ids,
            routed.weights,
            gate_up.bias,
            down.bias,
            None if gate is None else (gate.alpha, gate.limit),
        )

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.kernels.add_rms_norm(x, residual, weight, eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.kernels.rms_norm(x, weight, eps)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        return KV(*self.kernels.empty_kv(num_blocks, block_size, self.heads.kv, self.heads.size, self.dtype))

    def kv_bytes_per_block(self, block_size: int) -> int:
        shapes = kv_block_shapes(block_size, self.heads.kv, self.heads.size, self.dtype)
        return sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        read = self.kernels.read_kv(kv.k, kv.v, slots_of(kv, blocks))
        shape = (len(blocks), block_size_of(kv), self.heads.kv, self.heads.size)
        return KV(*(tensor.view(shape) for tensor in read))

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        k, v = (new.to("cpu", self.dtype).flatten(0, 1).contiguous() for new in content)
        self.kernels.write_kv(kv.k, kv.v, slots_of(kv, blocks), k, v)

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        return self.kernels.rope_and_write(
            qkv,
            batch.positions,
            rotary.cos,
            rotary.sin,
            rotary.q_norm,
            rotary.k_norm,
            rotary.eps,
            kv.k,
            kv.v,
            batch.slots,
            self.heads.query,
            self.heads.kv,
            self.heads.size,
        )

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, softmax: Softmax) -> torch.Tensor:
        out = self.kernels.attention(
            q,
            kv.k,
            kv.v,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            softmax.scale,
            softmax.window or 0,
            softmax.cap or 0.0,
            softmax.sinks,
        )
        return out.view(len(q), -1)


def block_size_of(kv: KV) -> int:
    return kv.k.size(2) * LANES


def slots_of(kv: KV, blocks: torch.Tensor) -> torch.Tensor:
    size = block_size_of(kv)
    return (blocks[:, None].long() * size + torch.arange(size)).flatten()
