"""The interface between what a model computes and how a device computes it.

A model is written once, in terms of the operations below. A backend owns the layout of matrices and of the KV cache;
no other code depends on either layout. Rules for every backend:

- `add_rms_norm` adds into `residual`, and `rope_and_write` may return its result in the memory of `qkv`. Apart from
  these two and the caches and matrices that an operation fills, no operation writes to its arguments.
- A step writes the KV of all its tokens before any token attends, so a slice may read KV that another slice wrote.
- Host code does not depend on the *values* in a batch, because a captured graph is replayed with other values. The
  reference implementations of attention and experts are the only exceptions.
- In deterministic mode the bits of a row depend only on its own sequence: not on other rows, on how the sequence was
  split into chunks, or on which of its blocks were found in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from headgate.layers.batch import Batch
from headgate.layers.formats import Weight, WeightFormat


@dataclass(frozen=True)
class Matrix:
    """A weight of `rows` outputs by `columns` inputs, in the backend's own layout."""

    data: torch.Tensor
    rows: int
    columns: int
    format: WeightFormat
    scale: torch.Tensor | None = None  # [rows] float32: multiplies the numbers of each row of a quantised matrix

    def stored(self, row: int) -> tuple[torch.Tensor, WeightFormat]:
        """The tensor that has `row`, and the format of that row."""
        return self.data, self.format


@dataclass(frozen=True, slots=True)
class Fp8:
    """Which tensors are stored in eight bits; all others have the dtype of the backend."""

    weights: bool = False  # matrices of the layers, with a scale per row
    kv: bool = False


NO_FP8 = Fp8()


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads, each of `size` numbers."""

    query: int
    kv: int
    size: int


Activation = Literal["silu", "gelu_tanh"]  # of the gate of an MLP


class KV(NamedTuple):
    """The cache of one layer. Block `b` is `k[b]` and `v[b]`, each contiguous; the backend defines the layout inside."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of queries and keys: the tables, and the norms that some models apply before it."""

    cos: torch.Tensor  # [positions, rotated dimensions] float32; see `Rope.tables`
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None  # [head size]
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """How the scores of a query become the weights of the keys that it sees."""

    scale: float  # multiplies the product of query and key
    window: int | None = None  # a query sees this many tokens, the last of which is its own; None: all
    cap: float | None = None  # scores become `cap * tanh(score / cap)`
    sinks: torch.Tensor | None = None  # [query heads] float32: the score of one more key, whose value is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts and their weights follow from the router's logits."""

    top: int  # experts per token
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the weights of a token's experts sum to one
    scale: float = 1.0  # multiplies the weights
    groups: int = 1  # experts are in groups of equal size ...
    top_groups: int = 1  # ... and a token's experts are all in this many groups


class Routed(NamedTuple):
    """The experts of each token, in descending order of the scores they were chosen by."""

    ids: torch.Tensor  # [T, top] int32
    weights: torch.Tensor  # [T, top] float32


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, with `gate` up to `limit`, and `up` from `-limit` to `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One weight per expert. If `stacked` is given, they are its parts; the backend defines the layout inside."""

    each: tuple[Matrix, ...]
    stacked: torch.Tensor | None = None
    scales: torch.Tensor | None = None  # [experts, rows], of quantised weights
    bias: torch.Tensor | None = None  # [experts, rows]; the gates' before those of up

    def tensor_of(self, expert: int) -> torch.Tensor:
        """The tensor that owns the memory of one expert's weight."""
        return self.each[expert].stored(0)[0] if self.stacked is None else self.stacked

    def bias_of(self, expert: int) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[expert]


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
        """Like `matrix`, for the arguments of `logits` and `embed`: its weights are never rounded to fewer bits."""

    def keep(self, matrix: Matrix, row: int, rows: int, format: WeightFormat) -> None:
        """Store `rows` rows from `row` on in `format`, if the backend computes with it. Called before any `pack`."""

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """Fill the rows of `matrix` from `row` on with a weight on any device, converted to the format of these rows.

        Which formats can be converted to which is known to `formats.convertible`.
        """

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ matrix.T + bias`"""

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """`x @ matrix.T` in float32"""

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return the row of `matrix` for each id in `tokens`."""

    def gate_up_matrix(self, intermediate: int, columns: int) -> Matrix:
        """Allocate two weights of `intermediate` rows: gate and up."""

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        """Like `pack`; the gate starts at row 0, up at row `intermediate`."""

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        """`activation(gate) * up`, where `[gate, up] = x @ matrix.T + bias`"""

    def expert_matrices(self, count: int, rows: int, columns: int) -> ExpertMatrices:
        """Allocate `count` weights as `matrix` does."""

    def expert_gate_up_matrices(self, count: int, intermediate: int, columns: int) -> ExpertMatrices:
        """Allocate `count` weights as `gate_up_matrix` does."""

    def route(self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> Routed:
        """Choose each token's experts from the router's float32 `logits`; see `layers.experts.route`."""

    def experts(
        self,
        x: torch.Tensor,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        routed: Routed,
        gate: ClampedGate | None = None,
    ) -> torch.Tensor:
        """The weighted sum of the MLPs of each row's experts. The gate is `silu(gate) * up` if none is given."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `x` into `residual`, in place, and return the norm of the sum; see `rms_norm`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the norm of each row of `x`. Rows are contiguous; they need not be adjacent.

        The normed row is rounded to the dtype and multiplied by `weight`. A float32 `weight` multiplies before rounding.
        """

    def allocate_kv(self, num_blocks: int, block_size: int) -> KV:
        """Allocate the cache of one layer."""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes per block of one layer, keys and values together."""

    def read_blocks(self, kv: KV, blocks: torch.Tensor) -> KV:
        """Return copies of blocks in the common layout, `[blocks, block_size, kv heads, head size]`."""

    def write_blocks(self, kv: KV, blocks: torch.Tensor, content: KV) -> None:
        """Write blocks given in the common layout, as returned by `read_blocks` of any engine and backend."""

    def rope_and_write(self, qkv: torch.Tensor, batch: Batch, rotary: Rotary, kv: KV) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache; return queries `[T, heads, size]`.

        If the tables have fewer columns than a head, the rest of a head is not rotated.
        """

    def attention(self, q: torch.Tensor, kv: KV, batch: Batch, softmax: Softmax) -> torch.Tensor:
        """Let each token attend to its sequence up to itself; returns `[T, heads * size]`."""
