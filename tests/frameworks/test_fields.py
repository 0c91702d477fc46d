"""Fields of generation requests: null, defaults and values without effect are accepted, others are refused by name.

Guarantee 77.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from headgate.contract.compatible import COMPATIBLE, CompatibleField
from headgate.contract.parameter import Api
from tests.frameworks.conftest import Target

CALLS: dict[Api, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    "sglang": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    "vllm": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
}
REFUSED = [(api, each) for each in COMPATIBLE if each.accepted is not None for api in each.apis]


def with_field(body: dict[str, Any], field: CompatibleField, value: Any) -> dict[str, Any]:
    if field.place == "body":
        return body | {field.name: value}
    return body | {"sampling_params": body["sampling_params"] | {field.name: value}}


def first(field: CompatibleField) -> Any:
    return "any" if field.accepted is None else next(iter(field.accepted), None)


@pytest.mark.parametrize("api", CALLS)
def test_77_every_accepted_value_changes_nothing(target: Target, api: Api):
    path, plain = CALLS[api]
    fields = [each for each in COMPATIBLE if api in each.apis]
    for values in ([None] * len(fields), [first(each) for each in fields]):
        body = plain
        for field, value in zip(fields, values, strict=True):
            body = with_field(body, field, value)
        assert target.post(path, body).status_code == 200, target.post(path, body).text


@pytest.mark.parametrize(("api", "field"), REFUSED, ids=lambda value: getattr(value, "name", value))
def test_77_a_value_that_would_change_the_answer_is_refused_by_name(target: Target, api: Api, field: CompatibleField):
    path, body = CALLS[api]
    refused = target.post(path, with_field(body, field, "something else"))
    error = refused.json()["error"]
    prefix = "" if field.place == "body" else "sampling_params."
    assert (refused.status_code, error["code"]) == (400, "unsupported_parameter"), refused.text
    assert error["param"] == prefix + field.name and field.name in error["message"]


@pytest.mark.parametrize("api", CALLS)
def test_77_a_field_that_no_client_sends_is_refused_by_name(target: Target, api: Api):
    path, body = CALLS[api]
    refused = target.post(path, body | {"temprature": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"


def test_usage_in_every_chunk_as_guidellm_and_aiperf_request_it(target: Target):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for api in ("chat", "completions", "vllm"):
        path, body = CALLS[api]
        *chunks, done = target.events(path, body | {"stream_options": options})
        usages = [json.loads(chunk)["usage"] for chunk in chunks]
        counts = [usage["completion_tokens"] for usage in usages]
        assert done == "[DONE]" and counts == sorted(counts) and counts[-1] == counts[-2]
        assert len({usage["prompt_tokens"] for usage in usages}) == 1 and counts[-1] > 0


def test_token_ids_have_the_names_that_trl_reads(target: Target):
    for api in ("chat", "completions"):
        path, body = CALLS[api]
        body = body | {"return_token_ids": True, "ignore_eos": True, "temperature": 0}
        whole = target.post(path, body).json()
        (choice,) = whole["choices"]
        assert choice["token_ids"] == choice["completion_token_ids"] and len(choice["token_ids"]) == 2
        chunks = [json.loads(event) for event in target.events(path, body)[:-1]]
        assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
        if api == "chat":
            assert whole["prompt_token_ids"] == choice["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
            assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_log_probabilities_name_tokens_by_id_as_areal_reads_them(target: Target):
    ids = {"return_tokens_as_token_ids": True, "use_beam_search": False, "return_token_ids": True, "temperature": 0}
    completion = target.post("/v1/completions", CALLS["completions"][1] | ids | {"logprobs": 0}).json()["choices"][0]
    named = [int(token.split(":")[1]) for token in completion["logprobs"]["tokens"]]
    assert named == completion["token_ids"]
    chat = target.post("/v1/chat/completions", CALLS["chat"][1] | ids | {"logprobs": True}).json()["choices"][0]
    assert [f"token_id:{id}" for id in chat["token_ids"]] == [each["token"] for each in chat["logprobs"]["content"]]


def test_lists_of_ids_and_sampling_parameters_on_generate(target: Target):
    params = [{"max_new_tokens": count, "temperature": 0, "ignore_eos": True} for count in (2, 3)]
    body = {"input_ids": [[1, 2], [3, 4]], "sampling_params": params, "rid": ["one", "two"]}
    first, second = target.post("/generate", body).json()
    assert [len(each["output_ids"]) for each in (first, second)] == [2, 3]
    assert [each["meta_info"]["id"] for each in (first, second)] == ["one", "two"]
    alone = target.post("/generate", {"input_ids": [3, 4], "sampling_params": params[1]}).json()
    assert second["output_ids"] == alone["output_ids"]
    wrong = target.post("/generate", body | {"rid": ["one"]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "rid"


def test_vllms_generate_runs_to_the_end_of_the_context_and_reports_usage(target: Target):
    body = {"token_ids": [1] * 4000, "sampling_params": {"ignore_eos": True}, "return_token_ids": True}
    answer = target.post("/inference/v1/generate", body).json()
    assert answer["usage"]["prompt_tokens"] == 4000 == len(answer["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) > 16
