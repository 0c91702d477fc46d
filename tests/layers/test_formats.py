"""Weights and their formats: rounding to eight bits, parts of weights, and the formats that each matrix accepts."""

from __future__ import annotations

import gguf
import pytest
import torch

from headgate.layers.backend import Fp8, Heads
from headgate.layers.choice import available_backends, choose_backend
from headgate.layers.formats import (
    FP8,
    GGUF_BLOCKS,
    Floating,
    Fp8Rows,
    GgufBlocks,
    IntGroups,
    Weight,
    convertible,
    floating,
    floating_numbers,
    fp8_rows,
    gguf_blocks,
)
from headgate.layers.linear import Linear, SummedLinear

HEADS = Heads(2, 1, 32)
Q8_0 = gguf.GGMLQuantizationType.Q8_0


class Part:
    """One of two ranks; does no computation."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


def fp8_backend():
    pytest.importorskip("triton")
    from headgate.layers.triton_backend import TritonBackend

    return TritonBackend(torch.device("cpu"), torch.bfloat16, HEADS, Fp8(weights=True))


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, columns) * torch.rand(rows, 1)).to(dtype)


def test_a_floating_weight_names_its_type():
    assert floating(weight_of(2, 3, torch.float16)).format == Floating(torch.float16)


def test_eight_bits_keep_the_largest_number_of_each_row_and_a_scale():
    kept = fp8_rows(floating(torch.tensor([[7.0, 0.0, -3.5], [0.0, 0.0, 0.0], [1792.0, 4.0, -1792.0]])))
    assert kept.numbers.tolist() == [[448.0, 0.0, -224.0], [0.0, 0.0, 0.0], [448.0, 1.0, -448.0]]
    assert kept.scale.tolist() == torch.tensor([7 / 448, 1e-12, 4.0]).tolist()
    assert (kept.format, kept.numbers.dtype) == (Fp8Rows(), FP8)


def test_a_weight_in_eight_bits_is_not_rounded_again():
    kept = fp8_rows(floating(weight_of(4, 6)))
    assert fp8_rows(kept) is kept


def test_a_part_of_a_weight_has_the_scales_of_its_rows():
    kept = fp8_rows(floating(weight_of(4, 6)))
    part = kept.rows(slice(1, 3)).columns(slice(2, 5))
    assert torch.equal(part.numbers.float(), kept.numbers.float()[1:3, 2:5])
    assert torch.equal(part.scale, kept.scale[1:3])
    assert (len(part), part.format) == (2, Fp8Rows())


@pytest.mark.parametrize("gate_up", [False, True])
def test_an_eight_bit_matrix_is_the_same_from_floats_and_from_its_own_format(gate_up):
    backend, weight = fp8_backend(), floating(weight_of(8, 16, torch.float32))
    found = []
    for given in (weight, fp8_rows(weight)):
        matrix = backend.gate_up_matrix(8, 16) if gate_up else backend.matrix(16, 16)
        pack = backend.pack_gate_up if gate_up else backend.pack
        pack(matrix, given, 0)
        pack(matrix, given, 8)
        assert matrix.format == Fp8Rows()
        found.append((matrix.data.float(), matrix.scale))
    (data, scale), (other_data, other_scale) = found
    assert torch.equal(data, other_data) and torch.equal(scale, other_scale)
    assert torch.equal(scale, fp8_rows(weight).scale.repeat(2))


def test_an_update_and_a_start_with_the_same_weights_give_the_same_matrix():
    backend, old, new = fp8_backend(), floating(weight_of(8, 16)), floating(-3 * weight_of(8, 16))
    updated, fresh = backend.matrix(8, 16), backend.matrix(8, 16)
    for weight in (old, new):
        backend.pack(updated, weight, 0)
    backend.pack(fresh, new, 0)
    assert torch.equal(updated.data.float(), fresh.data.float()) and torch.equal(updated.scale, fresh.scale)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_rows_with_their_scales(rank):
    backend, weight = fp8_backend(), fp8_rows(floating(weight_of(8, 16)))
    linear = Linear(backend, backend.matrix(4, 16), {"q": 8}, ranks=Part(rank))
    dict(linear.parameters())["q.weight"].write(weight)
    mine = slice(4 * rank, 4 * rank + 4)
    assert torch.equal(linear.matrix.data.float(), weight.numbers[mine].float())
    assert torch.equal(linear.matrix.scale, weight.scale[mine])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_columns_with_the_scales_of_all_rows(rank):
    backend, weight = fp8_backend(), fp8_rows(floating(weight_of(8, 16)))
    linear = SummedLinear(backend, backend.matrix(8, 8), "o", ranks=Part(rank))
    dict(linear.parameters())["o.weight"].write(weight)
    assert torch.equal(linear.matrix.data.float(), weight.numbers.float()[:, 8 * rank : 8 * rank + 8])
    assert torch.equal(linear.matrix.scale, weight.scale)


def int_groups(rows: int, columns: int, size: int) -> Weight:
    random = torch.Generator().manual_seed(1)
    numbers = torch.randint(16, (rows, columns), generator=random, dtype=torch.uint8)
    zero = torch.randint(16, (rows, columns // size), generator=random, dtype=torch.uint8)
    return Weight(numbers, IntGroups(4, size), torch.rand(rows, columns // size, generator=random), zero)


def test_a_number_of_a_group_is_its_distance_from_zero_times_the_scale():
    weight = Weight(
        torch.tensor([[0, 7, 15, 8]], dtype=torch.uint8),
        IntGroups(4, 2),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[7, 9]], dtype=torch.uint8),
    )
    assert floating_numbers(weight).tolist() == [[-3.5, 0.0, 12.0, -2.0]]


@pytest.mark.parametrize("columns", [slice(4, 12), slice(2, 9), slice(8, 16)])
def test_some_columns_of_groups_are_the_same_numbers_wherever_they_are_cut(columns):
    weight = int_groups(6, 16, 4)
    found = weight.rows(slice(1, 5)).columns(columns)
    assert torch.equal(floating_numbers(found), floating_numbers(weight)[1:5, columns])
    assert isinstance(found.format, Floating if columns.start % 4 else IntGroups)


def test_groups_are_rounded_to_eight_bits_as_their_numbers_are():
    weight = int_groups(6, 16, 4)
    found, expected = fp8_rows(weight), fp8_rows(floating(floating_numbers(weight)))
    assert torch.equal(found.numbers.float(), expected.numbers.float()) and torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("name", available_backends())
def test_a_floating_point_matrix_accepts_every_format(name):
    backend = choose_backend(name, torch.device("cpu"), torch.float32, HEADS)
    for weight in (fp8_rows(floating(weight_of(8, 16))), int_groups(8, 16, 4)):
        matrix, expected = backend.matrix(8, 16), backend.matrix(8, 16)
        assert matrix.format == Floating(torch.float32)
        backend.pack(matrix, weight, 0)
        backend.pack(expected, floating(floating_numbers(weight)), 0)
        assert torch.equal(matrix.data, expected.data)


def blocks_of(kind: str, rows: int, columns: int) -> Weight:
    return gguf_blocks(floating(weight_of(rows, columns, torch.float32)), GgufBlocks(kind))


def test_blocks_have_the_numbers_that_the_gguf_package_gives():
    kept = blocks_of("Q8_0", 4, 64)
    assert (kept.format, kept.numbers.dtype, kept.numbers.shape) == (GgufBlocks("Q8_0"), torch.uint8, (4, 68))
    assert torch.equal(floating_numbers(kept), torch.from_numpy(gguf.dequantize(kept.numbers.numpy(), Q8_0)))
    assert gguf_blocks(kept, kept.format) is kept


@pytest.mark.parametrize("which", [slice(32, 96), slice(0, 32), slice(16, 48), slice(5, 6)])
def test_columns_of_blocks_stay_blocks_if_they_are_whole(which):
    kept = blocks_of("Q4_1", 4, 96)
    part = kept.columns(which)
    assert isinstance(part.format, GgufBlocks) is (which.start % 32 == 0)
    assert torch.equal(floating_numbers(part), floating_numbers(kept)[:, which])


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_numbers_are_rounded_to_a_kind_of_block_only_if_there_is_one_rule(kind):
    stored = GgufBlocks(kind)
    assert convertible(stored, stored) and convertible(stored, Floating(torch.float32))
    assert convertible(Floating(torch.bfloat16), stored) is GGUF_BLOCKS[kind].rounds
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (stored.columns, stored.bytes_of(stored.columns))
    if GGUF_BLOCKS[kind].rounds:
        assert blocks_of(kind, 2, 64).numbers.shape == (2, stored.bytes_of(64))
