"""AReaL, with an SGLang server: token ids in, token ids out, resubmitted after an interruption."""

from __future__ import annotations

from tests.frameworks.conftest import Target

PARAMS = {
    "max_new_tokens": 8,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 1,
    "ignore_eos": True,
    "frequency_penalty": 0.0,
}


def test_an_interrupted_rollout_continues_from_its_tokens(target: Target):
    body = {"input_ids": [1, 2, 3], "sampling_params": PARAMS, "return_logprob": True, "stream": False}
    whole = target.post("/generate", body).json()["output_ids"]
    first = target.post("/generate", body | {"sampling_params": PARAMS | {"max_new_tokens": 3}}).json()["output_ids"]
    rest = {"max_new_tokens": 8 - len(first)}
    more = target.post("/generate", body | {"input_ids": [1, 2, 3, *first], "sampling_params": PARAMS | rest}).json()
    assert first + more["output_ids"] == whole
