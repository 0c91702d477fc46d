"""The packed linear layers of the CPU kernels against torch, on every instruction set this machine can run."""

import pytest
import torch
import torch.nn.functional as F

from headgate.layers.cpu import Kernels, NotCompiled, load_kernels
from headgate.layers.cpu.build import supported_isas

DTYPES = (torch.bfloat16, torch.float32)
ODD_SHAPES = (
    (1, 1, 1),
    (1, 16, 32),
    (3, 17, 33),
    (5, 100, 31),
    (13, 48, 64),
    (16, 80, 70),
    (17, 33, 96),
    (40, 130, 257),
)


def kernels(isa: str) -> Kernels:
    loaded = load_kernels(isa)
    assert not isinstance(loaded, NotCompiled), loaded.reason
    return loaded


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(k: Kernels, weight: torch.Tensor) -> torch.Tensor:
    room = k.empty_packed(weight.size(0), weight.size(1), weight.dtype)
    k.pack_into(room, weight)
    return room


def packed_pair(k: Kernels, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    room = k.empty_packed_pair(gate.size(0), gate.size(1), gate.dtype)
    k.pack_pair_into(room, gate, 0, "gate")
    k.pack_pair_into(room, up, 0, "up")
    return room


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_close(actual: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Check that errors are at most the rounding of the output dtype, plus the error of sums in float32."""
    allowed = exact.abs() * torch.finfo(actual.dtype).eps + magnitude * 1e-6 + 1e-30
    assert ((actual.double() - exact).abs() <= allowed).all()


@pytest.fixture(params=supported_isas())
def k(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_linear_agrees_with_a_float64_product_and_writes_every_element(k, dtype, shape):
    M, N, K = shape
    x, weight = random(1, M, K, dtype=dtype), random(2, N, K, dtype=dtype)
    out = k.linear(x, packed(k, weight), N, out=poisoned(M, N, dtype=dtype))
    assert_close(out, x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_before_the_one_rounding(k, dtype):
    M, N, K = 7, 37, 50
    x, weight, bias = random(1, M, K, dtype=dtype), random(2, N, K, dtype=dtype), random(3, N, dtype=dtype)
    out = k.linear(x, packed(k, weight), N, bias)
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert_close(out, x.double() @ weight.double().T + bias.double(), magnitude)


@pytest.mark.parametrize("M", [1, 19])
def test_logits_can_be_float32_from_bfloat16(k, M):
    x, weight = random(1, M, 64, dtype=torch.bfloat16), random(2, 50, 64, dtype=torch.bfloat16)
    out = k.linear(x, packed(k, weight), 50, out_dtype=torch.float32, out=poisoned(M, 50, dtype=torch.float32))
    assert_close(out, x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_tensor_need_no_copy(k, dtype):
    wide, weight = random(1, 9, 100, dtype=dtype), random(2, 20, 40, dtype=dtype)
    room = packed(k, weight)
    assert k.linear(wide[:, 30:70], room, 20).equal(k.linear(wide[:, 30:70].contiguous(), room, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [64, 75])
def test_a_row_of_linear_has_the_same_bits_alone_and_among_others(k, dtype, K):
    N, M = 90, 45
    x, weight = random(1, M, K, dtype=dtype), random(2, N, K, dtype=dtype)
    room, pair = packed(k, weight), packed_pair(k, weight[:45], weight[45:])
    whole, whole_pair = k.linear(x, room, N), k.linear_silu_mul(x, pair, 45)
    for first, last in [(0, 1), (7, 8), (3, 5), (10, 23), (20, 45), (44, 45), (1, 34)]:
        assert k.linear(x[first:last], room, N).equal(whole[first:last])
        assert k.linear_silu_mul(x[first:last], pair, 45).equal(whole_pair[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_is_not_touched_by_nan_in_another(k, dtype):
    x, weight = random(1, 20, 33, dtype=dtype), random(2, 40, 33, dtype=dtype)
    room = packed(k, weight)
    clean = k.linear(x, room, 40)
    x[11] = float("nan")
    touched = k.linear(x, room, 40)
    others = torch.arange(20) != 11
    assert touched[others].equal(clean[others])
    assert touched[11].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(k, dtype):
    x, weight = random(1, 30, 64, dtype=dtype), random(2, 200, 64, dtype=dtype)
    room = packed(k, weight)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(k.linear(x, room, 200))
    torch.set_num_threads(threads)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_silu_mul_is_rounded_like_the_eager_expression(k, dtype, shape):
    M, N, K = shape
    # Multiples of 1/64: all sums are exact in float32 but not in bfloat16, so the roundings under test are the only ones.
    generator = torch.Generator().manual_seed(3)
    x = (torch.randint(-50, 51, (M, K), generator=generator) / 64).to(dtype)
    gate, up = (torch.randint(-2, 3, (N, K), generator=generator).to(dtype) for _ in range(2))
    out = k.linear_silu_mul(x, packed_pair(k, gate, up), N, out=poisoned(M, N, dtype=dtype))
    expected = F.silu((x.float() @ gate.float().T).to(dtype)) * (x.float() @ up.float().T).to(dtype)
    # exp differs from torch's in the last place, so a rounding to bfloat16 may fall on the other side.
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 0.008, atol=1e-30)
    assert (out == expected).float().mean() > (0.3 if dtype == torch.float32 else 0.98)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_adds_the_bias_of_gate_and_up(k, dtype):
    x, gate, up = (random(s, *size, dtype=dtype) for s, size in enumerate(((5, 40), (20, 40), (20, 40))))
    bias = random(9, 40, dtype=dtype)
    out = k.linear_silu_mul(x, packed_pair(k, gate, up), 20, bias)
    expected = F.silu(x.float() @ gate.float().T + bias[:20]) * (x.float() @ up.float().T + bias[20:])
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_packed_in_pieces_at_odd_offsets_read_back_as_they_were(k, dtype):
    weight = random(1, 75, 45, dtype=dtype)
    room = k.empty_packed(75, 45, dtype)
    for first, last in [(40, 75), (0, 7), (7, 40)]:
        k.pack_into(room, weight[first:last], first)
    ids = torch.tensor([74, 0, 16, 16, 39, 7])
    assert k.unpack_rows(room, ids, 45).equal(weight[ids])
    assert k.unpack_rows(room, torch.arange(75), 45).equal(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_is_packed_in_pieces_and_read_back_by_part(k, dtype):
    gate, up = random(1, 50, 40, dtype=dtype), random(2, 50, 40, dtype=dtype)
    room = k.empty_packed_pair(50, 40, dtype)
    for first, last in [(0, 21), (21, 50)]:
        k.pack_pair_into(room, up[first:last], first, "up")
        k.pack_pair_into(room, gate[first:last], first, "gate")
    assert k.unpack_pair_rows(room, torch.arange(50), 40, "gate").equal(gate)
    assert k.unpack_pair_rows(room, torch.arange(50), 40, "up").equal(up)


def test_overwriting_some_rows_leaves_the_others(k):
    weight, update = random(1, 40, 32, dtype=torch.bfloat16), random(2, 3, 32, dtype=torch.bfloat16)
    room = packed(k, weight)
    k.pack_into(room, update, 15)
    weight[15:18] = update
    assert k.unpack_rows(room, torch.arange(40), 32).equal(weight)


def test_a_large_weight_in_huge_pages_gives_the_same_product(k):
    x, weight = random(1, 2, 512, dtype=torch.bfloat16), random(2, 4200, 512, dtype=torch.bfloat16)
    room = packed(k, weight)
    assert room.nbytes > 4 << 20
    out = k.linear(x, room, 4200)
    assert_close(out, x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T)


def test_rows_that_do_not_fit_are_refused(k):
    room = k.empty_packed(20, 8, torch.float32)
    with pytest.raises(RuntimeError, match="do not fit"):
        k.pack_into(room, torch.zeros(10, 8), 30)
    with pytest.raises(IndexError, match="row 32"):
        k.unpack_rows(room, torch.tensor([32]), 8)
