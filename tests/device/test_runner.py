"""Whole steps with a model that hashes the KV it reads, compared with a simple generator that works on lists."""

from __future__ import annotations

import random

import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.device.runner import ModelRunner
from headgate.device.sampling import logprobs as logprobs_module
from headgate.protocol.plan import Logprobs, StepPlan, StepResult
from tests.device.fakes import Text, expected_tokens, hash_of, hash_runner, logits_of, step_plan

GREEDY = SamplingParams(temperature=0)
KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 9},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 2.0},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {3: 3.0}, "min_tokens": 6, "stop_token_ids": (4, 5)},
]


def text(
    row: int, sampling: SamplingParams, *, prompt: list[int] | None = None, blocks: list[int] | None = None
) -> Text:
    prompt = prompt or [random.Random(row).randrange(97) for _ in range(3 + row % 11)]
    return Text(row, prompt, sampling, blocks=blocks or list(range(row * 16, row * 16 + 16)))


def prefill(step: int, texts: list[Text]) -> StepPlan:
    joins = tuple(t.join() for t in texts)
    return step_plan(step, [t.advance(len(t.prompt), True) for t in texts], joins=joins)


def decode(step: int, texts: list[Text]) -> StepPlan:
    slices = [t.advance(1, True) for t in texts]
    return step_plan(step, slices, grown=tuple(grown for t in texts for grown in t.grown()))


def generate(runner: ModelRunner, texts: list[Text], count: int) -> list[list[int]]:
    results = [runner.run(prefill(0, texts))]
    results += [runner.run(decode(step, texts)) for step in range(1, count)]
    return [list(tokens) for tokens in zip(*(result.tokens for result in results), strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_sequence_continues_according_to_the_reference_rules(kind: dict[str, object]):
    one = text(3, SamplingParams(seed=17, **kind))
    assert generate(hash_runner(), [one], 20) == [expected_tokens(one.prompt, one.sampling, 20)]


def test_seeded_sampling_is_the_same_alone_and_among_32():
    def texts() -> list[Text]:
        return [text(row, SamplingParams(seed=row, **KINDS[row % len(KINDS)])) for row in range(32)]

    together = generate(hash_runner(), texts(), 12)
    alone = [generate(hash_runner(), [one], 12)[0] for one in texts()]
    assert together == alone


def test_chunks_change_nothing():
    rng = random.Random(5)
    one = text(2, SamplingParams(seed=4), prompt=[rng.randrange(97) for _ in range(30)])
    runner, step, result = hash_runner(), 0, StepResult(0, [])
    joins = (one.join(),)
    while one.computed < 30:
        count = min(rng.randint(1, 9), 30 - one.computed)
        last = one.computed + count == 30
        result = runner.run(step_plan(step, [one.advance(count, last)], joins=joins))
        assert len(result.tokens) == last
        joins, step = (), step + 1
    assert result.tokens == expected_tokens(one.prompt, one.sampling, 1)


def test_prefill_and_decode_share_a_step():
    early, late = text(0, SamplingParams(seed=1)), text(1, SamplingParams(seed=2))
    runner = hash_runner()
    first = runner.run(prefill(0, [early])).tokens
    mixed = step_plan(
        1,
        [late.advance(len(late.prompt), True), early.advance(1, True)],
        joins=(late.join(),),
        grown=early.grown(),
    )
    tokens = runner.run(mixed).tokens
    assert tokens[0] == expected_tokens(late.prompt, late.sampling, 1)[0]
    assert [*first, tokens[1]] == expected_tokens(early.prompt, early.sampling, 2)


def test_a_slice_reads_blocks_that_another_slice_of_the_plan_fills():
    shared = [5, 6, 7, 8]
    writer = text(0, GREEDY, prompt=[*shared, 9], blocks=[1, 2])
    reader = text(1, GREEDY, prompt=[*shared, 10], blocks=[1, 3])
    reader.computed = 4
    joins = (writer.join(), reader.join())
    result = hash_runner().run(step_plan(0, [writer.advance(5, True), reader.advance(1, True)], joins=joins))
    assert result.tokens == [expected_tokens(one.prompt, GREEDY, 1)[0] for one in (writer, reader)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_resumed_sequence_continues_as_if_never_stopped(kind: dict[str, object]):
    sampling = SamplingParams(seed=3, **kind)
    prompt, blocks = text(0, sampling).prompt, list(range(16))
    whole = expected_tokens(prompt, sampling, 14)
    elsewhere = Text(7, prompt, sampling, blocks=blocks)
    join = elsewhere.join(generated=whole[:6])
    runner = hash_runner()
    tokens = runner.run(step_plan(0, [elsewhere.advance(len(prompt) + 6, True)], joins=(join,))).tokens
    for step in range(1, 8):
        tokens += runner.run(decode(step, [elsewhere])).tokens
    assert tokens == whole[6:]


def test_a_plan_without_slices_has_an_empty_result():
    assert hash_runner().run(step_plan(4, [])) == StepResult(4, [])


def test_a_step_that_samples_nothing_has_no_tokens():
    one = text(0, GREEDY)
    assert hash_runner().run(step_plan(2, [one.advance(2, False)], joins=(one.join(),))) == StepResult(2, [])


def raw_logprobs(tokens: list[int]) -> torch.Tensor:
    return logits_of(torch.tensor([hash_of(tokens)]))[0].log_softmax(-1)


def assert_scores(scores: Logprobs, tokens: list[int], token: int, top: int) -> None:
    """Check that `scores` is the model's own distribution for `token` after `tokens`."""
    raw = raw_logprobs(tokens)
    assert scores.token == pytest.approx(float(raw[token]), abs=1e-5)
    best = sorted(range(len(raw)), key=lambda i: (-float(raw[i]), i))[:top]
    assert scores.top_ids == tuple(best)
    assert scores.top == pytest.approx(raw[best].tolist(), abs=1e-5)


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_ask():
    kinds = [{}, {"logprobs": 0}, {"logprobs": 5, "temperature": 0.2, "logit_bias": {8: 50.0}}, {"logprobs": 97 // 5}]
    texts = [text(row, SamplingParams(seed=row, **kind)) for row, kind in enumerate(kinds)]
    result = hash_runner().run(prefill(0, texts))
    assert sorted(result.logprobs) == [1, 2, 3]
    assert result.tokens[2] == 8
    for i, top in ((1, 0), (2, 5), (3, 19)):
        assert_scores(result.logprobs[i], texts[i].prompt, result.tokens[i], top)


def test_logprobs_are_keyed_by_sampled_token_and_not_by_slice():
    silent, asking = text(0, GREEDY), text(1, SamplingParams(temperature=0, logprobs=1))
    joins = (silent.join(), asking.join())
    plan = step_plan(0, [silent.advance(2, False), asking.advance(len(asking.prompt), True)], joins=joins)
    result = hash_runner().run(plan)
    assert_scores(result.logprobs[0], asking.prompt, result.tokens[0], 1)


def test_equal_logprobs_are_returned_lowest_id_first():
    tied = torch.zeros(1, 60).index_fill(1, torch.tensor([50, 9, 31]), 1.0).log_softmax(-1)
    assert logprobs_module.most_likely(tied, 5).tolist() == [[9, 31, 50, 0, 1]]


@pytest.mark.parametrize("chunk", [1, 97 * 3, 2**24])
def test_prompt_logprobs_cover_the_prompt_once_however_it_is_cut(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs_module, "CHUNK", chunk)
    other = text(0, GREEDY)
    one = text(1, SamplingParams(temperature=0, prompt_logprobs=2), prompt=[4, 8, 15, 16, 23, 42, 7, 7, 1])
    runner, logprobs = hash_runner(), []
    for step, count in enumerate((1, 4, 3, 1)):
        slices = [one.advance(count, step == 3)]
        joins = (one.join(),) if step == 0 else ()
        if step == 1:  # the asking slice is not the first of its step
            joins, slices = (other.join(),), [other.advance(3, False), *slices]
        result = runner.run(step_plan(step, slices, joins=joins))
        logprobs += result.prompt_logprobs.get(len(slices) - 1, ())
    assert not result.prompt_logprobs  # the last prompt token has nothing of the prompt after it
    assert not runner.run(decode(9, [one])).prompt_logprobs
    assert len(logprobs) == 8
    for i, scores in enumerate(logprobs):
        assert_scores(scores, one.prompt[: i + 1], one.prompt[i + 1], 2)


def test_prompt_logprobs_of_a_resumed_sequence_stop_at_the_prompt():
    one = text(0, SamplingParams(temperature=0, prompt_logprobs=0), prompt=[1, 2, 3])
    join = one.join(generated=[4, 5])
    result = hash_runner().run(step_plan(0, [one.advance(5, True)], joins=(join,)))
    assert len(result.prompt_logprobs[0]) == 2
