"""Ranks on GPUs, with NCCL. Never run so far, because it needs two GPUs."""

from __future__ import annotations

import pytest
import torch

from headgate import LLM, SamplingParams
from headgate.testing.tiny import tiny_model
from tests.test_equality import CROWDED, answers, prompts, varied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed, and there are fewer"),
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_gpus_answer_in_float32_as_one_does(tmp_path, deterministic):
    folder = tiny_model(tmp_path, "qwen3", head_dim=64)
    params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)] * 4
    params += [varied(i, max_tokens=16) for i in range(8)]
    asked = prompts(len(params), seed=2)
    by_size = []
    for ranks in (1, 2):
        options = {"dtype": "float32", "deterministic": deterministic, "device": "cuda", "tensor_parallel": ranks}
        with LLM(folder, **options, **CROWDED) as llm:
            by_size.append(answers(llm, asked, params))
    assert by_size[0] == by_size[1]
