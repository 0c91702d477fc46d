"""Norms, rotary embedding, paged cache and attention of the CPU kernels, on every instruction set of this machine."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from headgate.layers.cpu import Kernels, NotCompiled, load_kernels
from headgate.layers.cpu.build import supported_isas
from headgate.layers.cpu.kernels import why_unsupported

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 5e-6}
VECTOR_ISAS = [isa for isa in supported_isas() if not isa.startswith("amx")]


@pytest.fixture(params=VECTOR_ISAS)
def k(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert not isinstance(loaded, NotCompiled), loaded.reason
    return loaded


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def llama_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_tables(positions: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.arange(positions).float()[:, None] * torch.cat([frequencies, frequencies])
    return angles.cos(), angles.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [8, 33, 576, 1024])
def test_rms_norm_rounds_like_transformers(k, dtype, K):
    x, weight = random(1, 7, K, dtype=dtype), random(2, K, dtype=dtype)
    out = k.rms_norm(x, weight, 1e-6, out=torch.full_like(x, float("nan")))
    expected = llama_rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 0.016, atol=1e-7)
    assert dtype == torch.float32 or (out == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_weight_multiplies_before_rounding_like_gemmas(k, dtype):
    x, weight = random(1, 7, 577, dtype=dtype), random(2, 577, dtype=torch.float32)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected, rounded_first = (wide * weight).to(dtype), (wide.to(dtype) * weight).to(dtype)
    out = k.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 0.008, atol=1e-7)
    if dtype == torch.bfloat16:
        assert (out == expected).float().mean() > 0.999 > (rounded_first == expected).float().mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_into_the_residual_and_norms_the_rounded_sum(k, dtype):
    x, residual, weight = (
        random(1, 40, 1000, dtype=dtype),
        random(2, 40, 1000, dtype=dtype),
        random(3, 1000, dtype=dtype),
    )
    expected_sum = residual + x
    out = k.add_rms_norm(x, residual, weight, 1e-5)
    assert residual.equal(expected_sum)
    assert out.equal(k.rms_norm(expected_sum, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_normed_row_has_the_same_bits_alone_and_among_others(k, dtype):
    x, weight = random(1, 60, 1000, dtype=dtype), random(2, 1000, dtype=dtype)
    whole = k.rms_norm(x, weight, 1e-6)
    assert all(k.rms_norm(x[i : i + 1], weight, 1e-6).equal(whole[i : i + 1]) for i in range(60))


# Rotary embedding and the cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_size", [8, 16, 64, 128])
def test_rope_and_write_matches_transformers_bit_for_bit_without_norms(k, dtype, block_size, head_size):
    H, HK, D, T = 6, 2, head_size, 21
    cos, sin = rotary_tables(100, D)
    qkv = random(1, T, (H + 2 * HK) * D, dtype=dtype)
    positions = torch.randint(0, 100, (T,), generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(2))[:T]
    k_cache, v_cache = k.empty_kv(4, block_size, HK, D, dtype)
    heads = qkv.clone().view(T, -1, D)
    rotated = heads[:, : H + HK] * cos[positions, None].to(dtype)
    rotated = rotated + rotate_half(heads[:, : H + HK]) * sin[positions, None].to(dtype)

    q = k.rope_and_write(qkv, positions, cos, sin, None, None, 0.0, k_cache, v_cache, slots, H, HK, D)

    keys, values = k.read_kv(k_cache, v_cache, slots)
    assert q.equal(rotated[:, :H])
    assert keys.equal(rotated[:, H:])
    assert values.equal(heads[:, H + HK :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_key_norms_come_before_the_rotation(k, dtype):
    H, HK, D, T = 4, 2, 32, 5
    cos, sin = rotary_tables(50, D)
    qkv, q_weight, k_weight = (
        random(1, T, (H + 2 * HK) * D, dtype=dtype),
        random(2, D, dtype=dtype),
        random(3, D, dtype=dtype),
    )
    positions = torch.tensor([3, 1, 4, 15, 9], dtype=torch.int32)
    k_cache, v_cache = k.empty_kv(1, 32, HK, D, dtype)
    heads = qkv.clone().view(T, -1, D)
    normed_q = llama_rms_norm(heads[:, :H], q_weight, 1e-6)
    normed_k = llama_rms_norm(heads[:, H : H + HK], k_weight, 1e-6)
    c, s = cos[positions.long(), None].to(dtype), sin[positions.long(), None].to(dtype)

    q = k.rope_and_write(
        qkv, positions, cos, sin, q_weight, k_weight, 1e-6, k_cache, v_cache, torch.arange(T), H, HK, D
    )

    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(q, normed_q * c + rotate_half(normed_q) * s, rtol=tolerance, atol=tolerance)
    keys = k.read_kv(k_cache, v_cache, torch.arange(T))[0]
    torch.testing.assert_close(keys, normed_k * c + rotate_half(normed_k) * s, rtol=tolerance, atol=tolerance)


def test_a_negative_slot_is_not_written_and_a_slot_outside_is_refused(k):
    cos, sin = rotary_tables(10, 16)
    k_cache, v_cache = k.empty_kv(1, 16, 1, 16, torch.bfloat16)
    qkv = random(1, 1, 48, dtype=torch.bfloat16)
    for slot in (-1, 16):
        arguments = (torch.tensor([0]), cos, sin, None, None, 0.0, k_cache, v_cache, torch.tensor([slot]), 1, 1, 16)
        if slot < 0:
            k.rope_and_write(qkv, *arguments)
        else:
            with pytest.raises(IndexError, match="slot 16"):
                k.rope_and_write(qkv, *arguments)
    assert not k_cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_blocks_read_back(k, dtype):
    k_cache, v_cache = k.empty_kv(3, 32, 2, 24, dtype)
    keys, values = random(1, 64, 2, 24, dtype=dtype), random(2, 64, 2, 24, dtype=dtype)
    slots = torch.cat([torch.arange(64, 96), torch.arange(0, 32)])
    k.write_kv(k_cache, v_cache, slots, keys, values)
    read = k.read_kv(k_cache, v_cache, slots)
    assert read[0].equal(keys)
    assert read[1].equal(values)
    assert not k_cache[1].any()


# Attention


@dataclass
class Scene:
    """Sequences with random queries, keys and values, in a cache whose blocks are shuffled and whose rest is NaN."""

    q: torch.Tensor  # all queries of all positions, [S][context, H, D]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    scale: float

    def reference(
        self, s: int, window: int = 0, first: int = 0, cap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the expected attention in float64, for the positions from `first` on."""
        q, keys, values = self.q[s][first:].double(), self.keys[s].double(), self.values[s].double()
        share = q.size(1) // keys.size(1)
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        scores = cap * (scores / cap).tanh() if cap else scores
        distance = torch.arange(first, len(keys))[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | ((distance >= window) if window else False)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
        return torch.einsum("hqk,khd->qhd", weights / total[..., None], values)


def scene(
    k: Kernels, dtype: torch.dtype, contexts: list[int], H: int, HK: int, D: int, block_size: int = 32
) -> Scene:
    generator = torch.Generator().manual_seed(sum(contexts) + H + D)
    width = max(-(-c // block_size) for c in contexts) + 1
    blocks = len(contexts) * width
    k_cache, v_cache = k.empty_kv(blocks, block_size, HK, D, dtype)
    k_cache.fill_(float("nan"))
    v_cache.fill_(float("nan"))
    tables = torch.randperm(blocks, generator=generator).view(len(contexts), width).int()
    drawn = [[torch.randn(c, h, D, generator=generator).to(dtype) for h in (H, HK, HK)] for c in contexts]
    for table, (_, keys, values) in zip(tables, drawn, strict=True):
        at = torch.arange(len(keys))
        k.write_kv(k_cache, v_cache, table[at // block_size].long() * block_size + at % block_size, keys, values)
    q, keys, values = ([d[i] for d in drawn] for i in range(3))
    return Scene(q, keys, values, k_cache, v_cache, tables, D**-0.5)


def attend(
    k: Kernels,
    on: Scene,
    slices: list[tuple[int, int, int]],
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Compute slices (sequence, first, last position) in one call; returns the result of each slice."""
    q = torch.cat([on.q[s][first:last] for s, first, last in slices])
    lengths = torch.tensor([0] + [last - first for _, first, last in slices])
    contexts = torch.tensor([last for _, _, last in slices], dtype=torch.int32)
    tables = on.tables[[s for s, _, _ in slices]].contiguous()
    starts = lengths.cumsum(0).int()
    out = torch.full_like(q, float("nan"))
    k.attention(q, on.k_cache, on.v_cache, starts, contexts, tables, on.scale, window, cap, sinks, out=out)
    return list(out.split(lengths[1:].tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("H", "HK", "D", "block_size"),
    [
        (2, 2, 64, 32),
        (4, 2, 128, 32),
        (9, 3, 64, 16),
        (8, 1, 256, 64),
        (4, 2, 8, 32),
        (3, 1, 16, 16),
        (16, 1, 48, 32),
        (2, 1, 80, 64),
    ],
)
def test_prefill_agrees_with_a_float64_softmax(k, dtype, H, HK, D, block_size):
    on = scene(k, dtype, [1, 17, 64, 150], H, HK, D, block_size)
    results = attend(k, on, [(s, 0, c) for s, c in enumerate((1, 17, 64, 150))])
    for s, result in enumerate(results):
        torch.testing.assert_close(result.double(), on.reference(s), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_long_contexts_agrees_with_a_float64_softmax(k, dtype):
    contexts = [1, 33, 512, 513, 1100, 1600]
    on = scene(k, dtype, contexts, 4, 2, 64)
    for s, result in enumerate(attend(k, on, [(s, c - 1, c) for s, c in enumerate(contexts)])):
        torch.testing.assert_close(
            result.double(), on.reference(s, first=contexts[s] - 1), rtol=0, atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 100, 700])
def test_a_window_hides_what_lies_before_it(k, dtype, window):
    on = scene(k, dtype, [40, 800], 4, 2, 32)
    whole = attend(k, on, [(0, 0, 40), (1, 0, 800)], window)
    for s, result in enumerate(whole):
        torch.testing.assert_close(result.double(), on.reference(s, window), rtol=0, atol=TOLERANCE[dtype])
    for position in (0, 63, 511, 512, 799):
        assert attend(k, on, [(1, position, position + 1)], window)[0].equal(whole[1][position : position + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [None, (-2.0, 0.0, 3.0, 90.0)])
@pytest.mark.parametrize("window", [0, 5])
def test_caps_and_sinks_agree_with_a_float64_softmax_and_change_no_bit_of_a_lone_query(k, dtype, cap, sinks, window):
    contexts = (40, 1100)
    on = scene(k, dtype, list(contexts), 4, 2, 32)
    with_sinks = None if sinks is None else torch.tensor(sinks)
    whole = attend(k, on, [(s, 0, c) for s, c in enumerate(contexts)], window, cap, with_sinks)
    for s, result in enumerate(whole):
        expected = on.reference(s, window, cap=cap, sinks=with_sinks)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    for position in (0, 63, 511, 512, 1099):
        alone = attend(k, on, [(1, position, position + 1)], window, cap, with_sinks)[0]
        assert alone.equal(whole[1][position : position + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "HK", "D"), [(4, 2, 128), (3, 3, 64), (6, 1, 32)])
def test_a_query_has_the_same_bits_decoded_alone_prefilled_whole_or_in_chunks(k, dtype, H, HK, D):
    length = 1090
    on = scene(k, dtype, [length, 70], H, HK, D)
    (whole,) = attend(k, on, [(0, 0, length)])
    edges = [0, 1, 31, 32, 200, 511, 514, 1030, length]
    for first, last in pairwise(edges):
        assert attend(k, on, [(0, first, last)])[0].equal(whole[first:last])
    for position in (0, 15, 16, 63, 64, 300, 511, 512, 513, 1023, 1024, length - 1):
        alone = attend(k, on, [(0, position, position + 1)])[0]
        among = attend(k, on, [(1, 0, 70), (0, position, position + 1), (1, 69, 70)])[1]
        assert alone.equal(whole[position : position + 1])
        assert among.equal(alone)


def test_the_number_of_threads_changes_no_bit_of_attention(k):
    on = scene(k, torch.bfloat16, [2000], 2, 1, 64)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(attend(k, on, [(0, 1999, 2000)])[0])
    torch.set_num_threads(threads)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


def test_queries_may_be_a_view_of_qkv(k):
    on = scene(k, torch.bfloat16, [20], 2, 1, 16)
    qkv = torch.cat([on.q[0].flatten(1), torch.zeros(20, 32, dtype=torch.bfloat16)], 1)
    view = qkv[:, :32].view(20, 2, 16)
    starts, contexts = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    out = k.attention(view, on.k_cache, on.v_cache, starts, contexts, on.tables, on.scale)
    assert out.equal(attend(k, on, [(0, 0, 20)])[0])


def test_a_context_longer_than_its_blocks_is_refused(k):
    on = scene(k, torch.bfloat16, [20], 2, 1, 16)
    starts, contexts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1000], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="1000 tokens in 2 blocks"):
        k.attention(on.q[0][:1], on.k_cache, on.v_cache, starts, contexts, on.tables, on.scale)


def test_unsupported_shapes_are_named():
    assert why_unsupported(128, 32, torch.bfloat16) is None
    assert "head sizes" in (why_unsupported(20, 32, torch.bfloat16) or "")
    assert "block sizes" in (why_unsupported(64, 8, torch.bfloat16) or "")
    assert "float16" in (why_unsupported(64, 32, torch.float16) or "")
