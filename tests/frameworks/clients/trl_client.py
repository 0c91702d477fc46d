"""Checks of TRL's `VLLMClient`, with which synchronous trainers generate and score: `trl.py`, `trl_serve.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tests.frameworks.clients.checks import ask, given, run_checks

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
TALK = [[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "Tell me a joke."}]]


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def a_batch_of_ids_has_all_its_answers(client: Any, url: str) -> None:
    answers = client.generate(PROMPTS, n=2, max_tokens=5, generation_kwargs={"ignore_eos": True, "seed": 1})
    assert answers["prompt_ids"] == PROMPTS
    assert [len(ids) for ids in answers["completion_ids"]] == [5] * 4
    assert answers["logprob_token_ids"] == [[[id] for id in ids] for ids in answers["completion_ids"]]
    assert all(value <= 0 for rows in answers["logprobs"] for row in rows for value in row)


def greedy_answers_equal_those_of_a_direct_call(client: Any, url: str) -> None:
    answers = client.generate(PROMPTS, temperature=0.0, max_tokens=8, generation_kwargs={"ignore_eos": True})
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    (direct,) = ask(f"{url}/v1/completions", body)["choices"]
    assert answers["completion_ids"][0] == direct["token_ids"]


def a_batch_of_texts_is_answered_with_its_ids(client: Any, url: str) -> None:
    answers = client.generate(["Hello", "Hi"], max_tokens=3, logprobs=4, temperature=0.7, top_p=0.9, top_k=50)
    assert answers["prompt_ids"][0] == ask(f"{url}/tokenize", {"prompt": "Hello"})["tokens"]
    for rows, values in zip(answers["logprob_token_ids"], answers["logprobs"], strict=True):
        assert [len(row) for row in rows] == [len(row) for row in values] and len(rows[0]) in (4, 5)


def logprobs_can_be_left_out(client: Any, url: str) -> None:
    answers = client.generate(PROMPTS, logprobs=None)
    assert answers["logprobs"] is None and len(answers["completion_ids"]) == 2


def a_pattern_constrains_generate_and_chat(client: Any, url: str) -> None:
    options = {"structured_outputs_regex": "(ab){1,2}", "max_tokens": 20}
    for answers in (client.generate(PROMPTS, **options), client.chat(TALK, **options)):
        for ids in answers["completion_ids"]:
            shown = ask(f"{url}/detokenize", {"tokens": ids, "skip_special_tokens": True})["prompt"]
            assert shown in ("ab", "abab"), shown


def conversations_are_rendered_by_the_server(client: Any, url: str) -> None:
    answers = client.chat(TALK, n=2, max_tokens=4, tools=[double], generation_kwargs={"ignore_eos": True})
    assert [len(ids) for ids in answers["completion_ids"]] == [4] * 4
    assert len(answers["prompt_ids"]) == 2 and len(answers["logprobs"]) == 4


def sequences_are_scored_from_the_end_of_their_prompts(client: Any, url: str) -> None:
    sequences = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    scores = client.get_sequence_logprobs(sequences, [4, 1], top_logprobs=3)
    assert [[len(row) for row in rows] for rows in scores["logprobs"]] == [[3, 3], [3, 3]]
    assert scores["actual_token_ids"] == [[[5], [6]], [[8], [9]]]
    body = {"prompt": sequences[0], "max_tokens": 1, "echo": True, "logprobs": 3}
    expected = ask(f"{url}/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][4:6]
    actual = [row[0] for row in scores["actual_logprobs"][0]]
    assert all(abs(a - b) < 1e-4 for a, b in zip(actual, expected, strict=True)), (actual, expected)


def scores_of_an_answer_equal_its_log_probabilities(client: Any, url: str) -> None:
    answers = client.generate(PROMPTS[:1], temperature=0.0, max_tokens=8, generation_kwargs={"ignore_eos": True})
    sequence = PROMPTS[0] + answers["completion_ids"][0]
    scores = client.get_sequence_logprobs([sequence], [len(PROMPTS[0])], top_logprobs=5)
    pairs = zip(scores["actual_logprobs"][0], answers["logprobs"][0], strict=True)
    assert all(abs(score - logprob) < 1e-3 for (score,), (logprob,) in pairs)
    assert [top[0] for top in scores["logprob_token_ids"][0]] == answers["completion_ids"][0]


def the_prefix_cache_can_be_reset(client: Any, url: str) -> None:
    body = {"prompt": [9] * 200, "max_tokens": 1}
    ask(f"{url}/v1/completions", body)
    client.reset_prefix_cache()
    assert ask(f"{url}/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


CHECKS = (
    a_batch_of_ids_has_all_its_answers,
    greedy_answers_equal_those_of_a_direct_call,
    a_batch_of_texts_is_answered_with_its_ids,
    logprobs_can_be_left_out,
    a_pattern_constrains_generate_and_chat,
    conversations_are_rendered_by_the_server,
    sequences_are_scored_from_the_end_of_their_prompts,
    scores_of_an_answer_equal_its_log_probabilities,
    the_prefix_cache_can_be_reset,
)


def run_client(checks: Sequence[Callable[[Any, str], None]]) -> int:
    """Run `checks` with a client of the first server."""
    warnings.simplefilter("ignore")  # TRL warns about versions of vLLM, of which only a client's helpers are used
    url = given().url
    from trl.generation.vllm_client import VLLMClient  # warns when it is imported

    return run_checks("trl", checks, VLLMClient(base_url=url), url)
