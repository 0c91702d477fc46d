"""The seam between what a model computes and how a device does it.

A model is written once, in terms of the handful of operations below; a backend owns the layout of matrices and of the
KV cache, and nobody else looks inside either. Rules that every backend keeps:

- `add_rms_norm` adds into `residual`, and `rope_and_write` may answer in the memory of `qkv`; nothing else writes to
  its arguments.
- KV of all tokens is written before any token attends, so a slice may read what another slice of the step wrote.
- Nothing depends on the *values* of a batch on the host (graphs replay it), but for the reference attention.
- In deterministic mode the bits of a row depend on its own sequence only: not on the other rows, the chunks it came
  in, or which of its blocks were found in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from headgate.layers.batch import Batch
from headgate.layers.formats import Weight, WeightFormat


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `rows` outputs by `columns` inputs, in whatever layout its backend likes."""

    data: torch.Tensor
    rows: int
    columns: int
    format: WeightFormat
    scale: torch.Tensor | None = None  # [rows] float32: what the numbers of a rounded matrix are multiplied by


@dataclass(frozen=True, slots=True)
class Fp8:
    """What is kept in eight bits; the rest has the dtype of the backend."""

    weights: bool = False  # of the layers, each row with a scale of its own
    kv: bool = False


PLAIN = Fp8()


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads, each of `size` numbers."""

    query: int
    kv: int
    size: int


class KV(NamedTuple):
    """The cache of one layer; block `b` of the pool is `k[b]` and `v[b]`, contiguous, inside in the backend's layout."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """What turns queries and keys: the tables, and the norms that some models apply before turning."""

    cos: torch.Tensor  # [positions, head size] float32; see `Rope.tables`
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None  # [head size]
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class Backend(Protocol):
    """Operations on `device` in `dtype`, for attention of one shape."""

    name: str
    kv_layout: str  # names what is inside a KV block
    device: torch.device
    dtype: torch.dtype
    heads: Heads

    def matrix(self, rows: int, columns: int) -> Matrix:
        """Room for a weight, to be filled by `pack`."""

    def vocabulary(self, rows: int, columns: int) -> Matrix:
        """As `matrix`, for `logits` and `embed`: never in fewer bits than the backend's dtype."""

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """Fill the rows of `matrix` from `row` on with a weight on any device, converted to the format of `matrix`.

        Any floating-point type is taken for any format, and a format for itself.
        """

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ matrix.T + bias`"""

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """`x @ matrix.T` in float32"""

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """The rows of `matrix` that `tokens` name."""

    def gate_up_matrix(self, intermediate: int, columns: int) -> Matrix:
        """Room for two weights of `intermediate` rows, the gate and what it gates."""

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """As `pack`; the gate starts at row 0, what it gates at row `intermediate`."""

    def gate_up(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`silu(gate) * up`, where `[gate, up] = x @ matrix.T + bias`"""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `x` into `residual`, in place, and return the norm of the sum."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        """The cache of one layer."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Of one layer, keys and values together."""

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        """Copies of blocks in the common layout, `[blocks, block_size, kv heads, head size]`."""

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        """The reverse of `read_blocks`, perhaps on another engine with another backend."""

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        """Norm and turn queries and keys, write keys and values to the cache, return queries `[T, heads, size]`."""

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        """Each token attends to its sequence up to itself, the last `window` tokens if given: `[T, heads * size]`."""
