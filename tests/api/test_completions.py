from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from headgate.contract.limits import MOST_CHOICES
from tests.api.live import LiveServer

PATH = "/v1/completions"


def asking(prompt: Any = "Once upon", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "seed": 3, "ignore_eos": True} | fields


def answer(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def streamed(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    events = server.events(PATH, body)
    assert events[-1] == "[DONE]"
    return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def test_text_and_its_token_ids_are_the_same_prompt(server: LiveServer):
    ids = server.post("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    as_text = answer(server, asking(return_token_ids=True))["choices"][0]
    as_ids = answer(server, asking(ids, return_token_ids=True))["choices"][0]
    assert as_text == as_ids
    assert as_ids["prompt_token_ids"] == ids and len(as_ids["completion_token_ids"]) == 24


@pytest.mark.parametrize("prompts", [["One", "Two words"], [[1, 2, 3], [4]], ["One", [4, 5]]])
def test_several_prompts_are_answered_in_their_order(server: LiveServer, prompts: list[Any]):
    whole = answer(server, asking(prompts, n=2))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = answer(server, asking(prompts[1], n=2, seed=5))
    assert [choice["text"] for choice in whole["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    assert whole["usage"]["completion_tokens"] == 4 * 24


@pytest.mark.parametrize(
    "fields",
    [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 3}, {"stop": ["q", "Z"]}],
)
def test_the_pieces_of_a_stream_add_up_to_the_complete_answer(server: LiveServer, fields: dict[str, Any]):
    body = asking("naïve 文", return_token_ids=True, max_tokens=60, **fields)
    for choice in answer(server, body)["choices"]:
        pieces = [piece for piece in streamed(server, body) if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert joined(piece["completion_token_ids"] for piece in pieces) == choice["completion_token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for column in choice["logprobs"] or ():
            assert joined(piece["logprobs"][column] for piece in pieces) == choice["logprobs"][column]


def test_echo_with_logprobs_scores_the_prompt(server: LiveServer):
    choice = answer(server, asking("abc", echo=True, logprobs=2, max_tokens=2))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("abc")
    assert logprobs["tokens"][:3] == ["a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(score <= 0 for score in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
    assert len(logprobs["tokens"]) == 5


def test_the_score_of_an_answer_is_the_same_when_it_is_a_prompt(server: LiveServer):
    said = answer(server, asking("abc", logprobs=0, max_tokens=6, return_token_ids=True))["choices"][0]
    prompt = said["prompt_token_ids"] + said["completion_token_ids"]
    scored = answer(server, asking(prompt, echo=True, logprobs=0, max_tokens=1))["choices"][0]
    assert scored["logprobs"]["token_logprobs"][3:9] == pytest.approx(said["logprobs"]["token_logprobs"], abs=1e-4)


def test_greedy_answers_take_the_likeliest_token(server: LiveServer):
    logprobs = answer(server, asking(temperature=0, logprobs=1))["choices"][0]["logprobs"]
    for score, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert score == max(top.values())


def test_a_bias_forbids_and_forces_tokens(server: LiveServer):
    forced = answer(server, asking(logit_bias={"70": 100}, max_tokens=5))["choices"][0]["text"]
    assert len(set(forced)) == 1
    forbidden = answer(server, asking(logit_bias={"70": -100}, max_tokens=50))["choices"][0]["text"]
    assert forced[0] not in forbidden


def test_a_stop_token_ends_the_answer_and_is_not_part_of_the_text(server: LiveServer):
    free = answer(server, asking(return_token_ids=True))["choices"][0]["completion_token_ids"]
    body = asking(stop_token_ids=[free[9]], return_token_ids=True)
    choice = answer(server, body)["choices"][0]
    assert choice["cause"] == "stop_token"
    assert choice["completion_token_ids"] == free[: free.index(free[9]) + 1]


@pytest.mark.parametrize("cut", [1, 11, 23])
def test_continuing_from_generated_ids_equals_an_uninterrupted_run(server: LiveServer, cut: int):
    body = asking(return_token_ids=True, repetition_penalty=1.3)
    whole = answer(server, body)
    ids, text = whole["choices"][0]["completion_token_ids"], whole["choices"][0]["text"]
    rest = streamed(server, body | {"generated_token_ids": ids[:cut], "delivered_chars": 1})
    assert "".join(piece["text"] for piece in rest) == text[1:]
    assert joined(piece["completion_token_ids"] for piece in rest) == ids[cut:]


def test_5_resumed_tokens_do_not_count_as_cached_prompt_tokens(server: LiveServer):
    body = asking(prompt=[5, 6, 7], return_token_ids=True, max_tokens=120)
    ids = answer(server, body)["choices"][0]["completion_token_ids"]
    usage = answer(server, body | {"generated_token_ids": ids[:100]})["usage"]
    assert usage["prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * (MOST_CHOICES + 1)}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"delivered_chars": 5, "generated_token_ids": [70]}, None),
    ],
)
def test_unsupported_values_are_refused_with_the_name_of_the_field(server: LiveServer, fields: Any, param: Any):
    response = server.post(PATH, asking(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
