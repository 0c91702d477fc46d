"""Vectors of prompts: those of `transformers`, however their prompts were scheduled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from headgate import LLM, SamplingParams
from headgate.errors import RequestError
from headgate.protocol.command import Pause, Resume, Sleep, Wake
from headgate.protocol.request import Pooling
from headgate.testing.tiny import tiny_model
from tests.models.families import write_model
from tests.models.reference import reference

FAMILIES = ("llama", "qwen3", "gemma2", "granite", "qwen3_moe", "gpt_oss")
PROMPTS = [np.random.default_rng(count).integers(0, 256, count).tolist() for count in (1, 7, 16, 33, 150)]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("embedding"))


def open_llm(folder: Path, **options: Any) -> LLM:
    options = {"device": "cpu", "block_size": 16, "max_running": 8, "max_context": 256} | options
    return LLM(folder, **options)


def embedded(llm: LLM, prompts: list[list[int]], pooling: Pooling) -> npt.NDArray[np.float32]:
    return llm.embed(prompts, pooling=pooling, normalize=False, progress=False)


@torch.inference_mode()
def expected(folder: Path, tokens: list[int], pooling: Pooling) -> npt.NDArray[np.float64]:
    states = reference(folder, torch.float32).model(torch.tensor([tokens])).last_hidden_state[0].double()
    return (states[-1] if pooling == "last" else states.mean(0)).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers_batched_and_in_chunks(family: str, tmp_path: Path):
    folder = write_model(tmp_path, family)
    with open_llm(folder, dtype="float32", max_batch_tokens=20) as llm:
        for pooling in POOLINGS:
            reference_vectors = [expected(folder, prompt, pooling) for prompt in PROMPTS]
            np.testing.assert_allclose(embedded(llm, PROMPTS, pooling), reference_vectors, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_60_a_vector_does_not_depend_on_its_neighbours_or_chunks(folder: Path, pooling: Pooling, dtype: str):
    options = {"backend": "cpu", "dtype": dtype}
    with open_llm(folder, **options) as llm, open_llm(folder, max_batch_tokens=7, **options) as chunked:
        alone = np.concatenate([embedded(llm, [prompt], pooling) for prompt in PROMPTS])
        np.testing.assert_array_equal(embedded(llm, PROMPTS, pooling), alone)
        np.testing.assert_array_equal(embedded(chunked, PROMPTS, pooling), alone)


def test_a_cached_prefix_changes_nothing_and_a_mean_computes_all_tokens(folder: Path):
    with open_llm(folder) as llm:
        counters = llm.engine.scheduler.counters
        first = {pooling: embedded(llm, PROMPTS[-1:], pooling) for pooling in POOLINGS}
        for pooling, cached in (("mean", 0), ("last", 144)):
            before = counters.cached_tokens
            np.testing.assert_array_equal(embedded(llm, PROMPTS[-1:], pooling), first[pooling])
            assert counters.cached_tokens - before == cached


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_lost_its_kv_halfway_has_the_same_vector(folder: Path, pooling: Pooling):
    """KV is lost when a paused engine sleeps."""
    with open_llm(folder, max_batch_tokens=20) as llm:
        whole = embedded(llm, PROMPTS[-1:], pooling)
        llm.engine.scheduler.pool.flush()
        answer = llm._answer(PROMPTS[-1], SamplingParams(max_tokens=0), (), pooling=pooling)
        turns = llm._run([answer])
        while llm.engine.scheduler.counters.prompt_tokens < 300:  # admitted
            next(turns)
        llm.call(Pause("keep"))
        llm.call(Sleep(("kv_cache",)))
        llm.call(Wake(("kv_cache",)))
        llm.call(Resume())
        list(turns)
        assert llm.engine.scheduler.counters.preemptions == 1
        assert np.frombuffer(answer.vector, np.float32).tolist() == whole[0].tolist()


def test_vectors_are_normalised_after_they_are_cut(folder: Path):
    with open_llm(folder) as llm:
        vectors, raw = (llm.embed("Some text", normalize=on, progress=False)[0] for on in (True, False))
        assert np.linalg.norm(vectors) == pytest.approx(1) and np.linalg.norm(raw) > 2
        cut = llm.embed("Some text", dimensions=8, progress=False)[0]
        np.testing.assert_allclose(cut, raw[:8] / np.linalg.norm(raw[:8]), rtol=1e-6)
        assert llm.embed([]).shape == (0, 64)
        with pytest.raises(RequestError, match="dimensions must be between 1 and 64"):
            llm.embed("Some text", dimensions=65)


def test_a_checkpoint_whose_names_lack_the_prefix_of_a_generating_model_is_read(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    with open_llm(folder) as llm, open_llm(tmp_path) as bare:
        np.testing.assert_array_equal(bare.embed("text", progress=False), llm.embed("text", progress=False))


def test_answers_are_generated_beside_vectors(folder: Path):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with open_llm(folder, max_batch_tokens=16) as llm:
        alone = llm.generate([PROMPTS[3]], greedy, progress=False)[0].token_ids
        vector = embedded(llm, PROMPTS[-1:], "mean")
        llm.engine.scheduler.pool.flush()
        answer = llm._answer(PROMPTS[3], greedy, ())
        pooled = llm._answer(PROMPTS[-1], SamplingParams(max_tokens=0), (), pooling="mean")
        list(llm._run([answer, pooled]))
        assert answer.completion.token_ids == alone
        np.testing.assert_array_equal(np.frombuffer(pooled.vector, np.float32), vector[0])
