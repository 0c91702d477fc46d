"""The backend for CUDA devices: cuBLAS for matrices, Triton for everything between them.

Matrices are `[rows, columns]` as in plain torch; the cache is `[blocks, kv heads, block_size, head size]`, so that a
head of a block is one run of memory. Works in bfloat16, float16 and float32, where products are never rounded to tf32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headgate.layers.backend import KV, Heads, Matrix, Rotary
from headgate.layers.batch import Batch
from headgate.layers.torch_backend import TorchBackend
from headgate.layers.triton.attention import Scratch, decode, prefill
from headgate.layers.triton.elementwise import add_rms_norm, silu_mul
from headgate.layers.triton.matmul import MAX_ROWS, MIN_WIDTH, invariant_cut, small_linear, vector_linear
from headgate.layers.triton.rope import rope_and_write


class TritonBackend(TorchBackend):
    name = "triton"
    kv_layout = "heads, tokens"

    def __init__(self, device: torch.device, dtype: torch.dtype, heads: Heads) -> None:
        super().__init__(device, dtype, heads)
        self.scratch = Scratch(device)

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if self.dtype == torch.float32 or not x.is_cuda:
            return F.linear(x, matrix.data).float()
        # The product is summed in float32 anyway; rounding it first would make ties.
        return torch.mm(x, matrix.data.t(), out_dtype=torch.float32)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) == 1:
            return vector_linear(x, matrix.data, bias)
        if self.beats_cublas(x, matrix.rows):
            return small_linear(x, matrix.data, bias)
        return F.linear(x, matrix.data, bias)

    def gate_up(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) == 1:
            return vector_linear(x, matrix.data, bias, gated=True)
        if self.beats_cublas(x, matrix.rows):
            return small_linear(x, matrix.data, bias, gated=True)
        return silu_mul(F.linear(x, matrix.data, bias))

    def beats_cublas(self, x: torch.Tensor, rows: int) -> bool:
        return 0 < len(x) <= MAX_ROWS and rows >= MIN_WIDTH and self.dtype.itemsize == 2 and self.scratch.roomy

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        shape = (num_blocks, self.heads.kv, block_size, self.heads.size)
        return KV(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        return KV(*(cache[blocks].transpose(1, 2).contiguous() for cache in kv))

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        for cache, new in zip(kv, content, strict=True):
            cache[blocks] = new.transpose(1, 2).to(cache)

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        return rope_and_write(qkv, batch.positions, batch.slots, rotary, kv, self.heads)

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        if batch.max_query == 1:
            return decode(q, kv, batch, scale, window, self.heads, self.scratch)
        return prefill(q, kv, batch, scale, window, self.heads)


class DeterministicTritonBackend(TritonBackend):
    """One order of summing for everything: no library, no splits, and one attention kernel for slices of any length.

    Norms, gates and turning are done row by row in any case.
    """

    name = "triton, deterministic"

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return small_linear(x, matrix.data, bias, cut=invariant_cut(len(x), x.dtype))

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return small_linear(x, matrix.data, None, cut=invariant_cut(len(x), x.dtype), out_dtype=torch.float32)

    def gate_up(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return silu_mul(self.linear(x, matrix, bias))

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        return prefill(q, kv, batch, scale, window, self.heads)
