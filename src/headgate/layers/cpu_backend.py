"""The backend that uses our C++ kernels, for float32 and bfloat16 on x86.

Every kernel is batch-invariant, so this backend is always deterministic. The kernels define the layouts of matrices
and of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

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
from headgate.layers.cpu.kernels import LANES, Part, kv_block_shapes
from headgate.layers.formats import Floating, GgufBlocks, Weight, WeightFormat, floating_numbers, gguf_blocks


@dataclass(slots=True)
class Run:
    """Consecutive rows of a matrix that are stored alike."""

    rows: int
    format: Floating | GgufBlocks
    data: torch.Tensor

    @property
    def kind(self) -> str:
        return self.format.kind if isinstance(self.format, GgufBlocks) else ""


class CpuMatrix(Matrix):
    """A matrix in runs of rows. The parts of a matrix may be stored in different formats."""

    def __init__(self, columns: int, runs: list[Run], stack: Stack | None = None) -> None:
        object.__setattr__(self, "rows", sum(run.rows for run in runs))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "kept", {})
        object.__setattr__(self, "stack", stack)

    runs: list[Run]
    kept: dict[int, WeightFormat]  # the formats to store gate and up, or an expert, in; by first row
    stack: Stack | None  # if this is the matrix of an expert

    @property
    def data(self) -> torch.Tensor:
        (run,) = self.runs
        return run.data

    @property
    def format(self) -> Floating | GgufBlocks:
        (run,) = self.runs
        return run.format

    def stored(self, row: int) -> tuple[torch.Tensor, WeightFormat]:
        for run, first in self.starts():
            if row < first + run.rows:
                return run.data if self.stack is None else self.stack.data, run.format
        raise IndexError(f"row {row} of a matrix of {self.rows}")

    def starts(self) -> Iterator[tuple[Run, int]]:
        """The runs with their first rows."""
        return zip(self.runs, accumulate((run.rows for run in self.runs), initial=0), strict=False)


class CpuPair(CpuMatrix):
    """Gate and up, whose rows alternate in memory. Both are stored alike: in blocks only if both are to be."""


@dataclass(slots=True, eq=False)
class Stack:
    """The matrices of all experts of a layer, side by side in memory. All are stored alike."""

    data: torch.Tensor
    matrices: tuple[CpuMatrix, ...] = ()

    def fill(self, data: torch.Tensor, format: Floating | GgufBlocks) -> None:
        self.data = data
        for matrix, part in zip(self.matrices, data, strict=True):
            matrix.runs[:] = [Run(matrix.rows, format, part)]


class CpuBackend:
    device = torch.device("cpu")
    kv_layout = f"cpu, {LANES} lanes"

    def __init__(self, kernels: Kernels, dtype: torch.dtype, heads: Heads) -> None:
        self.name = f"cpu, {kernels.isa}"
        self.kernels = kernels
        self.dtype = dtype
        self.heads = heads

    def matrix(self, rows: int, columns: int) -> CpuMatrix:
        return CpuMatrix(columns, [self._run(rows, columns, Floating(self.dtype))])

    def _run(self, rows: int, columns: int, format: Floating | GgufBlocks) -> Run:
        match format:
            case Floating(dtype):
                return Run(rows, format, self.kernels.empty_packed(rows, columns, dtype))
            case GgufBlocks(kind):
                return Run(rows, format, self.kernels.empty_blocks(rows, columns, kind))

    def vocabulary(self, rows: int, columns: int) -> CpuMatrix:
        return self.matrix(rows, columns)

    def keep(self, matrix: Matrix, row: int, rows: int, format: WeightFormat) -> None:
        assert isinstance(matrix, CpuMatrix)
        if not isinstance(format, GgufBlocks) or matrix.columns % format.columns:
            return
        # KV is a little different from that of weights that were rounded to the dtype, and is not exchanged with it.
        self.kv_layout = f"{CpuBackend.kv_layout}, by blocks"
        if matrix.stack is None and not isinstance(matrix, CpuPair):
            self._keep_rows(matrix, row, rows, format)
            return
        matrix.kept[row] = format
        alike = (matrix,) if matrix.stack is None else matrix.stack.matrices
        parts = 2 if isinstance(matrix, CpuPair) else 1
        if any([*each.kept.values()] != [format] * parts for each in alike):
            return
        if matrix.stack is None:
            packed = self.kernels.empty_blocks_pair(rows, matrix.columns, format.kind)
            matrix.runs[:] = [Run(matrix.rows, format, packed)]
        else:
            padded = parts * -(-rows // LANES) * LANES
            kind = format.kind
            stack = self.kernels.empty_blocks_experts(len(alike), padded, matrix.columns, kind)
            matrix.stack.fill(stack, format)

    def _keep_rows(self, matrix: CpuMatrix, row: int, rows: int, format: GgufBlocks) -> None:
        """Replace the run that has these rows by up to three, the second of which is in `format`."""
        i, (run, first) = next(
            (i, place) for i, place in enumerate(matrix.starts()) if place[1] + place[0].rows >= row + rows
        )
        before, after = row - first, first + run.rows - (row + rows)
        matrix.runs[i : i + 1] = [
            self._run(count, matrix.columns, each)
            for count, each in ((before, run.format), (rows, format), (after, run.format))
            if count
        ]

    def pack(self, matrix: Matrix, weight: Weight, row: int) -> None:
        assert isinstance(matrix, CpuMatrix)
        for run, first in matrix.starts():
            start, end = max(row, first), min(row + len(weight), first + run.rows)
            if start < end:
                self._fill(run, weight.rows(slice(start - row, end - row)), start - first)

    def _fill(self, run: Run, weight: Weight, row: int, part: Part | None = None) -> None:
        match run.format:
            case GgufBlocks(kind):
                self.kernels.pack_blocks_into(
                    run.data, gguf_blocks(weight, run.format).numbers.cpu(), kind, row, part
                )
            case Floating() if part is None:
                self.kernels.pack_into(run.data, floating_numbers(weight).cpu(), row)
            case Floating():
                self.kernels.pack_pair_into(run.data, floating_numbers(weight).cpu(), row, part)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(x, matrix, bias, None)

    def logits(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return self._product(x, matrix, None, torch.float32)

    def _product(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        assert isinstance(matrix, CpuMatrix)
        if len(matrix.runs) == 1 and isinstance(matrix.format, Floating):
            return self.kernels.linear(x, matrix.data, matrix.rows, bias, dtype)
        return self.kernels.linear_parts(x, [(run.data, run.rows, run.kind) for run in matrix.runs], bias, dtype)

    def embed(self, tokens: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        match matrix.format:
            case GgufBlocks(kind):
                return self.kernels.unpack_blocks_rows(matrix.data, tokens, matrix.columns, kind, self.dtype)
            case _:
                return self.kernels.unpack_rows(matrix.data, tokens, matrix.columns)

    def gate_up_matrix(self, intermediate: int, columns: int) -> CpuPair:
        packed = self.kernels.empty_packed_pair(intermediate, columns, self.dtype)
        return CpuPair(columns, [Run(2 * intermediate, Floating(self.dtype), packed)])

    def pack_gate_up(self, matrix: Matrix, weight: Weight, row: int) -> None:
        assert isinstance(matrix, CpuMatrix)
        self._fill(matrix.runs[0], weight, 0, "up" if row else "gate")

    def gate_up(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, activation: Activation = "silu"
    ) -> torch.Tensor:
        if isinstance(matrix.format, GgufBlocks):
            gate: Literal["silu", "gelu"] = "silu" if activation == "silu" else "gelu"
            kind = matrix.format.kind
            return self.kernels.linear_gated_blocks(x, matrix.data, matrix.rows // 2, kind, gate, bias)
        gated = self.kernels.linear_silu_mul if activation == "silu" else self.kernels.linear_gelu_mul
        return gated(x, matrix.data, matrix.rows // 2, bias)

    def expert_matrices(self, count: int, rows: int, columns: int) -> ExpertMatrices:
        stack = self.kernels.empty_packed_experts(count, rows, columns, self.dtype)
        return self._stack(stack, CpuMatrix, rows, columns)

    def expert_gate_up_matrices(self, count: int, intermediate: int, columns: int) -> ExpertMatrices:
        stack = self.kernels.empty_packed_expert_pairs(count, intermediate, columns, self.dtype)
        return self._stack(stack, CpuPair, 2 * intermediate, columns)

    def _stack(self, data: torch.Tensor, matrix: type[CpuMatrix], rows: int, columns: int) -> ExpertMatrices:
        stack, format = Stack(data), Floating(self.dtype)
        stack.matrices = tuple(matrix(columns, [Run(rows, format, each)], stack) for each in data)
        return ExpertMatrices(stack.matrices)

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
        first, second = gate_up.each[0], down.each[0]
        assert isinstance(first, CpuMatrix) and first.stack and isinstance(second, CpuMatrix) and second.stack
        return self.kernels.experts(
            x,
            first.stack.data,
            second.stack.data,
            down.each[0].columns,
            routed.ids,
            routed.weights,
            gate_up.bias,
            down.bias,
            None if gate is None else (gate.alpha, gate.limit),
            (first.runs[0].kind, second.runs[0].kind),
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
