"""Log-probabilities of prompts, as teachers and reference models are asked for them (guarantees 76 and 77)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer
from tests.frameworks.conftest import Target
from tests.models.reference import reference_logits

PROMPT = [
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    5,
    3,
    5,
    8,
    9,
    7,
    9,
    3,
    2,
    3,
    8,
    4,
    6,
    2,
    6,
    4,
    3,
    3,
    8,
    3,
    2,
    7,
    9,
    5,
    0,
    2,
    8,
    8,
] * 2
TOLERANCE = 1e-4
MESSAGES = [{"role": "user", "content": "Gates hold the water."}]

# slime's on-policy distillation: what the teacher is sent for each sample.
SLIME_TEACHER = {
    "input_ids": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
    "return_logprob": True,
    "logprob_start_len": 0,
}

# prime-rl scores with one token, which it drops.
PRIME_RL = {
    "model": None,
    "token_ids": PROMPT,
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1},
    "cache_salt": "7",
}


def reference(folder: Path, ids: list[int]) -> Any:
    """The log-probabilities [T, V] of transformers: row t is of the token after position t."""
    return reference_logits(folder, ids).float().log_softmax(-1)


def own(folder: Path, ids: list[int], first: int = 1) -> list[float]:
    """Of each token itself, from position `first` on."""
    logprobs = reference(folder, ids)
    return [float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids))]


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=TOLERANCE)


# -- SGLang -----------------------------------------------------------------------------------------------------------


def test_slimes_teacher_scores_a_sample_and_generates_nothing(target: Target, old: Path):
    # The first call caches the prompt: the second must not lose what is found there.
    target.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})
    for _ in range(2):
        answer = target.post("/generate", SLIME_TEACHER).json()
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["output_token_logprobs"] == [] and "input_top_logprobs" not in meta
        values, ids, texts = zip(*meta["input_token_logprobs"], strict=True)
        assert list(ids) == PROMPT and set(texts) == {None} and values[0] is None
        assert list(values[1:]) == close(own(old, PROMPT))


def test_the_likeliest_tokens_of_a_prompt_and_their_texts(target: Target, old: Path):
    more = {"top_logprobs_num": 3, "return_text_in_logprobs": True, "logprob_start_len": 40}
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    meta = target.post("/generate", SLIME_TEACHER | more | {"sampling_params": params}).json()["meta_info"]
    listed, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert [id for _, id, _ in listed] == PROMPT[40:] and len(tops) == len(listed)
    assert listed[0][0] is None and tops[0] is None
    assert [value for value, _, _ in listed[1:]] == close(own(old, PROMPT, 41))
    logprobs = reference(old, PROMPT)
    for at, top in enumerate(tops[1:], 41):
        assert [value for value, _, _ in top] == close(logprobs[at - 1].topk(3).values.tolist())
        assert all(isinstance(text, str) for _, _, text in top)
    assert len(meta["output_top_logprobs"]) == len(meta["output_token_logprobs"]) == 2
    assert all(len(top) == 3 for top in meta["output_top_logprobs"])


def test_tokens_before_the_first_scored_one_come_from_the_cache(target: Target):
    ids = [*PROMPT, *PROMPT[::-1]]
    target.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
    whole, rest = (
        target.post("/generate", SLIME_TEACHER | {"input_ids": ids, "logprob_start_len": start}).json()["meta_info"]
        for start in (0, 100)
    )
    assert whole["cached_tokens"] == 0 < rest["cached_tokens"]
    values = [value for value, _, _ in whole["input_token_logprobs"]][101:]
    assert [value for value, _, _ in rest["input_token_logprobs"]][1:] == close(values)


@pytest.mark.parametrize("start", [None, -1, len(PROMPT)])
def test_by_default_no_token_of_the_prompt_is_listed(target: Target, start: int | None):
    body = SLIME_TEACHER | {"logprob_start_len": start, "top_logprobs_num": 2}
    meta = target.post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []


def test_a_start_after_the_prompt_is_refused(target: Target):
    refused = target.post("/generate", SLIME_TEACHER | {"logprob_start_len": len(PROMPT) + 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_start_len"


def test_several_prompts_are_scored_in_one_call(target: Target, old: Path):
    prompts = [PROMPT, PROMPT[:1], PROMPT[5:20]]
    answers = target.post("/generate", SLIME_TEACHER | {"input_ids": prompts}).json()
    for prompt, answer in zip(prompts, answers, strict=True):
        listed = answer["meta_info"]["input_token_logprobs"]
        assert [value for value, _, _ in listed[1:]] == close(own(old, prompt))


def test_a_stream_repeats_the_scores_of_the_prompt(target: Target, old: Path):
    body = SLIME_TEACHER | {"sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
    *events, done = target.events("/generate", body)
    assert done == "[DONE]"
    for event in events:
        listed = json.loads(event)["meta_info"]["input_token_logprobs"]
        assert [value for value, _, _ in listed[1:]] == close(own(old, PROMPT))


# -- vLLM -------------------------------------------------------------------------------------------------------------


def check_entries(found: list[Any], folder: Path, ids: list[int], count: int) -> None:
    """vLLM's shape: null, then one object per token, whose first entry is the token itself."""
    logprobs = reference(folder, ids)
    assert found[0] is None and len(found) == len(ids)
    for at, entry in enumerate(found[1:], 1):
        row = logprobs[at - 1]
        rank = int((row > row[ids[at]]).sum()) + 1
        first, *_ = entry.items()
        assert (first[0], first[1]["rank"]) == (str(ids[at]), rank)
        assert first[1]["logprob"] == close(float(row[ids[at]]))
        assert len(entry) == count + (rank > count)
        by_rank = sorted((each["rank"], each["logprob"]) for each in entry.values())
        assert [value for _, value in by_rank[:count]] == close(row.topk(count).values.tolist())
        assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in entry.values())


def test_prime_rl_reads_the_score_of_each_token_first(target: Target, old: Path):
    answer = target.post("/inference/v1/generate", PRIME_RL).json()
    check_entries(answer["prompt_logprobs"], old, PROMPT, 1)
    assert len(answer["choices"][0]["token_ids"]) == 1
    scored = target.post(
        "/inference/v1/generate", PRIME_RL | {"sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
    )
    check_entries(scored.json()["prompt_logprobs"], old, PROMPT, 0)
    assert scored.json()["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("count", [0, 1, 20])
def test_completions_have_them_in_every_choice(target: Target, old: Path, count: int):
    prompts = [PROMPT, PROMPT[:7]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 1, "prompt_logprobs": count, "logprobs": 0}
    choices = target.post("/v1/completions", body).json()["choices"]
    for choice, prompt in zip(choices, [prompts[0], prompts[0], prompts[1], prompts[1]], strict=True):
        check_entries(choice["prompt_logprobs"], old, prompt, count)
        assert len(choice["logprobs"]["token_logprobs"]) == 1


def test_chat_has_them_at_the_top(target: Target, old: Path):
    body = {"messages": MESSAGES, "max_tokens": 0, "prompt_logprobs": 2, "return_token_ids": True}
    answer = target.post("/v1/chat/completions", body).json()
    check_entries(answer["prompt_logprobs"], old, answer["prompt_token_ids"], 2)
    assert answer["choices"][0]["message"]["content"] == "" and "prompt_logprobs" not in answer["choices"][0]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_null_and_streams_without_them_answer_as_before(target: Target, path: str, body: dict[str, Any]):
    assert "prompt_logprobs" not in json.dumps(target.post(path, body | {"prompt_logprobs": None}).json())
    for asked in (None, 0):
        assert "prompt_logprobs" not in "".join(target.events(path, body | {"prompt_logprobs": asked}))


@pytest.mark.parametrize(("path", "body"), [*CALLS, ("/inference/v1/generate", PRIME_RL)])
def test_a_stream_with_them_is_refused(target: Target, path: str, body: dict[str, Any]):
    refused = target.post(path, body | {"stream": True} | ({} if "token_ids" in body else {"prompt_logprobs": 1}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("count", [-1, 21, True, "1", 1.5])
def test_a_number_outside_0_to_20_is_refused(target: Target, count: Any):
    for path, body in CALLS:
        refused = target.post(path, body | {"prompt_logprobs": count})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


# -- lm-eval ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [0, 1])
def test_lm_eval_scores_a_continuation_with_echo(target: Target, old: Path, generated: int):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": generated, "temperature": 0, "seed": 1234}
    (choice,) = target.post("/v1/completions", body).json()["choices"]
    scores = choice["logprobs"]
    assert len(scores["token_logprobs"]) == len(scores["tokens"]) == len(PROMPT) + generated
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1 : len(PROMPT)] == close(own(old, PROMPT))
    assert choice["finish_reason"] == "length" and "prompt_logprobs" not in choice


# -- lifecycle --------------------------------------------------------------------------------------------------------


async def while_paused(server: LiveServer, order: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Score during a pause; give `order` once the request waits, then continue."""
    async with httpx.AsyncClient(base_url=server.url, timeout=100, trust_env=False) as http:
        await http.post("/pause_generation", json={"mode": "in_place"})
        scoring = asyncio.create_task(http.post("/generate", json=SLIME_TEACHER | {"rid": "scored"}))
        while not (await http.get("/v1/requests")).json()["data"]:
            await asyncio.sleep(0.01)
        await http.post(order[0], json=order[1])
        await http.post("/continue_generation", json={})
        return (await scoring).json()


def test_scoring_waits_during_a_pause(server: LiveServer, old: Path):
    answer = asyncio.run(while_paused(server, ("/flush_cache", {})))
    listed = answer["meta_info"]["input_token_logprobs"]
    assert [value for value, _, _ in listed[1:]] == close(own(old, PROMPT))


def test_aborted_scoring_ends_with_what_it_has(server: LiveServer):
    meta = asyncio.run(while_paused(server, ("/abort_request", {"rid": "scored"})))["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] == 0
    assert meta["input_token_logprobs"] == [[None, PROMPT[0], None]]
