"""The interface between what a model computes and how a device computes it.

A model is written once, in terms of the operations below. A backend owns the layout of matrices and of the KV cache;
no other code depends on either layout. Rules for every backend:

- `add_rms_norm` adds into `residual`, and `rope_and_write` may return its result in the memory of `qkv`; no other
  operation writes to its arguments.
- The KV of all tokens is written before any token attends, so a slice may read what another slice of the step wrote.
- Nothing depends on the *values* of a batch on the host (graphs replay it), except in the reference attention.
- In deterministic mode the bits of a row depend on its own sequence only: not on other rows, on how it was split into
  chunks, or on which of its blocks were found in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headgate.layers.batch import Batch
from headgate.layers.formats import Weight, WeightFormat


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `rows` outputs by `columns` inputs, in the backend's own layout."""

    data: torch.Tensor
    rows: int
    columns: int
    format: WeightFormat
    scale: torch.Tensor | None = None  # [rows] float32: multiplies the numbers of each row of a quantised matrix


@dataclass(frozen=True, slots=True)
class Fp8:
    """What is stored in eight bits; the rest has the dtype of the backend."""

    weights: bool = False  # of the layers, with a scale per row
    kv: bool = False


NO_FP8 = Fp8()


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads, each of `size` numbers."""

    query: int
    kv: int
    size: int


class KV(NamedTuple):
    """The cache of one layer. Block `b` is `k[b]` and `v[b]`, each contiguous; the backend defines the layout inside."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of queries and keys: the tables, and the norms that some models apply before it."""

    cos: torch.Tensor  # [positions, head size] float32; see `Rope.tables`
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None  # [head size]
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class Backend(Protocol):
    """Operations on `device` in `dtype`, for attention of one shape."""

    name: str
    kv_layout: str  # names the layout inside a KV block
    device: torch.device
    dtype: torch.dtype
    heads: Heads

    def matrix(self, rows: int, columns: int) -> Matrix:
        """Allocate a weight, to be filled by `pack`."""

    def vocabulary(self, rows: int, columns: int) -> Matrix:
        """Like `matrix`, for `logits` and `embed`: never in fewer bits than the backend's dtype."""

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """Fill the rows of `matrix` from `row` on with a weight on any device, converted to the format of `matrix`.

        A floating-point weight can be packed into any format; a weight of another format only into the same format.
        """

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ matrix.T + bias`"""

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """`x @ matrix.T` in float32"""

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """The rows of `matrix` that `tokens` name."""

    def gate_up_matrix(self, intermediate: int, columns: int) -> Matrix:
        """Allocate two weights of `intermediate` rows: gate and up."""

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """Like `pack`; the gate starts at row 0, up at row `intermediate`."""

    def gate_up(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`silu(gate) * up`, where `[gate, up] = x @ matrix.T + bias`"""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `x` into `residual`, in place, and return the norm of the sum."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        """The cache of one layer."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes per block of one layer, keys and values together."""

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        """Copies of blocks in the common layout, `[blocks, block_size, kv heads, head size]`."""

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        """The inverse of `read_blocks`, possibly on another engine with another backend."""

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, return queries `[T, heads, size]`."""

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Attend to the sequence up to each token, or its last `window` tokens. Returns `[T, heads * size]`."""
