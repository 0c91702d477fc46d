"""`return_routed_experts`: what is returned is what the router of the network chose, however a token was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headgate import LLM, SamplingParams
from headgate.engine.routed import RoutedTokens
from headgate.errors import RequestError, UnsupportedModel
from headgate.protocol.command import FileSource, Pause, Resume, UpdateWeights
from headgate.protocol.message import StepOutputs, Submit
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.models.families import write_model
from tests.models.reference import reference
from tests.updates.driver import PROMPTS, TOKENS, Driver

ASKED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, return_routed_experts=True)
FAMILIES = ("qwen3_moe", "mixtral")
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 256, 70)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


def open_llm(folder: Path, **options) -> LLM:
    options = {"device": "cpu", "block_size": 16, "max_running": 8} | options
    return LLM(folder, dtype="float32", max_context=256, routed_experts=True, **options)


@torch.inference_mode()
def expected(folder: Path, tokens: list[int]) -> np.ndarray:
    """The experts of all tokens but the last, by `transformers`: [tokens - 1, layers, top], sorted."""
    model = reference(folder, torch.float32)
    logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    top = model.config.num_experts_per_tok
    chosen = torch.stack([layer.view(len(tokens) - 1, -1).topk(top).indices for layer in logits], dim=1)
    return np.sort(chosen.numpy(), axis=-1)


def assert_right(folder: Path, answer) -> None:
    tokens = [*answer.prompt_token_ids, *answer.token_ids]
    got = answer.routed_experts
    assert got.shape[0] == len(tokens) - 1
    np.testing.assert_array_equal(np.sort(got, axis=-1), expected(folder, tokens))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_they_are_those_of_the_reference_for_prompt_and_answer(folder, backend):
    with open_llm(folder, backend=backend) as llm:
        prompts = [PROMPT, PROMPT[:1], PROMPT[5:38]]
        for answer in llm.generate(prompts, ASKED, progress=False):
            assert_right(folder, answer)


def test_a_prefix_hit_and_chunks_return_those_that_were_computed_before(folder):
    with open_llm(folder, max_batch_tokens=16) as llm:
        unasked = SamplingParams(temperature=0, max_tokens=2)
        llm.generate([PROMPT], unasked, progress=False)
        first, second = llm.generate([PROMPT, [*PROMPT[:48], 7, 8, 9]], ASKED, progress=False)
        assert first.cached_tokens == 64 and second.cached_tokens == 48
        assert_right(folder, first)
        assert_right(folder, second)


def test_a_preempted_sequence_returns_each_token_once(folder):
    with open_llm(folder, kv_blocks=16) as llm:
        prompts = [[i, *PROMPT[:40]] for i in range(6)]
        longer = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, return_routed_experts=True)
        answers = llm.generate(prompts, longer, progress=False)
        assert llm.engine.scheduler.counters.preemptions > 0
        for answer in answers:
            assert_right(folder, answer)


def test_a_start_leaves_out_the_tokens_before_it(folder):
    with open_llm(folder) as llm:
        (whole,) = llm.generate([PROMPT], ASKED, progress=False)
        for start in (0, 5, 69, 70, 80, 93, 94, 500):
            params = SamplingParams(
                temperature=0,
                max_tokens=24,
                ignore_eos=True,
                return_routed_experts=True,
                routed_experts_prompt_start=start,
            )
            (part,) = llm.generate([PROMPT], params, progress=False)
            assert part.token_ids == whole.token_ids
            np.testing.assert_array_equal(part.routed_experts, whole.routed_experts[start:])


def test_a_resumed_answer_has_those_of_the_tokens_generated_elsewhere(folder):
    with open_llm(folder) as llm:
        (whole,) = llm.generate([PROMPT], ASKED, progress=False)
    with open_llm(folder) as other:
        (resumed,) = other.generate([PROMPT], ASKED, generated=[whole.token_ids[:10]], progress=False)
        assert resumed.token_ids == whole.token_ids
        np.testing.assert_array_equal(resumed.routed_experts, whole.routed_experts)


def test_new_weights_never_return_experts_of_the_old(folder, tmp_path):
    other = write_model(tmp_path / "other", folder.name.rstrip("0123456789"), seed=5)
    with open_llm(folder) as llm:
        (old,) = llm.generate([PROMPT], ASKED, progress=False)
        for command in (Pause("freeze"), UpdateWeights(FileSource(str(other)), version=1), Resume()):
            llm.call(command)
        (new,) = llm.generate([PROMPT], ASKED, progress=False)
        assert new.cached_tokens == 0
        assert_right(folder, old)
        assert_right(other, new)
        assert not np.array_equal(old.routed_experts[:69], new.routed_experts[:69])


class Reports(Driver):
    """A driver whose requests ask for experts."""

    def __init__(self, model: Path, **options) -> None:
        self.routed: dict[int, RoutedTokens] = {}
        super().__init__(model, routed_experts=True, **options)

    def hear(self, client, message) -> None:
        super().hear(client, message)
        if isinstance(message, StepOutputs):
            shape = self.engine.info.routed
            for id, reports in message.outputs.routed.items():
                self.routed.setdefault(id, RoutedTokens(shape, 0)).add(reports)

    def ask(self, id: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, seed=id, ignore_eos=True, return_routed_experts=True)
        self.engine.loop.post(Submit([GenerateRequest(id, PROMPTS[id], params)]))

    def experts(self, id: int, tokens: int) -> np.ndarray:
        return np.sort(self.routed[id].of_answer(tokens).array(), axis=-1)


@pytest.mark.parametrize("recompute", [True, False])
def test_tokens_keep_the_experts_they_were_sampled_with_when_weights_change(folder, tmp_path, recompute):
    other = write_model(tmp_path / "other", folder.name.rstrip("0123456789"), seed=5)
    driver = Reports(folder)
    try:
        driver.ask(4)
        while len(driver.tokens.get(4, ())) < 5:
            driver.engine.loop.turn()
        driver.call(Pause("freeze"))
        known = len(PROMPTS[4]) + len(driver.tokens[4])
        before = driver.experts(4, known)
        driver.call(UpdateWeights(FileSource(str(other)), version=1, recompute=recompute))
        driver.call(Resume())
        tokens = [*PROMPTS[4], *driver.finish()[4]]
        after = driver.experts(4, len(tokens))
    finally:
        driver.engine.close()
    np.testing.assert_array_equal(after[: known - 1], before)
    np.testing.assert_array_equal(before, expected(folder, tokens)[: known - 1])
    if recompute:  # otherwise later tokens see KV of the old weights, which the reference cannot have
        np.testing.assert_array_equal(after[known - 1 :], expected(other, tokens)[known - 1 :])


def test_layers_without_experts_have_zeros(tmp_path):
    folder = write_model(tmp_path / "glm", "glm4_moe", first_k_dense_replace=1)
    with open_llm(folder) as llm:
        (answer,) = llm.generate([PROMPT], ASKED, progress=False)
    assert answer.routed_experts.shape == (93, 3, 3) and answer.routed_experts.dtype == np.uint8
    assert not answer.routed_experts[:, 0].any() and answer.routed_experts[:, 1:].any()


def test_more_than_256_experts_take_two_bytes_each(tmp_path):
    folder = write_model(tmp_path / "many", "qwen3_moe", num_experts=300)
    with open_llm(folder) as llm:
        (answer,) = llm.generate([PROMPT], ASKED, progress=False)
        assert answer.routed_experts.dtype == np.uint16 and answer.routed_experts.max() > 255
        assert_right(folder, answer)


def test_a_dense_model_cannot_keep_experts_and_other_engines_refuse_to_return_them(tmp_path, folder):
    dense = tiny_model(tmp_path / "dense")
    with pytest.raises(UnsupportedModel, match="the model has no experts; leave --routed-experts out"):
        open_llm(dense)
    refusal = pytest.raises(RequestError, match="start it with --routed-experts")
    with LLM(folder, device="cpu", max_context=256) as llm, refusal:
        llm.generate([PROMPT], ASKED, progress=False)
