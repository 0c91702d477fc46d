"""The backend for CUDA devices: cuBLAS for matrices, Triton for everything else.

Matrices are `[rows, columns]` as in the torch backend; the cache is `[blocks, kv heads, block_size, head size]`, so
that a head of a block is contiguous. Supports bfloat16, float16 and float32. Products in float32 are never rounded to
tf32.

With `Fp8.weights` the matrices of the layers are stored in eight bits with a scale per row. A single row of
activations is not rounded, because reading the weights takes all the time then. Several rows are rounded to eight
bits too, each with its own scale, and multiplied in eight bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headgate.layers.backend import (
    KV,
    NO_FP8,
    Activation,
    ClampedGate,
    ExpertMatrices,
    Fp8,
    Heads,
    Matrix,
    Rotary,
    Routed,
    Routing,
    Softmax,
)
from headgate.layers.batch import Batch
from headgate.layers.formats import FP8, Floating, Fp8Rows, Weight, fp8_rows
from headgate.layers.torch_backend import TorchBackend
from headgate.layers.triton import experts
from headgate.layers.triton.attention import Scratch, decode, prefill
from headgate.layers.triton.elementwise import add_rms_norm, gate_mul, rms_norm
from headgate.layers.triton.matmul import (
    MAX_ROWS,
    MAX_ROWS_SMALL,
    MIN_WIDTH,
    SMALL,
    Cut,
    invariant_cut,
    small_linear,
    vector_linear,
)
from headgate.layers.triton.rope import rope_and_write
from headgate.layers.triton.rounding import round_rows

# Matrices of at most this many rows are multiplied by kernels that start before the previous one has ended.
MOST_ROUTED = 512
ROUTER = Cut(16, 256, 4, 4)


class TritonBackend(TorchBackend):
    name = "triton"
    kv_layout = "heads, tokens"

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads, fp8: Fp8 = NO_FP8) -> None:
        super().__init__(device, dtype, heads)
        self.scratch = Scratch(device)
        self.fp8 = fp8
        self.kv_dtype = FP8 if fp8.kv else dtype
        if fp8.weights:
            self.name += ", fp8"
            self.kv_layout += ", by fp8 weights"

    def matrix(self, rows: int, columns: int) -> Matrix:
        if not self.fp8.weights:
            return super().matrix(rows, columns)
        data = torch.empty(rows, columns, dtype=FP8, device=self.device)
        return Matrix(data, rows, columns, Fp8Rows(), torch.empty(rows, device=self.device))

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        if isinstance(matrix.format, Floating):
            super().pack(matrix, weight, row)
            return
        kept = fp8_rows(weight.to(self.device))
        assert matrix.scale is not None and kept.scale is not None
        matrix.data[row : row + len(weight)].copy_(kept.numbers)
        matrix.scale[row : row + len(weight)].copy_(kept.scale)

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if self.dtype == torch.float32 or not x.is_cuda:
            return F.linear(x, matrix.data).float()
        if matrix.rows <= MOST_ROUTED and len(x) <= MAX_ROWS:  # a router of experts
            if len(x) == 1:
                return vector_linear(x, matrix, None, out_dtype=torch.float32)
            return small_linear(x, matrix, None, cut=ROUTER, out_dtype=torch.float32)
        # The product is summed in float32 anyway; rounding it to the dtype would create ties between logits.
        return torch.mm(x, matrix.data.t(), out_dtype=torch.float32)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) == 1:
            return vector_linear(x, matrix, bias)
        if self.beats_library(x, matrix):
            return small_linear(x, matrix, bias)
        return self.library_linear(x, matrix, bias)

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        if len(x) == 1:
            return vector_linear(x, matrix, bias, gated=activation)
        if self.beats_library(x, matrix):
            return small_linear(x, matrix, bias, gated=activation)
        return gate_mul(self.library_linear(x, matrix, bias), activation)

    def expert_matrices(self, count: int, rows: int, columns: int) -> ExpertMatrices:
        """Adjacent in memory, so that kernels find an expert by its number."""
        whole = self.matrix(count * rows, columns)
        data = whole.data.view(count, rows, columns)
        scales = None if whole.scale is None else whole.scale.view(count, rows)
        each = (
            Matrix(data[i], rows, columns, whole.format, None if scales is None else scales[i]) for i in range(count)
        )
        return ExpertMatrices(tuple(each), data, scales)

    def expert_gate_up_matrices(self, count: int, intermediate: int, columns: int) -> ExpertMatrices:
        return self.expert_matrices(count, 2 * intermediate, columns)

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
        return experts.route(logits, routing, bias)

    def experts(
        self,
        x: torch.Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        routed: Routed,
        gate: ClampedGate | None = None,
    ) -> torch.Tensor:
        return experts.compute(x, gate_up, down, routed, gate, roomy=self.scratch.roomy)

    def beats_library(self, x: torch.Tensor, matrix: Matrix) -> bool:
        """Whether our own product is faster than cuBLAS."""
        if matrix.scale is not None:
            return not fits_scaled(x, matrix)
        most = MAX_ROWS_SMALL if matrix.rows * matrix.columns <= SMALL else MAX_ROWS
        return 0 < len(x) <= most and matrix.rows >= MIN_WIDTH and x.dtype.itemsize == 2 and self.scratch.roomy

    def library_linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if matrix.scale is None:
            return F.linear(x, matrix.data, bias)
        numbers, scale = round_rows(x)
        out = torch._scaled_mm(
            numbers,
            matrix.data.t(),
            scale_a=scale[:, None],
            scale_b=matrix.scale[None, :],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out if bias is None else out.add_(bias)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        shape = (num_blocks, self.heads.kv, block_size, self.heads.size)
        return KV(*(torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(2)))

    def kv_bytes_per_block(self, block_size: int) -> int:
        return super().kv_bytes_per_block(block_size) // self.dtype.itemsize * self.kv_dtype.itemsize

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        stored = (bytes_of(cache)[blocks].view(cache.dtype) for cache in kv)
        return KV(*(blocks_read.to(self.dtype).transpose(1, 2).contiguous() for blocks_read in stored))

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        for cache, new in zip(kv, content, strict=True):
            # Torch cannot index 8-bit floating-point numbers, but can index bytes.
            as_stored = new.transpose(1, 2).to(cache).contiguous()
            bytes_of(cache)[blocks] = bytes_of(as_stored)

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        return rope_and_write(qkv, batch.positions, batch.slots, rotary, kv, self.heads)

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, softmax: Softmax) -> torch.Tensor:
        if batch.max_query == 1:
            return decode(q, kv, batch, softmax, self.heads, self.scratch)
        out = prefill(q, kv, batch, softmax, self.heads, singles=not batch.singles)
        return decode(q, kv, batch, softmax, self.heads, self.scratch, among=out) if batch.singles else out


class DeterministicTritonBackend(TritonBackend):
    """Sums in a fixed order: uses no library products, no splits, and one attention kernel for slices of any length.

    Norms, gates and rotations are computed row by row in either backend.
    """

    name = "triton, deterministic"

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return small_linear(x, matrix, bias, cut=self._cut(x, matrix))

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return small_linear(x, matrix, None, cut=self._cut(x, matrix), out_dtype=torch.float32)

    def experts(
        self,
        x: torch.Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        routed: Routed,
        gate: ClampedGate | None = None,
    ) -> torch.Tensor:
        first, second = (experts.fitted(cut, x.dtype, self.scratch.roomy) for cut in experts.INVARIANT)
        return experts.compute_grouped(x, gate_up, down, routed, gate, (first, second))

    def _cut(self, x: torch.Tensor, matrix: Matrix) -> Cut:
        return invariant_cut(len(x), matrix.rows, x.dtype, self.scratch.roomy)

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        return gate_mul(self.linear(x, matrix, bias), activation)

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, softmax: Softmax) -> torch.Tensor:
        return prefill(q, kv, batch, softmax, self.heads)


def fits_scaled(x: torch.Tensor, matrix: Matrix) -> bool:
    """Whether cuBLAS can multiply matrices of these shapes in eight bits."""
    return x.is_cuda and x.dtype == torch.bfloat16 and matrix.rows % 16 == 0 and matrix.columns % 16 == 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
