"""Weights in GGUF blocks on the CPU kernels, against the numbers that the `gguf` package gives for the same blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headgate.layers.cpu import Kernels
from headgate.layers.cpu.build import supported_isas
from headgate.layers.formats import GGUF_BLOCKS, GgufBlocks
from tests.layers.test_cpu_linear import DTYPES, assert_close, kernels, random

# The bytes of a block that are half-precision numbers: random ones could be infinite.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
# Blocks of one matrix: whole chunks of unpacked columns, and a last one of another width.
COLUMNS = {32: (32, 96, 320), 256: (256, 768)}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows whose codes, factors of groups, and signs of scales are all random."""
    draw = np.random.default_rng(seed)
    format = GgufBlocks(kind)
    blocks = draw.integers(0, 256, (rows, columns // format.columns, format.bytes_of(format.columns)), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = draw.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def numbers(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def packed(k: Kernels, blocks: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    room = k.empty_blocks(len(blocks), columns, kind)
    k.pack_blocks_into(room, blocks, kind)
    return room


def shapes(kind: str) -> list[tuple[int, int]]:
    return list(zip((1, 17, 70), COLUMNS[GgufBlocks(kind).columns] * 2, strict=False))


@pytest.fixture(params=supported_isas())
def k(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_rows_read_back_as_the_numbers_of_the_file(k, kind):
    for rows, columns in shapes(kind):
        blocks = random_blocks(kind, rows, columns)
        room, ids = packed(k, blocks, kind, columns), torch.arange(rows).flip(0)
        exact = numbers(blocks, kind).flip(0)
        assert torch.equal(k.unpack_blocks_rows(room, ids, columns, kind, torch.float32), exact)
        assert torch.equal(k.unpack_blocks_rows(room, ids, columns, kind, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_a_product_is_that_of_the_exact_numbers(k, kind, dtype):
    for rows, columns in shapes(kind):
        blocks = random_blocks(kind, rows, columns)
        room, weight = packed(k, blocks, kind, columns), numbers(blocks, kind).double()
        for M in (1, 2, 3, 5, 13, 40):
            x = random(M, M, columns, dtype=dtype)
            bias = random(rows, rows, dtype=dtype)
            out = k.linear_parts(x, [(room, rows, kind)], bias)
            # A group's sum with a minimum is the difference of two sums.
            magnitude = 8 * x.double().abs() @ weight.abs().T + x.double().abs().sum(1, True) * weight.abs().amax(1)
            assert_close(out, x.double() @ weight.T + bias.double(), magnitude + bias.double().abs())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_logits_can_be_float32_from_bfloat16(k, kind):
    blocks = random_blocks(kind, 50, 256)
    x, weight = random(1, 3, 256, dtype=torch.bfloat16), numbers(blocks, kind).double()
    out = k.linear_parts(x, [(packed(k, blocks, kind, 256), 50, kind)], None, torch.float32)
    assert out.dtype == torch.float32
    assert_close(out, x.double() @ weight.T, 8 * x.double().abs() @ weight.abs().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(k, kind, dtype):
    rows, columns = 90, COLUMNS[GgufBlocks(kind).columns][-1]
    room = packed(k, random_blocks(kind, rows, columns), kind, columns)
    M = 230 if kind in ("Q4_1", "Q6_K") else 45  # more rows than use codes once they are unpacked
    x = random(1, M, columns, dtype=dtype)
    whole = k.linear_parts(x, [(room, rows, kind)])
    for first, last in [(0, 1), (7, 8), (3, 5), (10, 23), (20, 45), (44, 45), (1, 34), (M - 1, M)]:
        assert k.linear_parts(x[first:last], [(room, rows, kind)]).equal(whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_not_touched_by_nan_in_another(k, dtype):
    room = packed(k, random_blocks("Q4_1", 40, 64), "Q4_1", 64)
    x = random(1, 20, 64, dtype=dtype)
    clean = k.linear_parts(x, [(room, 40, "Q4_1")])
    x[11] = float("nan")
    touched = k.linear_parts(x, [(room, 40, "Q4_1")])
    others = torch.arange(20) != 11
    assert touched[others].equal(clean[others]) and touched[11].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(k, dtype):
    room, x = packed(k, random_blocks("Q4_K", 200, 512), "Q4_K", 512), random(1, 30, 512, dtype=dtype)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(k.linear_parts(x, [(room, 200, "Q4_K")]))
    torch.set_num_threads(threads)
    assert results[0].equal(results[1]) and results[0].equal(results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 4, 40])
def test_parts_of_a_matrix_may_be_stored_in_different_ways(k, dtype, M):
    x, columns = random(1, M, 256, dtype=dtype), 256
    plain = random(2, 20, columns, dtype=dtype)
    room = k.empty_packed(20, columns, dtype)
    k.pack_into(room, plain)
    parts = [(packed(k, random_blocks(kind, rows, columns), kind, columns), rows, kind) for kind, rows in MIXED]
    parts.insert(1, (room, 20, ""))
    bias = random(3, sum(part[1] for part in parts), dtype=dtype)
    whole = k.linear_parts(x, parts, bias)
    alone = [
        k.linear_parts(x, [part], each) for part, each in zip(parts, bias.split([p[1] for p in parts]), strict=True)
    ]
    assert whole.equal(torch.cat(alone, dim=1))
    assert alone[1].equal(k.linear(x, room, 20, bias[MIXED[0][1] :][:20].clone()))


MIXED = [("Q4_K", 37), ("Q6_K", 3), ("Q8_0", 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gate_and_up_in_blocks_are_gated_like_two_products(k, dtype, gate):
    rows, columns = 50, 96
    blocks = [random_blocks("Q4_1", rows, columns, seed) for seed in (1, 2)]
    pair = k.empty_blocks_pair(rows, columns, "Q4_1")
    for part, each in zip(("gate", "up"), blocks, strict=True):
        k.pack_blocks_into(pair, each[:21], "Q4_1", 0, part)
        k.pack_blocks_into(pair, each[21:], "Q4_1", 21, part)
        read = k.unpack_blocks_rows(pair, torch.arange(rows), columns, "Q4_1", torch.float32, part)
        assert read.equal(numbers(each, "Q4_1"))
    for M in (1, 7, 30):
        x, bias = random(M, M, columns, dtype=dtype), random(3, 2 * rows, dtype=dtype)
        out = k.linear_gated_blocks(x, pair, rows, "Q4_1", gate, bias)
        first, second = (
            k.linear_parts(x, [(packed(k, each, "Q4_1", columns), rows, "Q4_1")], part)
            for each, part in zip(blocks, bias.split(rows), strict=True)
        )
        expected = (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second
        torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-6)


def test_packed_blocks_take_the_bytes_of_the_file_and_little_more(k):
    for kind in GGUF_BLOCKS:
        stored = GgufBlocks(kind).bytes_of(1024) * 1024
        assert stored <= k.empty_blocks(1024, 1024, kind).nbytes <= stored * 1.04


def test_rows_overwritten_in_blocks_leave_the_others(k):
    blocks, update = random_blocks("Q5_K", 40, 256), random_blocks("Q5_K", 3, 256, seed=1)
    room = packed(k, blocks, "Q5_K", 256)
    k.pack_blocks_into(room, update, "Q5_K", 15)
    blocks[15:18] = update
    assert room.equal(packed(k, blocks, "Q5_K", 256))


def test_what_does_not_fit_is_refused(k):
    room = k.empty_blocks(20, 64, "Q4_1")
    with pytest.raises(RuntimeError, match="do not fit"):
        k.pack_blocks_into(room, random_blocks("Q4_1", 10, 64), "Q4_1", 30)
    with pytest.raises(RuntimeError, match="not a packed weight"):
        k.pack_blocks_into(room, random_blocks("Q4_0", 10, 64), "Q4_0")
    with pytest.raises(RuntimeError, match="are not blocks of Q4_1"):
        k.pack_blocks_into(room, torch.zeros(1, 21, dtype=torch.uint8), "Q4_1")
    with pytest.raises(RuntimeError, match="not whole blocks of Q4_K"):
        k.empty_blocks(20, 64, "Q4_K")
    with pytest.raises(RuntimeError, match="does not have 40 rows"):
        k.linear_parts(torch.zeros(1, 64), [(room, 40, "Q4_1")])
    with pytest.raises(IndexError, match="row 32"):
        k.unpack_blocks_rows(room, torch.tensor([32]), 64, "Q4_1", torch.float32)
