"""Drawing a token: compared with a reference implementation, with probabilities, and across batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.device.rows import Rows
from headgate.device.sampling.draw import Draw, Knobs, draw, draw_with, gumbel, log_uniform, stream_keys
from headgate.device.sampling.sampler import Sampler, knobs_of
from headgate.layers.cpu import NotCompiled, load_kernels
from headgate.protocol.plan import Join
from tests.device.fakes import EOS, brute_force, kept_ids, mix64, noise, step_plan

CHOICES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cool": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top k": {"top_k": 5},
    "top k of one": {"top_k": 1},
    "top k beyond the vocabulary": {"top_k": 10_000},
    "top p": {"top_p": 0.7},
    "top p almost nothing": {"top_p": 1e-6},
    "min p": {"min_p": 0.2},
    "min p of one": {"min_p": 1.0},
    "all three": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
}
ADJUSTED = {
    "bias": {"logit_bias": {3: 4.0, 7: -50.0, 99_999: 100.0}},
    "greedy bias": {"temperature": 0.0, "logit_bias": {11: 30.0}},
    # Stop tokens are so likely that only `min_tokens` keeps them from being drawn.
    "min tokens": {"logit_bias": {EOS: 20.0, 5: 20.0}, "min_tokens": 9, "stop_token_ids": (5, 6, 99_999)},
    "min tokens reached": {"logit_bias": {EOS: 20.0, 5: 20.0}, "min_tokens": 8, "stop_token_ids": (5, 6)},
    "min tokens without eos": {
        "logit_bias": {EOS: 20.0},
        "min_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": (5,),
    },
    "repetition": {"repetition_penalty": 1.7},
    "repetition rewarded": {"repetition_penalty": 0.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "presence": {"presence_penalty": -2.0, "temperature": 0.0},
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {1: 2.0, 4: -3.0},
        "min_tokens": 20,
        "stop_token_ids": (8, 9),
    },
}
PROMPT_LEN = 5


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "distinct": lambda logits: logits,
    "ties": torch.round,
    "all negative": lambda logits: logits - 20,
}


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def random_text(seed: int, length: int, vocab: int) -> list[int]:
    # Few different tokens, so that most of them repeat.
    return np.random.default_rng(seed).integers(0, min(vocab, 12), length).tolist()


@pytest.fixture(params=["torch", "kernels"])
def drawing(request: pytest.FixtureRequest) -> Draw:
    """Each of the two implementations of drawing; the second exists only if this machine can compile it."""
    if request.param == "torch":
        return draw
    kernels = load_kernels()
    if isinstance(kernels, NotCompiled):
        pytest.skip(kernels.reason)
    return draw_with(kernels)


def sampler_with(texts: list[list[int]], params: list[SamplingParams], vocab: int, drawing: Draw = draw) -> Sampler:
    rows = Rows(max_rows=len(texts), max_context=64, block_size=16, vocab_size=vocab, eos_ids=(EOS,))
    joins = tuple(Join(i, tuple(texts[i]), PROMPT_LEN, params[i], (i,)) for i in range(len(texts)))
    rows.apply(step_plan(0, [], joins=joins))
    return Sampler(rows, drawing)


def sample_all(
    logits: torch.Tensor, texts: list[list[int]], params: list[SamplingParams], drawing: Draw = draw
) -> list[int]:
    sampler = sampler_with(texts, params, logits.shape[1], drawing)
    rows, positions = np.arange(len(texts)), np.array([len(text) for text in texts])
    return sampler.sample(logits.clone(), rows, positions).tolist()


@pytest.mark.parametrize("name", [*CHOICES, *ADJUSTED])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_matches_the_reference_rules(name: str, shape: str, drawing: Draw):
    rows, vocab = 40, 53
    logits = SHAPES[shape](random_logits(rows, vocab, seed=1))
    texts = [random_text(seed, PROMPT_LEN + 8, vocab) for seed in range(rows)]
    params = [SamplingParams(seed=seed * 977 - 5, **(CHOICES | ADJUSTED)[name]) for seed in range(rows)]
    expected = [brute_force(logits[i].numpy(), texts[i], PROMPT_LEN, params[i]) for i in range(rows)]
    assert sample_all(logits, texts, params, drawing) == expected


@pytest.mark.parametrize("vocab", [7, 1003, 40_001])
def test_a_row_chooses_the_same_alone_and_among_31_others(vocab: int, drawing: Draw):
    rows, kinds = 32, [*CHOICES.values(), *ADJUSTED.values()]
    logits = random_logits(rows, vocab, seed=2)
    texts = [random_text(seed, PROMPT_LEN + seed % 9, vocab) for seed in range(rows)]
    params = [SamplingParams(seed=seed, **kinds[seed % len(kinds)]) for seed in range(rows)]
    together = sample_all(logits, texts, params, drawing)
    for i in range(rows):
        assert sample_all(logits[i : i + 1], texts[i : i + 1], params[i : i + 1], drawing) == [together[i]]
    strided = torch.empty(rows, 2 * vocab)[:, ::2].copy_(logits)
    lengths = np.array([len(text) for text in texts])
    sampler = sampler_with(texts, params, vocab, drawing)
    assert sampler.sample(strided, np.arange(rows), lengths).tolist() == together


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("drawing", ["kernels"], indirect=True)
def test_kernels_draw_what_torch_draws(name: str, drawing: Draw):
    rows, vocab = 200, 5003
    logits = random_logits(rows, vocab, seed=6)
    params = [SamplingParams(seed=seed, **CHOICES[name]) for seed in range(rows)]
    texts = [[1]] * rows
    assert sample_all(logits, texts, params, drawing) == sample_all(logits, texts, params)


def test_a_long_tail_of_tiny_probabilities_counts_towards_top_p(drawing: Draw):
    # The tail has 0.4 % of the mass, so 99.8 % cannot be reached without some of its tokens.
    logits = torch.full((1, 2**14), -22 * math.log(2.0))
    logits[0, 0] = 0.0
    draws = 1000
    everything = knobs(draws, top_p=1.0)
    tokens = drawing(logits.expand(draws, -1), everything)
    tail = np.flatnonzero(tokens.numpy())
    assert len(tail)
    enough = drawing(logits.expand(len(tail), -1), knobs(draws, top_p=0.998)[tail])
    assert torch.equal(enough, tokens[tail])
    too_little = drawing(logits.expand(len(tail), -1), knobs(draws, top_p=0.99)[tail])
    assert not too_little.any()


def knobs(rows: int, *, top_p: float) -> Knobs:
    ones = np.ones(rows, dtype=np.float32)
    keys = stream_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
    return Knobs(ones, np.zeros(rows, dtype=np.int32), ones * np.float32(top_p), 0 * ones, keys)


def test_noise_is_the_same_to_the_bit_in_any_batch():
    keys = torch.arange(32) * 0x1234_5678_9ABC
    together = gumbel(keys, 1003)
    assert all(torch.equal(together[i], gumbel(keys[i : i + 1], 1003)[0]) for i in range(32))


def test_noise_follows_the_written_formula():
    key = mix64(12345)
    ours = gumbel(torch.tensor([key - 2**64 if key >= 2**63 else key]), 500)[0].tolist()
    assert ours == pytest.approx([noise(key, i) for i in range(500)], rel=1e-5, abs=1e-6)


def test_noise_is_finite_even_where_a_uniform_would_round_to_one():
    numbers = [0, 1, 2**23 - 1, 2**23, 2**24 - 2, 2**24 - 1]
    expected = [math.log((n + 0.5) / 2**24) for n in numbers]
    assert log_uniform(torch.tensor(numbers, dtype=torch.int32)).tolist() == pytest.approx(expected, rel=1e-6)


def test_keys_depend_on_seed_and_position_alone():
    seeds, positions = np.array([0, 1, 2**64 - 5], dtype=np.uint64), np.array([0, 7, 100_000])
    expected = [mix64(int(s) + int(p) * 0x9E3779B97F4A7C15) for s, p in zip(seeds, positions, strict=True)]
    assert stream_keys(seeds, positions).tolist() == expected


def test_a_negative_seed_is_a_seed():
    logits = random_logits(1, 50, seed=3).expand(20, 50)
    texts = [[1, 2, 3, 4, 5]] * 20
    drawn = [sample_all(logits, texts, [SamplingParams(seed=s)] * 20) for s in (-1, -1, 1)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize("choice", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}])
def test_nan_or_infinite_logits_do_not_affect_other_rows(odd: float, choice: dict[str, Any], drawing: Draw):
    logits, texts = random_logits(3, 50, seed=3), [[1, 2, 3, 4, 5]] * 3
    params = [SamplingParams(seed=seed, **choice) for seed in range(3)]
    expected = sample_all(logits, texts, params, drawing)
    for places in (7, slice(None)):
        logits[1, places] = odd
        drawn = sample_all(logits, texts, params, drawing)
        assert [drawn[0], drawn[2]] == [expected[0], expected[2]] and 0 <= drawn[1] < 50


def test_ties_go_to_the_lowest_id(drawing: Draw):
    logits = torch.zeros(2, 40)
    logits[0, [31, 8, 17]] = 1.0
    assert sample_all(logits, [[1]] * 2, [SamplingParams(temperature=0)] * 2, drawing) == [8, 0]


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = random_logits(1, 40, seed=4)
    assert sample_all(logits, [[1]], [SamplingParams(temperature=1e-39)]) == logits.argmax(-1).tolist()


def test_a_sequence_that_samples_must_have_a_seed():
    with pytest.raises(AssertionError, match="must have a seed"):
        sampler_with([[1]], [SamplingParams()], 40)


@pytest.mark.parametrize("name", ["plain", "hot", "top k", "top p", "min p"])
def test_token_frequencies_match_their_probabilities(name: str, drawing: Draw):
    params, draws, vocab = SamplingParams(seed=0, **CHOICES[name]), 20_000, 20
    logits = random_logits(1, vocab, seed=5) / 3  # flat enough for every cut to leave several
    sampler = sampler_with([[1]], [params], vocab)
    records = sampler._rows.sampling[np.zeros(draws, dtype=np.int64)]
    records["seed"] = np.arange(draws) // 50  # 400 seeds, 50 positions of each
    tokens = drawing(logits.expand(draws, vocab).contiguous(), knobs_of(records, np.arange(draws) % 50))
    scaled = logits[0].numpy() / np.float32(params.temperature)
    kept = sorted(kept_ids(scaled, params))
    p = np.exp(scaled[kept] - scaled.max()).astype(np.float64)
    expected = draws * p / p.sum()
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts.sum() == counts[kept].sum()
    # A statistic of n - 1 degrees of freedom exceeds its mean by five standard deviations once in a million times.
    statistic, freedom = ((counts[kept] - expected) ** 2 / expected).sum(), len(kept) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
