"""The typed Python interface of the C++ kernels.

Owns the layouts of packed weights and of KV cache blocks. Both are opaque to callers, which allocate with `empty_*`,
fill with `pack_*` and `rope_and_write`, and read with `unpack_rows` and `read_kv`. Rules: tensors are on the CPU,
bfloat16 or float32, of one dtype per call; nothing is converted implicitly except checkpoint tensors while packing;
all results are batch-invariant and independent of the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

LANES = 16  # rows of a packed weight block, tokens of a chunk of keys
TILE_DEPTH = 32  # columns of a packed bfloat16 tile

Part = Literal["gate", "up"]


def packed_shape(N: int, K: int, dtype: torch.dtype) -> list[int]:
    """The shape of a packed weight of N rows by K columns."""
    blocks = -(-N // LANES)
    return [blocks, -(-K // TILE_DEPTH), 16, LANES, 2] if dtype == torch.bfloat16 else [blocks, K, LANES]


def kv_block_shapes(
    block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one block of keys and one of values, of one layer. In the cache, the block index comes first."""
    padded = -(-head_size // LANES) * LANES
    chunks = block_size // LANES
    if dtype == torch.bfloat16:
        return (kv_heads, chunks, head_size // 2, LANES, 2), (kv_heads, block_size // 2, padded, 2)
    return (kv_heads, chunks, head_size, LANES), (kv_heads, block_size, padded)


def why_unsupported(head_size: int, block_size: int, dtype: torch.dtype) -> str | None:
    """Why a model cannot run on these kernels, or None."""
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU kernels compute in bfloat16 and float32, not {dtype}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"the CPU kernels take head sizes that are multiples of 8 up to 256, not {head_size}"
    if block_size % LANES or block_size <= 0:
        return f"the CPU kernels take block sizes that are multiples of {LANES}, not {block_size}"
    return None


class Kernels:
    """The kernels for one instruction set of this machine."""

    def __init__(self, native: Any, isa: str | None = None) -> None:
        """`native` is the compiled module; `isa` one of `native.supported_isas()`, by default the best."""
        supported: list[str] = native.supported_isas()
        self.isa = isa or supported[0]
        if self.isa not in supported:
            raise ValueError(f"this CPU cannot run {self.isa}; it runs {', '.join(supported)}")
        self._large_zeros = native.large_zeros
        self._set = native.KernelSet(self.isa)

    def __repr__(self) -> str:
        return f"<Kernels {self.isa}>"

    # Packed weights

    def empty_packed(self, N: int, K: int, dtype: torch.dtype) -> Tensor:
        """A zeroed weight of N rows by K columns."""
        packed: Tensor = self._large_zeros(packed_shape(N, K, dtype), dtype)
        return packed

    def pack_into(self, packed: Tensor, weight: Tensor, row_offset: int = 0) -> None:
        """Write an unpacked `[n, K]` weight to the rows from `row_offset` on."""
        self._set.pack_into(packed, weight.to(packed.dtype), row_offset, 1, 0, "")

    def unpack_rows(self, packed: Tensor, ids: Tensor, K: int) -> Tensor:
        """Return rows `ids` of a packed weight as `[len(ids), K]`; the embedding lookup, if embeddings are tied."""
        rows: Tensor = self._set.unpack_rows(packed, ids.to(torch.int64).contiguous(), K, 1, 0, packed.dtype, "")
        return rows

    def empty_packed_pair(self, N: int, K: int, dtype: torch.dtype) -> Tensor:
        """Memory for gate and up of N rows each, with alternating blocks, so that one pass reads both."""
        return self.empty_packed(2 * -(-N // LANES) * LANES, K, dtype)

    def pack_pair_into(self, packed: Tensor, weight: Tensor, row_offset: int, part: Part) -> None:
        """Write rows of the gate or of the up projection; `row_offset` counts within that part."""
        self._set.pack_into(packed, weight.to(packed.dtype), row_offset, 2, int(part == "up"), "")

    def unpack_pair_rows(self, packed: Tensor, ids: Tensor, K: int, part: Part) -> Tensor:
        """The inverse of `pack_pair_into`."""
        ids = ids.to(torch.int64).contiguous()
        rows: Tensor = self._set.unpack_rows(packed, ids, K, 2, int(part == "up"), packed.dtype, "")
        return rows

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        N: int,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x @ weight.T + bias`, rounded once, to `out_dtype` (by default that of `x`)."""
        result: Tensor = self._set.linear(x, packed, N, bias, out_dtype, out)
        return result

    def linear_silu_mul(
        self, x: Tensor, packed: Tensor, N: int, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """`silu(gate) * up` of a packed pair, rounded like torch's eager operations; `bias` is `[2N]`, gate first."""
        result: Tensor = self._set.linear_silu_mul(x, packed, N, bias, out)
        return result

    def linear_gelu_mul(
        self, x: Tensor, packed: Tensor, N: int, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Like `linear_silu_mul`, with the `tanh` approximation of `gelu`."""
        result: Tensor = self._set.linear_gelu_mul(x, packed, N, bias, out)
        return result

    # Weights in GGUF blocks. Their numbers are packed as they are; `kind` names the kind of block.

    def empty_blocks(self, N: int, K: int, kind: str) -> Tensor:
        """A zeroed weight of N rows by K columns, a multiple of the columns of a block."""
        packed: Tensor = self._large_zeros([-(-N // LANES), self._set.block_bytes(kind, K)], torch.uint8)
        return packed

    def empty_blocks_pair(self, N: int, K: int, kind: str) -> Tensor:
        """Memory for gate and up of N rows each."""
        return self.empty_blocks(2 * -(-N // LANES) * LANES, K, kind)

    def empty_blocks_experts(self, count: int, N: int, K: int, kind: str) -> Tensor:
        """`count` weights; part `i` is one as `empty_blocks` returns."""
        stack: Tensor = self._large_zeros([count, -(-N // LANES), self._set.block_bytes(kind, K)], torch.uint8)
        return stack

    def pack_blocks_into(
        self, packed: Tensor, blocks: Tensor, kind: str, row_offset: int = 0, part: Part | None = None
    ) -> None:
        """Write rows of blocks, uint8 as in the file; `row_offset` counts within `part` if there is one."""
        self._set.pack_into(packed, blocks, row_offset, 1 if part is None else 2, int(part == "up"), kind)

    def unpack_blocks_rows(
        self, packed: Tensor, ids: Tensor, K: int, kind: str, dtype: torch.dtype, part: Part | None = None
    ) -> Tensor:
        """The numbers of rows `ids`, rounded to `dtype`."""
        stride, offset = 1 if part is None else 2, int(part == "up")
        rows: Tensor = self._set.unpack_rows(packed, ids.to(torch.int64).contiguous(), K, stride, offset, dtype, kind)
        return rows

    def linear_parts(
        self,
        x: Tensor,
        parts: Sequence[tuple[Tensor, int, str]],
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`linear` with a weight in parts: each is packed, a number of rows, and a kind of block ("" for numbers)."""
        result: Tensor = self._set.linear_parts(x, parts, bias, out_dtype)
        return result

    def linear_gated_blocks(
        self, x: Tensor, packed: Tensor, N: int, kind: str, gate: Literal["silu", "gelu"], bias: Tensor | None = None
    ) -> Tensor:
        """`linear_silu_mul` or `linear_gelu_mul` of gate and up in blocks."""
        result: Tensor = self._set.linear_gated_blocks(x, packed, N, kind, gate == "gelu", bias)
        return result

    # Mixtures of experts

    def empty_packed_experts(self, count: int, N: int, K: int, dtype: torch.dtype) -> Tensor:
        """`count` zeroed weights; part `i` is one as `empty_packed` returns."""
        stack: Tensor = self._large_zeros([count, *packed_shape(N, K, dtype)], dtype)
        return stack

    def empty_packed_expert_pairs(self, count: int, N: int, K: int, dtype: torch.dtype) -> Tensor:
        """`count` zeroed pairs; part `i` is one as `empty_packed_pair` returns."""
        return self.empty_packed_experts(count, 2 * -(-N // LANES) * LANES, K, dtype)

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        *,
        top: int,
        sigmoid: bool,
        normalised: bool,
        scale: float,
        groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor]:
        """Ids [rows, top] int32 and weights [rows, top] float32 of each row's experts; see `layers.experts.route`."""
        chosen: tuple[Tensor, Tensor] = self._set.route(
            logits, top, sigmoid, normalised, scale, groups, top_groups, bias
        )
        return chosen

    def experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        N: int,
        ids: Tensor,
        weights: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        clamped: tuple[float, float] | None = None,
        kinds: tuple[str, str] = ("", ""),
    ) -> Tensor:
        """The weighted sum of the MLPs of each row's experts, each of N inner numbers.

        `ids` [rows, top] int32 and `weights` [rows, top] float32 name each row's experts. Only the weights of named
        experts are read. Biases are `[experts, 2N]`, the gates' first, and `[experts, columns of x]`. With `clamped`
        (alpha, limit) the gate is `gate * sigmoid(alpha * gate) * (up + 1)` of values clamped to the limit. `kinds`
        are the kinds of block of both weights.
        """
        result: Tensor = self._set.experts(
            x, gate_up, down, N, ids, weights, gate_up_bias, down_bias, clamped, *kinds
        )
        return result

    # Norms

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """RMS norm. Rounds like transformers' `LlamaRMSNorm`: to the dtype first, then multiplies by `weight`.

        A float32 `weight` multiplies before the rounding, as in transformers' `Gemma2RMSNorm`.
        """
        result: Tensor = self._set.rms_norm(x, weight, eps, out)
        return result

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """`residual += x` in place, then the norm of the sum."""
        result: Tensor = self._set.add_rms_norm(x, residual, weight, eps, out)
        return result

    # Paged cache and attention

    def empty_kv(
        self, num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The cache of one layer, keys and values, all zero; block `b` is `k[b]` and `v[b]`."""
        reason = why_unsupported(head_size, block_size, dtype)
        if reason is not None:
            raise ValueError(reason)
        k, v = kv_block_shapes(block_size, kv_heads, head_size, dtype)
        return self._large_zeros([num_blocks, *k], dtype), self._large_zeros([num_blocks, *v], dtype)

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        H: int,
        HK: int,
        D: int,
    ) -> Tensor:
        """Rotate q and k in place, write k and v to the cache, and return q as a `[T, H, D]` view.

        If norm weights are given, q and k are normed first. The rotation is bit for bit that of transformers in
        bfloat16: cos and sin are rounded, both products are rounded, the sum is rounded. A token with a negative slot
        is not written. If `cos` and `sin` have fewer than D columns, the rest of a head is not rotated.
        """
        self._set.rope_and_write(qkv, positions, cos, sin, q_weight, k_weight, eps, k_cache, v_cache, slots, H, HK, D)
        return qkv[:, : H * D].view(-1, H, D)

    def read_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `slots`, each `[len(slots), HK, D]`."""
        head_size = k_cache.size(3) * (2 if k_cache.dtype == torch.bfloat16 else 1)
        kv: tuple[Tensor, Tensor] = self._set.read_kv(k_cache, v_cache, slots, head_size)
        return kv

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """The inverse of `read_kv`."""
        self._set.write_kv(k_cache, v_cache, slots, k, v)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `q[T, H, D]`, for prefill and decode.

        Query i of sequence s is at position `context_lens[s] - query length + i`. It sees the cache up to that
        position, or the last `window` positions of that. `query_starts`, `context_lens` and `block_tables` are int32.
        With a `cap`, scores become `cap * tanh(score / cap)`. `sinks` (float32 `[H]`) are added to the scores of each
        head as that of one more key, whose value is zero.
        """
        result: Tensor = self._set.attention(
            q, k_cache, v_cache, query_starts, context_lens, block_tables, scale, window, cap, sinks, out
        )
        return result

    # Sampling

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
    ) -> Tensor:
        """Sample one token per row; returns int64 `[S]`. Parameters are per row: float32, top_k int32, keys int64."""
        tokens: Tensor = self._set.sample(logits, temperature, top_k, top_p, min_p, keys)
        return tokens

    def log_softmax_stats(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Maximum and log-sum-exp of each row; `logits - lse` are the log-probabilities."""
        stats: tuple[Tensor, Tensor] = self._set.log_softmax_stats(logits)
        return stats

    # Limits of the machine, for benchmarks

    def probe_read(self, size: int) -> Callable[[], None]:
        """Return a function that reads `size` bytes of memory once, with all threads."""
        data = self._large_zeros([size], torch.uint8).fill_(1)
        return lambda: self._set.probe_read(data)

    def probe_multiply(self, dtype: torch.dtype, steps: int) -> int:
        """Multiply data that is in registers or L1, on all threads. Returns the number of operations."""
        operations: int = self._set.probe_multiply(dtype, steps)
        return operations
