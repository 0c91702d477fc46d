"""The same request, seed and weights give the same tokens, however they are scheduled (invariant 10, guarantee 60)."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from headgate import LLM, SamplingParams
from headgate.layers.choice import available_backends
from headgate.testing.tiny import tiny_model
from tests.models.reference import reference_greedy
from tests.resume import resume

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
BACKENDS = available_backends()

# Engine options under which requests are chunked, preempted or find their prompts in the cache.
ROOMY = {"max_running": 32}
CHUNKED = {"max_running": 32, "max_batch_tokens": 7}
CROWDED = {"max_running": 32, "kv_blocks": 7, "block_size": 16, "max_context": 112, "max_batch_tokens": 33}
AHEAD = {"max_running": 32, "run_ahead": 3}
ENGINES = {"roomy": ROOMY, "chunked": CHUNKED, "crowded": CROWDED, "run-ahead": AHEAD}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts, some of which share long prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(40)]
    return [shared[: rng.choice([0, 17, 40])] + rng.choices(range(250), k=rng.randrange(1, 30)) for _ in range(count)]


def answers(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(asked, params, progress=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("folder", ARCHITECTURES, indirect=True)
def test_greedy_tokens_are_those_of_transformers_however_scheduled(folder, backend):
    asked = prompts(12)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = [reference_greedy(folder, prompt, 24) for prompt in asked]
    for name, squeeze in ENGINES.items():
        with LLM(folder, dtype="float32", backend=backend, **squeeze) as llm:
            assert answers(llm, asked, [greedy] * 12) == expected, name
            assert answers(llm, asked, [greedy] * 12) == expected, f"{name}, prompts cached"
            llm.engine.scheduler.check()
            counters = llm.engine.scheduler.counters
            assert counters.cached_tokens > 0 and (name != "crowded" or counters.preemptions > 0)


EXACT = [("float32", "auto", False), ("float32", "torch", True), ("bfloat16", "torch", True)]
EXACT += [("bfloat16", "cpu", True)] if "cpu" in BACKENDS else []


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
@pytest.mark.parametrize(("dtype", "backend", "deterministic"), EXACT)
def test_seeded_tokens_are_the_same_alone_in_a_batch_preempted_cached_and_resumed(
    folder, dtype, backend, deterministic
):
    asked = prompts(32, seed=1)
    count = 24
    params = [varied(i, max_tokens=count) for i in range(32)]
    options = {"dtype": dtype, "backend": backend, "deterministic": deterministic}
    with LLM(folder, **options, **ROOMY) as llm:
        alone = [answers(llm, [prompt], [each])[0] for prompt, each in zip(asked, params, strict=True)]
        llm.engine.scheduler.pool.flush()
        assert answers(llm, asked, params) == alone, "in a batch of 32"
        assert answers(llm, asked, params) == alone, "with prefix hits"
        for split in range(1, count):
            resumed = resume(llm, asked[split % 32], params[split % 32], alone[split % 32][:split])
            assert resumed == alone[split % 32][split:], f"resumed after {split} tokens"
    with LLM(folder, **options, **CROWDED) as llm:
        assert answers(llm, asked, params) == alone, "preempted and recomputed in chunks"
        assert llm.engine.scheduler.counters.preemptions > 0


def varied(i: int, max_tokens: int) -> SamplingParams:
    """Parameters that cover every kind of sampling."""
    kinds = [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
    ]
    kinds += [{"frequency_penalty": 0.7, "top_p": 0.9}, {"logit_bias": {7: 5.0}, "temperature": 2.0}]
    return SamplingParams(seed=1000 + i, max_tokens=max_tokens, ignore_eos=True, **kinds[i % len(kinds)])


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_an_unseeded_request_gives_different_tokens_every_time(folder):
    with LLM(folder, **ROOMY) as llm:
        free = SamplingParams(max_tokens=16, ignore_eos=True)
        first, second = answers(llm, [[1, 2, 3]] * 2, [free] * 2)
        assert first != second
        seeded = msgspec.structs.replace(free, seed=5)
        first, second = answers(llm, [[1, 2, 3]] * 2, [seeded] * 2)
        assert first == second
