"""Sampling on the CPU kernels against a plain implementation of the same rules, on every instruction set here."""

import math

import pytest
import torch

from headgate.layers.cpu import Kernels, NotCompiled, load_kernels
from headgate.layers.cpu.build import supported_isas

VECTOR_ISAS = [isa for isa in supported_isas() if not isa.startswith("amx")]


@pytest.fixture(params=VECTOR_ISAS)
def k(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    assert not isinstance(loaded, NotCompiled), loaded.reason
    return loaded


def gumbel(key: int, vocab: int) -> torch.Tensor:
    """Return the Gumbel noise, computed in a slow and simple way with float64 and Python's integers."""
    mask = 0xFFFFFFFF
    x = ((torch.arange(vocab) * 0x9E3779B9 + (key & mask)) & mask) ^ ((key >> 32) & mask)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x = x ^ (x >> 16)
    return -torch.log(-torch.log(((x >> 8).double() + 0.5) * 2.0**-24))


def kept(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which entries may be drawn, computed in float64."""
    order = scaled.sort(descending=True).values
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < top_k < len(scaled):
        keep &= scaled >= order[top_k - 1]
    p = torch.where(keep, (scaled - scaled.max()).exp(), 0.0)
    p = p / p.sum()
    if top_p < 1:
        ordered = p.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        first_of_equals = torch.searchsorted(-ordered, -p)
        keep &= before[first_of_equals] < top_p
    return keep & (p >= min_p * p.max())


def expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits / temperature).double()
    drawn = torch.where(kept(scaled, top_k, top_p, min_p), scaled + gumbel(key, len(logits)), -torch.inf)
    return int(drawn.argmax())


def sample(k: Kernels, logits: torch.Tensor, rows: list[tuple[float, int, float, float, int]]) -> list[int]:
    temperature, top_k, top_p, min_p, keys = zip(*rows, strict=True)
    drawn = k.sample(
        logits,
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(keys),
    )
    return drawn.tolist()


def random_logits(seed: int, rows: int, vocab: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def random_keys(seed: int, count: int) -> list[int]:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (50, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.1, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (20, 0.8, 0.02),
    (1000, 0.95, 0.0),
    (10**6, 1.0, 0.0),
]


EXTREMES = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 0.0, 1.0]


@pytest.mark.parametrize("vocab", [*range(1, 36), 255])
def test_a_token_of_the_vocabulary_is_drawn_for_any_logits(k, vocab):
    """Vocabularies have every remainder of a vector's size. `make sanitize` detects reads beyond the rows."""
    filters = [*FILTERS, (vocab, 1.0, 0.0), (vocab - 1, 0.5, 1.0), (2, 1e-9, 0.0), (0, 0.0, 0.0)]
    chosen = torch.randint(len(EXTREMES), (len(filters) * 3, vocab), generator=torch.Generator().manual_seed(vocab))
    logits = torch.tensor(EXTREMES)[chosen]
    logits[1::3] = random_logits(vocab, len(logits), vocab, 5.0)[1::3]
    keys = random_keys(vocab, len(logits))
    rows = [(t, *f, keys.pop()) for f in filters for t in (0.0, 1e-3, 1.0)]
    assert all(0 <= token < vocab for token in sample(k, logits, rows))
    maximum, log_sum = k.log_softmax_stats(logits[1::3])
    assert torch.equal(maximum, logits[1::3].max(1).values) and bool((log_sum >= maximum - 1e-5).all())


@pytest.mark.parametrize("vocab", [1, 2, 16, 17, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_every_filter_draws_what_the_reference_implementation_draws(k, vocab, spread):
    logits = random_logits(vocab, len(FILTERS) * 3, vocab, spread)
    keys = random_keys(vocab, len(logits))
    rows = [(t, *f, keys.pop()) for t in (0.3, 1.0, 2.5) for f in FILTERS]
    drawn = sample(k, logits, rows)
    assert drawn == [expected(row, *parameters) for row, parameters in zip(logits, rows, strict=True)]


def test_a_large_vocabulary_draws_what_the_reference_implementation_draws(k):
    logits = random_logits(1, len(FILTERS), 151_936, 4.0)
    rows = [(0.8, *f, key) for f, key in zip(FILTERS, random_keys(2, len(FILTERS)), strict=True)]
    assert sample(k, logits, rows) == [expected(row, *p) for row, p in zip(logits, rows, strict=True)]


def test_greedy_takes_the_lowest_index_of_equals(k):
    logits = torch.zeros(3, 100)
    logits[0, [40, 90]] = 5.0
    logits[1, [99]] = 1.0
    assert sample(k, logits, [(0.0, 0, 1.0, 0.0, 7)] * 3) == [40, 99, 0]


def test_ties_with_the_kth_value_are_all_kept(k):
    logits = torch.full((400, 40), -5.0)
    logits[:, 3], logits[:, [10, 20, 30]] = 1.0, 0.5
    drawn = sample(k, logits, [(1.0, 2, 1.0, 0.0, key) for key in random_keys(3, 400)])
    assert set(drawn) == {3, 10, 20, 30}


def test_ties_with_the_last_of_the_nucleus_are_all_kept(k):
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log().repeat(400, 1)
    drawn = sample(k, logits, [(1.0, 0, 0.5, 0.0, key) for key in random_keys(4, 400)])
    assert set(drawn) == {0, 1, 2, 3}
    drawn = sample(k, logits, [(1.0, 0, 0.3, 0.0, key) for key in random_keys(4, 400)])
    assert set(drawn) == {0}


def test_min_p_keeps_what_is_likely_enough_relative_to_the_best(k):
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log().repeat(400, 1)
    drawn = sample(k, logits, [(1.0, 0, 1.0, 0.4, key) for key in random_keys(5, 400)])
    assert set(drawn) == {0, 1}


def test_draws_follow_the_probabilities(k):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    drawn = sample(k, probabilities.log().repeat(rows, 1), [(1.0, 0, 1.0, 0.0, key) for key in random_keys(6, rows)])
    share = torch.bincount(torch.tensor(drawn), minlength=4) / rows
    assert ((share - probabilities).abs() < 4 * (probabilities / rows).sqrt()).all()


def test_noise_is_exact_where_float32_cannot_hold_the_uniform_number(k):
    # Entry 0 hashes to n = 2^24 - 2. float32 rounds (n + 1/2) / 2^24, and its noise would be 15.94, not 16.23.
    key = 55329103
    first, second = gumbel(key, 2).tolist()
    assert first == pytest.approx(16.2299, abs=1e-3)
    for total, winner in ((16.1, 0), (16.2, 0), (16.26, 1)):
        assert sample(k, torch.tensor([[0.0, total - second]]), [(1.0, 0, 1.0, 0.0, key)]) == [winner]


def test_a_row_draws_the_same_token_alone_and_among_others(k):
    logits = random_logits(8, 30, 5000, 3.0)
    rows = [(0.9, *FILTERS[i % len(FILTERS)], key) for i, key in enumerate(random_keys(9, 30))]
    together = sample(k, logits, rows)
    assert [sample(k, logits[i : i + 1], rows[i : i + 1])[0] for i in range(30)] == together
    assert sample(k, logits.flip(0), rows[::-1])[::-1] == together


def test_logits_masked_to_minus_infinity_are_never_drawn(k):
    logits = random_logits(10, 200, 300, 1.0)
    logits[:, 5:] = -math.inf
    rows = [(1.5, *FILTERS[i % len(FILTERS)], key) for i, key in enumerate(random_keys(11, 200))]
    assert max(sample(k, logits, rows)) < 5


@pytest.mark.parametrize("vocab", [1, 17, 151_936])
def test_log_softmax_stats_agree_with_float64(k, vocab):
    logits = random_logits(12, 3, vocab, 5.0)
    maximum, lse = k.log_softmax_stats(logits)
    assert maximum.equal(logits.max(-1).values)
    torch.testing.assert_close(lse, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
