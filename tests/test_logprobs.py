"""Log-probabilities against `transformers` on the same weights, in each mode (guarantees 56 and 76)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headgate import LLM, SamplingParams
from headgate.layers.choice import available_backends
from headgate.testing.tiny import tiny_model
from tests.models.reference import reference_logits
from tests.test_equality import CHUNKED, CROWDED, ROOMY, prompts

MODES = ("raw", "scaled", "processed")
WAYS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.6, "top_p": 0.8},
    "top_k, min_p": {"temperature": 1.0, "top_k": 30, "min_p": 0.02},
    "penalties": {
        "temperature": 0.6,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {7: 2.0},
    },
    "penalties, top_p": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    "min_p": {"temperature": 0.6, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "bias, top_p": {"temperature": 1.0, "top_p": 0.7, "logit_bias": {3: -100.0, 7: 4.0}},
    "everything": {
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {9: 1.0},
    },
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def distribution(logits: torch.Tensor, before: Sequence[int], prompt: int, params: SamplingParams) -> torch.Tensor:
    """The log-probabilities [V] of the token after `before`, with the processors of transformers where it has them."""
    scores, ids = logits[None].float().clone(), torch.tensor([before])
    if params.logprobs_mode == "raw":
        return scores[0].log_softmax(-1)
    for token, amount in params.logit_bias.items():
        scores[0, token] += amount
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token, count in Counter(before[prompt:]).items():
        scores[0, token] -= count * params.frequency_penalty + params.presence_penalty
    if params.temperature:
        scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
        for warper in _warpers(params) if params.logprobs_mode == "processed" else ():
            scores = warper(ids, scores)
    return scores[0].log_softmax(-1)


def _warpers(params: SamplingParams) -> list[Any]:
    warpers: list[Any] = [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    return warpers + ([MinPLogitsWarper(params.min_p)] if params.min_p else [])


def check(folder: Path, prompt: list[int], answer: Any, params: SamplingParams) -> None:
    """Check that every value of `answer` equals the reference, for the token itself and for the most likely ones."""
    tokens = [*prompt, *answer.token_ids]
    logits = reference_logits(folder, tokens)
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(prompt)):
        expected = distribution(logits[i - 1], tokens[:i], len(prompt), params)
        assert found.token == pytest.approx(float(expected[token]), abs=TOLERANCE)
        kept = int((expected > -torch.inf).sum())
        assert len(found.top_ids) == min(params.logprobs or 0, kept)
        assert list(found.top) == pytest.approx(expected.topk(len(found.top)).values.tolist(), abs=TOLERANCE)
        assert list(found.top) == pytest.approx([float(expected[id]) for id in found.top_ids], abs=TOLERANCE)


def asked(way: str, mode: str, seed: int, *, max_tokens: int = 8, **more: Any) -> SamplingParams:
    ways = WAYS[way] | more
    return SamplingParams(**ways, logprobs_mode=mode, seed=seed, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("squeeze", [ROOMY, CHUNKED, CROWDED], ids=["roomy", "chunked", "crowded"])
def test_all_modes_side_by_side_give_the_values_of_transformers(folder, backend, squeeze):
    """Requests are batched, chunked and preempted; in the second turn, prompts are found in the prefix cache."""
    cases = [(way, mode) for way in WAYS for mode in MODES]
    texts = prompts(len(cases))
    params = [asked(way, mode, i, max_tokens=24, logprobs=i % 4) for i, (way, mode) in enumerate(cases)]
    with LLM(folder, dtype="float32", backend=backend, **squeeze) as llm:
        for _ in range(2):
            answers = llm.generate(texts, params, progress=False)
            for text, answer, one in zip(texts, answers, params, strict=True):
                check(folder, text, answer, one)
        counters = llm.engine.scheduler.counters
        assert counters.cached_tokens > 0 and (squeeze is not CROWDED or counters.preemptions > 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_takes_its_share_before_the_filters(folder, mode):
    """The tokens that the grammar forbids are excluded from every distribution but the raw one."""
    params = SamplingParams(
        temperature=0.6, top_p=0.8, seed=1, max_tokens=6, logprobs=4, logprobs_mode=mode, grammar="start: /[a-f]+/"
    )
    prompt = prompts(1)[0]
    with LLM(folder, dtype="float32", **ROOMY) as llm:
        (answer,) = llm.generate([prompt], params, progress=False)
        allowed = [id for id in range(300) if llm.tokenizer.decode([id], skip_special=False).strip("abcdef") == ""]
        allowed = [id for id in allowed if llm.tokenizer.decode([id], skip_special=False)]
        stops = [*llm.engine.info.eos_token_ids]
    tokens = [*prompt, *answer.token_ids]
    logits = reference_logits(folder, tokens)
    for i, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(prompt)):
        masked = logits[i - 1].clone()
        if mode != "raw":
            forbidden = torch.ones_like(masked, dtype=torch.bool)
            forbidden[allowed + (stops if i > len(prompt) else [])] = False
            masked[forbidden] = -torch.inf
        expected = distribution(masked, tokens[:i], len(prompt), params)
        assert found.token == pytest.approx(float(expected[token]), abs=TOLERANCE)


@pytest.mark.parametrize("squeeze", [ROOMY, CHUNKED, CROWDED], ids=["roomy", "chunked", "crowded"])
def test_prompts_are_scored_with_the_values_of_transformers(folder, squeeze):
    """With and without an answer, from the first token or a later one; found in the cache (second turn) and preempted."""
    texts = prompts(16)
    params = [
        SamplingParams(max_tokens=24 * (i % 2), prompt_logprobs=i % 3, prompt_logprobs_start=(0, 1, 9)[i % 3], seed=i)
        for i in range(len(texts))
    ]
    with LLM(folder, dtype="float32", **squeeze) as llm:
        for _ in range(2):
            answers = llm.generate(texts, params, progress=False)
            for text, answer, one in zip(texts, answers, params, strict=True):
                check_prompt(folder, text, answer, one)
        counters = llm.engine.scheduler.counters
        assert squeeze is not CROWDED or counters.preemptions > 0


def check_prompt(folder: Path, prompt: list[int], answer: Any, params: SamplingParams) -> None:
    expected = reference_logits(folder, prompt).float().log_softmax(-1)
    assert len(answer.prompt_logprobs) == len(prompt)
    for at, found in enumerate(answer.prompt_logprobs):
        if at < max(1, params.prompt_logprobs_start):
            assert found is None
            continue
        row = expected[at - 1]
        assert found.token == pytest.approx(float(row[prompt[at]]), abs=TOLERANCE)
        assert list(found.top) == pytest.approx(row.topk(params.prompt_logprobs).values.tolist(), abs=TOLERANCE)
        assert found.rank == int((row > row[prompt[at]]).sum()) + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_answer_continues_with_the_same_values(folder, mode):
    params, prompt = asked("penalties, top_p", mode, 3, logprobs=2), prompts(1)[0]
    with LLM(folder, dtype="float32", **ROOMY) as llm:
        (whole,) = llm.generate([prompt], params, progress=False)
        (rest,) = llm.generate([prompt], params, generated=[whole.token_ids[:3]], progress=False)
    assert rest.token_ids == whole.token_ids
    assert [each.token for each in rest.logprobs] == pytest.approx(
        [each.token for each in whole.logprobs[3:]], abs=TOLERANCE
    )


def test_the_ratio_between_engine_and_trainer_at_temperature_0_6_is_1(folder):
    """A trainer divides its logits by the temperature; `scaled` needs no correction, even with top_p."""
    params, texts = asked("top_p", "scaled", 0, logprobs=0), prompts(6)
    with LLM(folder, dtype="float32", **ROOMY) as llm:
        answers = llm.generate(texts, params, progress=False)
    for prompt, answer in zip(texts, answers, strict=True):
        tokens = [*prompt, *answer.token_ids]
        trained = (reference_logits(folder, tokens) / 0.6).log_softmax(-1)
        for i, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(prompt) - 1):
            assert torch.exp(trained[i, token] - found.token).item() == pytest.approx(1, abs=TOLERANCE)
