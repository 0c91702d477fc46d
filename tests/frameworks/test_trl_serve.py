"""TRL's synchronous trainers up to TRL 1.10, which call the server of `trl vllm-serve`: the client's own payloads."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import exp, inf
from typing import Any

import pytest

from tests.api import clients
from tests.api.live import LiveServer
from tests.api.test_abort import idle
from tests.frameworks.conftest import Target

GENERATE = {
    "prompts": [[1, 2, 3], [4, 5, 6, 7]],
    "images": None,
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 5,
    "logprobs": 0,
    "structured_outputs_regex": None,
    "generation_kwargs": {"ignore_eos": True, "seed": 3},
}
USER = [{"role": "user", "content": "Hello!"}]
CHAT = {name: value for name, value in GENERATE.items() if name not in ("prompts", "images")} | {
    "messages": [USER, [{"role": "system", "content": "Be brief."}, *USER]],
    "chat_template_kwargs": {},
    "tools": None,
}
SEQUENCES = {
    "sequences": [[1, 2, 3, 4, 5, 6], [7, 8, 9]],
    "prompt_lengths": [4, 1],
    "top_logprobs": 3,
    "temperature": 1.0,
}


def completed(target: Target, prompt: Any, **more: Any) -> dict[str, Any]:
    """Return the same answers from the completions API."""
    body = {"prompt": prompt, "max_tokens": 5, "return_token_ids": True, "ignore_eos": True, "n": 2, "seed": 3}
    answer = target.post("/v1/completions", body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(choices: list[dict[str, Any]]) -> list[list[int]]:
    return [choice["token_ids"] for choice in choices]


def refused(target: Target, path: str, body: dict[str, Any]) -> tuple[str, str]:
    answer = target.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_a_batch_has_the_answers_of_each_prompt_in_order(target: Target):
    answer = target.post("/generate/", GENERATE).json()
    assert answer["prompt_ids"] == GENERATE["prompts"]
    assert answer["completion_ids"] == ids_of(completed(target, GENERATE["prompts"])["choices"])
    assert answer["logprob_token_ids"] == [[[id] for id in ids] for ids in answer["completion_ids"]]
    assert answer["finish_reasons"] == ["length"] * 4


def test_prompts_may_be_texts(target: Target):
    answer = target.post("/generate/", GENERATE | {"prompts": ["Hello", "Tell me a joke"]}).json()
    tokens = [target.post("/tokenize", {"prompt": text}).json()["tokens"] for text in ("Hello", "Tell me a joke")]
    assert answer["prompt_ids"] == tokens
    assert len(answer["completion_ids"]) == 4


def test_the_client_gets_sixteen_tokens_and_their_logprobs_unless_it_asks_otherwise(target: Target):
    answer = target.post("/generate/", {"prompts": [[1, 2, 3]], "generation_kwargs": {"ignore_eos": True}}).json()
    assert [len(ids) for ids in answer["completion_ids"]] == [16]
    assert [len(values) for values in answer["logprobs"][0]] == [1] * 16


def test_76_logprobs_are_of_the_distribution_that_the_token_was_drawn_from(target: Target):
    processed = {"temperature": 0.5, "top_k": 4, "logprobs": 8}
    answer = target.post("/generate/", GENERATE | processed).json()
    for ids, values, made in zip(
        answer["logprob_token_ids"], answer["logprobs"], answer["completion_ids"], strict=True
    ):
        for id, row, token in zip(ids, values, made, strict=True):
            likely = [value for value in row if value is not None]
            assert len(likely) == 4 and token in id[:4]  # the others cannot be drawn
            assert likely == sorted(likely, reverse=True) and sum(map(exp, likely)) == pytest.approx(1, abs=1e-4)


def test_a_token_outside_the_most_likely_ones_follows_them(target: Target):
    answer = target.post("/generate/", GENERATE | {"logprobs": 1, "temperature": 5.0, "max_tokens": 50}).json()
    rows = [row for rows in answer["logprob_token_ids"] for row in rows]
    tokens = [token for ids in answer["completion_ids"] for token in ids]
    assert {len(row) for row in rows} == {1, 2}
    assert all(row[-1] == token for row, token in zip(rows, tokens, strict=True))


def test_no_logprobs_are_returned_if_they_are_null(target: Target):
    answer = target.post("/generate/", GENERATE | {"logprobs": None}).json()
    assert answer["logprobs"] is None and answer["logprob_token_ids"] is None
    assert len(answer["completion_ids"]) == 4


def test_generation_kwargs_override_the_fields(target: Target):
    kwargs = {"n": 1, "max_tokens": 3, "stop": None, "ignore_eos": True}
    answer = target.post("/generate/", GENERATE | {"generation_kwargs": kwargs}).json()
    assert [len(ids) for ids in answer["completion_ids"]] == [3, 3]


def test_a_pattern_constrains_the_answers(target: Target):
    body = GENERATE | {"structured_outputs_regex": "(ab){1,3}", "max_tokens": 30, "generation_kwargs": {}}
    answer = target.post("/generate/", body)
    assert answer.status_code == 200, answer.text
    for ids in answer.json()["completion_ids"]:
        text = target.post("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json()["prompt"]
        assert text in ("ab", "abab", "ababab")


def test_conversations_are_answered_as_by_the_chat_api(target: Target):
    answer = target.post("/chat/", CHAT).json()
    made = []
    for i, messages in enumerate(CHAT["messages"]):
        body = {
            "messages": messages,
            "max_tokens": 5,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": 3 + 2 * i,
        }
        one = target.post("/v1/chat/completions", body | {"n": 2}).json()
        assert answer["prompt_ids"][i] == one["prompt_token_ids"]
        made += ids_of(one["choices"])
    assert answer["completion_ids"] == made
    assert len(answer["logprobs"]) == 4


def test_a_tool_call_of_a_dataset_needs_no_id_and_has_an_object_as_arguments(target: Target):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "1"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    answer = target.post("/chat/", CHAT | {"messages": [turns], "tools": [tool]})
    assert answer.status_code == 200, answer.text


def positions(answer: dict[str, Any], top: str, kind: str) -> list[list[list[Any]]]:
    """One of the arrays of a binary answer, cut to the length of each sequence."""
    values = array(kind, base64.b64decode(answer[top])).tolist()
    _, longest, wide = answer["shape"]
    wide = 1 if top.startswith("actual") else wide
    rows = [values[i : i + wide] for i in range(0, len(values), wide)]
    return [rows[i * longest :][:length] for i, length in enumerate(answer["completion_lengths"])]


def test_sequences_are_scored_from_the_end_of_their_prompts(target: Target):
    lists = target.post("/get_sequence_logprobs/", SEQUENCES | {"response_format": "json"}).json()
    assert [len(rows) for rows in lists["logprobs"]] == [2, 2]
    body = {"prompt": SEQUENCES["sequences"], "max_tokens": 1, "echo": True, "logprobs": 3}
    choices = target.post("/v1/completions", body).json()["choices"]
    arrays = target.post("/get_sequence_logprobs/", SEQUENCES | {"response_format": "binary"}).json()
    assert arrays["shape"] == [2, 2, 3] and arrays["completion_lengths"] == [2, 2]
    actual = positions(arrays, "actual_logprobs_b64", "f")
    assert positions(arrays, "actual_token_ids_b64", "i") == [[[5], [6]], [[8], [9]]]
    for i, (length, choice) in enumerate(zip(SEQUENCES["prompt_lengths"], choices, strict=True)):
        expected = choice["logprobs"]["token_logprobs"][length:-1]
        assert [row[0] for row in actual[i]] == pytest.approx(expected, rel=1e-5)
        top = positions(arrays, "logprobs_b64", "f")[i]
        assert [row[:3] for row in lists["logprobs"][i]] == [pytest.approx(row, rel=1e-5) for row in top]
        likely = [row[:3] for row in lists["logprob_token_ids"][i]]
        assert positions(arrays, "token_ids_b64", "i")[i] == likely
        assert all(row == sorted(row, reverse=True) for row in top)


def test_the_first_token_of_a_sequence_has_no_score(target: Target):
    body = {"sequences": [[1], [2, 3]], "prompt_lengths": [0, 2], "top_logprobs": 2}
    lists = target.post("/get_sequence_logprobs/", body).json()
    assert lists == {"logprobs": [[[]], []], "logprob_token_ids": [[[]], []]}
    arrays = target.post("/get_sequence_logprobs/", body | {"response_format": "binary"}).json()
    assert positions(arrays, "logprobs_b64", "f") == [[[-inf, -inf]], []]
    assert positions(arrays, "actual_token_ids_b64", "i") == [[[0]], []]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/generate/", {"images": [["aGk="], None]}, "images"),
        ("/generate/", {"prompts": []}, "prompts"),
        ("/generate/", {"temperature": -1}, "temperature"),
        ("/generate/", {"logprobs": 21}, "logprobs"),
        ("/generate/", {"generation_kwargs": {"temprature": 1}}, "generation_kwargs.temprature"),
        ("/generate/", {"generation_kwargs": {"allowed_token_ids": [1]}}, "generation_kwargs.allowed_token_ids"),
        ("/generate/", {"structured_outputs_regex": "("}, "structured_outputs_regex"),
        ("/generate/", {"lora": "a"}, "lora"),
        ("/generate/", {"n": 600}, "n"),
        ("/chat/", {"messages": []}, "messages"),
        (
            "/chat/",
            {"messages": [[{"role": "user", "content": [{"type": "image_pil", "image_pil": ""}]}]]},
            "content",
        ),
        ("/chat/", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/get_sequence_logprobs/", {"prompt_lengths": [1]}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"prompt_lengths": [7, 1]}, "prompt_lengths[0]"),
        ("/get_sequence_logprobs/", {"top_logprobs": 100}, "top_logprobs"),
        ("/get_sequence_logprobs/", {"temperature": 0}, "temperature"),
        ("/get_sequence_logprobs/", {"response_format": "pickle"}, "response_format"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_77_what_is_not_implemented_is_refused_by_name(target: Target, path: str, change: dict[str, Any], param: str):
    plain = {"/generate/": GENERATE, "/chat/": CHAT, "/get_sequence_logprobs/": SEQUENCES}[path]
    named, message = refused(target, path, plain | change)
    assert param in (named or message)


LONG = GENERATE | {"max_tokens": 3500, "n": 4}


@asynccontextmanager
async def running_batch(target: Target, server: LiveServer) -> AsyncIterator[asyncio.Task[clients.Told]]:
    """A batch of eight answers that have begun."""
    asking = asyncio.create_task(clients.post(target.url, "/generate/", LONG))
    ledger = server.api.ledger
    await clients.until(lambda: asking.done() or any(record.output_tokens for record in ledger.live.values()))
    if asking.done():
        raise clients.Missed
    assert ledger.in_flight == 8  # limits count every answer
    yield asking


def test_12_a_client_that_leaves_ends_the_whole_batch(target: Target, server: LiveServer):
    async def leave(attempt: int) -> None:
        counts = server.api.ledger.metrics.aborts
        before = counts["client_disconnect"]
        async with running_batch(target, server) as asking:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await idle(server)
        assert counts["client_disconnect"] - before == 8

    clients.unless_missed(leave)


def test_5_an_aborted_batch_is_answered_with_what_exists_and_says_so(target: Target, server: LiveServer):
    async def end(attempt: int) -> None:
        async with running_batch(target, server) as asking:
            await clients.post(target.url, "/v1/abort_requests", {"abort_all": True})
        answer = await asking
        assert answer.status == 200, answer.body
        assert set(answer.body["finish_reasons"]) == {"abort"}
        made = answer.body["completion_ids"]
        assert any(made) and [len(ids) for ids in made] == [len(values) for values in answer.body["logprobs"]]

    clients.unless_missed(end)


def test_the_server_reports_that_it_is_up_and_how_many_engines_it_has(target: Target):
    assert target.get("/health/").status_code == 200
    assert target.get("/get_world_size/").json() == {"world_size": 1}


def test_resetting_the_prefix_cache_drops_cached_prompts(target: Target):
    body = {"prompt": [9] * 200, "max_tokens": 1}

    def cached() -> int:
        usage = target.post("/v1/completions", body).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    assert target.post("/reset_prefix_cache/").status_code == 200
    assert cached() == 0
