"""The engine gives the same answers on a GPU as on a CPU: whole models in float32, however requests are scheduled."""

from __future__ import annotations

import random

import pytest
import torch

from headgate.contract.sampling import SamplingParams
from headgate.offline import LLM
from headgate.testing.tiny import tiny_model
from tests.models.families import write_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MODELS = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 320, "head_dim": 80},
    "mistral": {"sliding_window": 20},
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    "qwen3": {"head_dim": 64, "tie_word_embeddings": False},
    "qwen3_moe": {"head_dim": 64},
    "qwen2_moe": {"hidden_size": 256},
    "mixtral": {"hidden_size": 256},
    "ernie4_5": {"head_dim": 64},
    "smollm3": {"hidden_size": 256},
    "olmo2": {"hidden_size": 256},
    "granite": {"hidden_size": 256},
    "glm4": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {"hidden_size": 256},
    "ernie4_5_moe": {"hidden_size": 256},
    "glm4_moe": {"head_dim": 64},
    "gpt_oss": {"head_dim": 64},
}
ADJUSTED = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {7: 4.0, 9: -50.0}},
    {"min_tokens": 10},
    {},
]


def prompts(*lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def answers(folder, asked, params, **options):
    with LLM(folder, **({"dtype": "float32", "kv_blocks": 200} | options)) as llm:
        return [answer.token_ids for answer in llm.generate(asked, params, progress=False)]


def on_cpu(folder, asked, params, **options):
    return answers(folder, asked, params, device="cpu", backend="torch", **options)


def on_gpu(folder, asked, params, **options):
    return answers(folder, asked, params, device="cuda", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("architecture", MODELS)
def test_greedy_answers_in_float32_are_those_of_the_cpu(tmp_path, architecture):
    folder = write_model(tmp_path, architecture, **MODELS[architecture])
    asked = prompts(1, 5, 16, 31, 64, 100, 200)
    assert on_gpu(folder, asked, GREEDY) == on_cpu(folder, asked, GREEDY)


@pytest.mark.parametrize(
    "options",
    [{"graphs": False}, {"prompt_graphs": True}, {"max_batch_tokens": 48}, {"run_ahead": 1}, {"block_size": 16}],
)
def test_step_options_do_not_change_answers(folder, options):
    asked = prompts(*range(1, 60, 2))
    assert on_gpu(folder, asked, GREEDY, **options) == on_gpu(folder, asked, GREEDY)


def test_seeded_and_adjusted_answers_are_those_of_the_cpu(folder):
    asked = prompts(*range(3, 3 + len(ADJUSTED)))
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=i, **each) for i, each in enumerate(ADJUSTED)]
    expected = on_cpu(folder, asked, params)
    assert on_gpu(folder, asked, params) == expected
    assert on_gpu(folder, asked, params, graphs=False) == expected


def test_a_simple_sampler_in_a_mixed_batch_gives_the_same_tokens_as_alone(folder):
    asked = prompts(20, 30)
    plain = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    choosy = SamplingParams(max_tokens=24, temperature=1.0, seed=4, top_k=3)
    assert on_gpu(folder, asked, [plain, choosy])[0] == on_gpu(folder, asked[:1], plain)[0]


def test_preempted_requests_give_the_same_tokens(folder):
    asked, params = prompts(*[40] * 8), SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    expected = on_gpu(folder, asked, params)
    with LLM(folder, device="cuda", dtype="float32", kv_blocks=16, block_size=16) as llm:
        found = [answer.token_ids for answer in llm.generate(asked, params, progress=False)]
        assert llm.engine.scheduler.counters.preemptions > 0
    assert found == expected


def test_closing_a_stream_frees_its_blocks_and_affects_no_other(folder):
    (left, stays), params = prompts(40, 50), SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with LLM(folder, device="cuda", dtype="float32", kv_blocks=64) as llm:
        expected = llm.generate([stays], params, progress=False)[0].token_ids
        stream = llm.stream(left, params)
        next(stream)
        stream.close()
        assert llm.engine.scheduler.pool.held == 0
        assert llm.generate([stays], params, progress=False)[0].token_ids == expected
        llm.engine.scheduler.check()


def test_a_prefix_hit_gives_the_same_answer(folder):
    asked = prompts(100)
    with LLM(folder, device="cuda", dtype="float32", kv_blocks=64) as llm:
        first, again = (llm.generate(asked, GREEDY, progress=False)[0] for _ in range(2))
    assert again.cached_tokens > 0
    assert again.token_ids == first.token_ids


def test_log_probabilities_in_bfloat16_are_close_to_those_in_float32(folder):
    asked, params = prompts(60), SamplingParams(max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=0)
    with LLM(folder, device="cpu", dtype="float32", backend="torch", kv_blocks=64) as llm:
        expected = llm.generate(asked, params, progress=False)[0]
    with LLM(folder, device="cuda", dtype="bfloat16", kv_blocks=64) as llm:
        found = llm.generate(asked, params, progress=False)[0]
    one, other = (torch.tensor([each.token for each in a.prompt_logprobs[1:]]) for a in (expected, found))
    assert (one - other).abs().mean() < 0.1
    assert abs(expected.logprobs[0].token - found.logprobs[0].token) < 0.2


@pytest.mark.parametrize("options", [{}, {"prompt_graphs": True}, {"graphs": False}])
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("logprobs", [0, 3])
def test_log_probabilities_in_every_mode_are_those_of_the_cpu(folder, options, adjusted, logprobs):
    """Batches without adjusted rows are drawn and scored by the graph alone."""
    cases = [
        {"temperature": temperature, "logprobs_mode": mode, **each}
        for temperature in (0.0, 0.6, 1.0)
        for mode in ("raw", "scaled", "processed")
        for each in (ADJUSTED if adjusted else [{}])
    ]
    asked = prompts(*[20 + i for i in range(len(cases))])
    params = [SamplingParams(max_tokens=12, seed=i, logprobs=logprobs, **each) for i, each in enumerate(cases)]
    params += [SamplingParams(max_tokens=12, seed=9)]  # one row without log-probabilities
    asked += prompts(9)
    found = []
    for each in ({"device": "cpu", "backend": "torch"}, {"device": "cuda"} | options):
        with LLM(folder, dtype="float32", kv_blocks=400, **each) as llm:
            found.append(llm.generate(asked, params, progress=False))
    assert found[0][-1].logprobs is None and found[1][-1].logprobs is None
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        for expected, score in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert score.token == pytest.approx(expected.token, abs=1e-4)
            assert score.top_ids == expected.top_ids
            assert list(score.top) == pytest.approx(list(expected.top), abs=1e-4)


def test_prompts_are_scored_as_on_the_cpu_without_an_answer_and_after_a_prefix_hit(folder):
    asked, found = prompts(1, 2, 40, 100), []
    for device in ("cpu", "cuda"):
        with LLM(folder, device=device, dtype="float32", kv_blocks=64) as llm:
            llm.generate(asked, GREEDY, progress=False)  # caches the prompts
            for start in (0, 50):
                params = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_start=start)
                found.append([answer.prompt_logprobs for answer in llm.generate(asked, params, progress=False)])
    for expected, scores in zip(found[:2], found[2:], strict=True):
        for one, other in zip(expected, scores, strict=True):
            values = [[each and each.token for each in answer] for answer in (one, other)]
            assert [None if value is None else pytest.approx(value, abs=1e-4) for value in values[0]] == values[1]


@pytest.mark.parametrize("fp8", ["weights", "kv", "both"])
def test_log_probabilities_in_fp8_stay_close(wide_folder, fp8):
    asked = prompts(60, 5, 300, *[20] * 70)
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=0, ignore_eos=True)
    logprobs = []
    for options in ({}, {"fp8": fp8}, {"fp8": fp8, "graphs": False}):
        with LLM(wide_folder, device="cuda", dtype="bfloat16", kv_blocks=1000, **options) as llm:
            answers = llm.generate(asked, params, progress=False)
            logprobs.append(torch.tensor([answer.logprobs[0].token for answer in answers]))
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.3
    assert (logprobs[1] - logprobs[2]).abs().mean() < 0.1
    assert not torch.equal(logprobs[0], logprobs[1]), "nothing was rounded"


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model large enough that the order of summation matters in bfloat16."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    return tiny_model(tmp_path_factory.mktemp("wide"), "qwen3", dtype="bfloat16", **shape)


def test_deterministic_answers_do_not_depend_on_the_batch_chunks_or_preemption(wide_folder):
    asked = prompts(*range(5, 133, 2))
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    options = {"dtype": "bfloat16", "deterministic": True, "block_size": 16}
    with LLM(wide_folder, device="cuda", kv_blocks=1000, **options) as llm:
        assert llm.engine.info.backend == "triton, deterministic"
        alone = [llm.generate([each], params, progress=False)[0].token_ids for each in asked]
    others = prompts(*range(1, 257), seed=1)
    among = on_gpu(wide_folder, [*others[:99], *asked, *others[99:]], params, **options | {"kv_blocks": 4000})
    assert among[99 : 99 + len(asked)] == alone
    assert on_gpu(wide_folder, asked, params, **options | {"kv_blocks": 1000, "max_batch_tokens": 100}) == alone
    assert on_gpu(wide_folder, asked, params, **options | {"kv_blocks": 100}) == alone
