from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer, eventually

PATH = "/v1/chat/completions"
LONG = {"ignore_eos": True, "max_tokens": 400}


def asking(content: Any = "Tell me.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "seed": 7} | fields


def chunks(events: list[str]) -> list[dict[str, Any]]:
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def said(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    problem: dict[str, Any] = response.json()["error"]
    assert set(problem) == {"message", "type", "param", "code"}
    return problem


# -- answers ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stop", [None, ["6", "jj"], "E"])
def test_the_deltas_of_a_stream_add_up_to_the_complete_answer(server: LiveServer, seed: int, stop: Any):
    body = asking("naïve 😀 文字", seed=seed, stop=stop, max_tokens=120)
    whole = server.post(PATH, body).json()["choices"][0]
    streamed = chunks(server.events(PATH, body))
    assert said(streamed) == whole["message"]["content"]
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert streamed[-1]["choices"][0]["cause"] == whole["cause"]
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a_stop_string_is_cut_and_counts_the_tokens_up_to_it(server: LiveServer):
    free = server.post(PATH, asking(return_token_ids=True, **LONG)).json()["choices"][0]
    text = free["message"]["content"]
    stop = next(char for char in text[10:] if char.isascii() and char.isalnum())
    body = asking(stop=stop, return_token_ids=True, **LONG)
    answer = server.post(PATH, body).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["cause"]) == ("stop", "stop_string")
    assert choice["message"]["content"] == text[: text.index(stop)]
    ids = choice["completion_token_ids"]
    assert ids == free["completion_token_ids"][: len(ids)]
    assert answer["usage"]["completion_tokens"] == len(ids)
    with_stop = server.post(PATH, body | {"include_stop_str_in_output": True}).json()["choices"][0]
    assert with_stop["message"]["content"] == text[: text.index(stop) + 1]


def test_choices_have_their_own_seeds_and_stream_under_their_index(server: LiveServer):
    whole = server.post(PATH, asking(n=3)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3 and [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert texts[1] == server.post(PATH, asking(seed=8)).json()["choices"][0]["message"]["content"]
    streamed = chunks(server.events(PATH, asking(n=3)))
    assert [said(streamed, index) for index in range(3)] == texts


def test_without_a_seed_answers_differ(server: LiveServer):
    texts = {server.post(PATH, asking(seed=None)).json()["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) == 3


def test_usage_counts_the_prompt_once_and_reports_cached_tokens(server: LiveServer):
    body = asking(
        "a prompt that is longer than one block of the cache", n=2, cache_salt="usage", **LONG | {"max_tokens": 5}
    )
    first, second = (server.post(PATH, body).json()["usage"] for _ in range(2))
    assert first["completion_tokens"] == 10
    assert first["total_tokens"] == first["prompt_tokens"] + 10
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 16
    streamed = chunks(server.events(PATH, body | {"stream_options": {"include_usage": True}}))
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"] == second
    assert all(chunk["usage"] is None for chunk in streamed[:-1])


def test_logprobs_come_with_every_token(server: LiveServer):
    body = asking(logprobs=True, top_logprobs=3, return_token_ids=True)
    choice = server.post(PATH, body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["completion_token_ids"])
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)
    assert (
        bytes(byte for entry in entries for byte in entry["bytes"])
        .decode(errors="replace")
        .startswith(choice["message"]["content"])
    )
    streamed = chunks(server.events(PATH, body))
    told = [entry for chunk in streamed for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert told == entries


@pytest.mark.parametrize("stop", [None, "6"])
@pytest.mark.parametrize("cut", [1, 13, 37])
def test_continuing_from_generated_ids_equals_an_uninterrupted_run(server: LiveServer, cut: int, stop: Any):
    body = asking(return_token_ids=True, ignore_eos=True, max_tokens=60, stop=stop, frequency_penalty=0.5)
    whole = server.post(PATH, body).json()
    ids = whole["choices"][0]["completion_token_ids"]
    cut = min(cut, len(ids) - 1)
    resumed = server.post(PATH, body | {"generated_token_ids": ids[:cut]}).json()
    assert resumed["choices"][0]["message"] == whole["choices"][0]["message"]
    assert resumed["choices"][0]["completion_token_ids"] == ids[cut:]
    assert resumed["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    text = whole["choices"][0]["message"]["content"]
    rest = server.post(PATH, body | {"generated_token_ids": ids[:cut], "delivered_chars": 1}).json()
    assert rest["choices"][0]["message"]["content"] == text[1:]


def test_weight_versions_are_spans_over_the_tokens(server: LiveServer):
    choice = server.post(PATH, asking(return_weight_versions=True, **LONG | {"max_tokens": 9})).json()["choices"][0]
    assert choice["weight_versions"] == [{"version": 0, "tokens": 9}]


def test_the_request_id_is_the_label_and_comes_back(server: LiveServer):
    for response in (
        server.post(PATH, asking(request_id="mine")),
        server.post(PATH, asking(), headers={"X-Request-Id": "mine"}),
    ):
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "chatcmpl-mine"


def test_a_deadline_ends_the_request_with_a_partial_answer(server: LiveServer):
    body = asking(deadline_ms=20, ignore_eos=True, max_tokens=450)
    choice = server.post(PATH, body).json()["choices"][0]
    assert (choice["finish_reason"], choice["cause"]) == ("abort", "deadline")


def test_strict_clients_never_see_abort_nor_a_silent_success(server: LiveServer):
    body, strict = asking(deadline_ms=20, ignore_eos=True, max_tokens=450), {"X-OpenAI-Strict": "true"}
    whole = server.post(PATH, body, headers=strict).json()
    assert whole["choices"][0]["finish_reason"] == "length" and whole["error"]["code"] == "deadline"
    assert whole["choices"][0]["error"] == whole["error"]
    events = chunks(server.events(PATH, body, headers=strict))
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["error"]["code"] == "deadline"
    assert events[-2]["choices"][0]["error"] == events[-1]["error"]


def test_harmless_fields_are_ignored(server: LiveServer):
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low"}
    assert server.post(PATH, asking(**fields)).status_code == 200


# -- refusals --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2000}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias[...]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"n": 2, "generated_token_ids": [1]}, "generated_token_ids"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt"),
    ],
)
def test_unsupported_values_are_refused_with_the_name_of_the_field(server: LiveServer, fields: Any, param: str):
    problem = error(server.post(PATH, asking(**fields)), 400)
    assert problem["param"] == param
    assert problem["code"] and problem["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 50_000,
        b'{"messages": NaN}',
        b'{"temperature": 1e999}',
        b'{"seed": 1%s}' % (b"0" * 5000),
    ],
)
def test_a_body_that_is_not_json_is_refused(server: LiveServer, body: bytes):
    with server.http as http:
        error(http.post(PATH, content=body), 400)


def test_a_refusal_by_the_engine_has_a_status_in_streams_too(server: LiveServer):
    problem = error(server.post(PATH, asking(stream=True, max_tokens=5000)), 400)
    assert problem["code"] == "context_length_exceeded"


def test_another_model_is_not_found(server: LiveServer):
    assert error(server.post(PATH, asking(model="other")), 404)["code"] == "model_not_found"


# -- clients that disconnect ------------------------------------------------------


def idle(server: LiveServer) -> bool:
    status = server.status()
    return not (status.running or status.waiting or status.held_blocks or server.api.ledger.live)


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_disconnects_is_aborted_at_once(server: LiveServer, stream: bool):
    """Guarantee 12 of docs/lifecycle.md."""
    aborts, counts = 0, server.api.ledger.metrics.aborts
    for _ in range(10):  # repeated if the answer was complete before this thread could disconnect
        before = counts["client_disconnect"]
        with server.http as http:
            leave(http, asking(n=8, ignore_eos=True, max_tokens=450, stream=stream))
        assert eventually(lambda: idle(server))
        aborts = counts["client_disconnect"] - before
        if aborts:
            break
    assert aborts == 8


def leave(http: httpx.Client, body: dict[str, Any]) -> None:
    """Disconnect, after one byte of the answer or after a timeout."""
    try:
        patience = httpx.Timeout(60, read=60 if body["stream"] else 0.15)
        with http.stream("POST", PATH, json=body, timeout=patience) as response:
            next(response.iter_raw(1))
    except httpx.ReadTimeout:
        assert not body["stream"]


def test_a_duplicate_of_a_live_request_is_refused(server: LiveServer):
    with ThreadPoolExecutor(1) as threads:
        server.post("/v1/pause", {"mode": "freeze", "new_requests": "queue"})
        try:
            first = threads.submit(server.post, PATH, asking(request_id="twin"))
            assert eventually(lambda: bool(server.api.ledger.named("twin")))
            refused = server.post(PATH, asking(request_id="twin"))
        finally:
            server.post("/v1/resume", None)
        assert error(refused, 409)["code"] == "duplicate_request_id"
        assert first.result(60).status_code == 200
    assert eventually(lambda: idle(server))
