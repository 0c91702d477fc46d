"""vLLM's `structured_outputs`, which TRL sends to the OpenAI API and in `sampling_params`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frameworks.conftest import Target

# A model with random weights may write a long row of blanks.
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 300},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 300}},
    "/generate/": {"prompts": [[1, 2]], "generation_kwargs": {"max_tokens": 300}},
}


def constrained(path: str, constraint: dict[str, Any]) -> dict[str, Any]:
    body, within = CALLS[path], {"/inference/v1/generate": "sampling_params", "/generate/": "generation_kwargs"}
    if inner := within.get(path):
        return body | {inner: body[inner] | {"structured_outputs": constraint}}
    return body | {"structured_outputs": constraint}


def text_of(target: Target, path: str, answer: dict[str, Any]) -> str:
    text: str
    if path == "/generate/":
        ids = answer["completion_ids"][0]
    else:
        (choice,) = answer["choices"]
        if "text" in choice or "message" in choice:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            return text
        ids = choice["token_ids"]
    text = target.post("/detokenize", {"tokens": ids, "skip_special_tokens": True}).json()["prompt"]
    return text


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<t>", "content": {"type": "const_string", "value": "ab"}, "end": "</t>"},
}


@pytest.mark.parametrize("path", CALLS)
def test_an_answer_follows_the_constraint(target: Target, path: str):
    def answered(constraint: dict[str, Any]) -> str:
        answer = target.post(path, constrained(path, constraint))
        assert answer.status_code == 200, answer.text
        return text_of(target, path, answer.json())

    assert answered({"regex": "(ab){2}"}) == "abab"
    assert answered({"choice": ["yes", "no"]}) in ("yes", "no")
    assert json.loads(answered({"json": SCHEMA}))["a"] in (1, 2)
    assert json.loads(answered({"json": json.dumps(SCHEMA)}))["a"] in (1, 2)
    assert answered({"grammar": 'root ::= "(" [a-c] ")"'})[2:] == ")"
    assert answered({"structural_tag": json.dumps(TAG)}) == "<t>ab</t>"


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "constraint", [{"regex": "("}, {"choice": []}, {"grammar": "x"}, {"regex": "a", "choice": ["a"]}, {"json": "["}]
)
def test_77_a_constraint_that_cannot_be_enforced_is_refused(target: Target, path: str, constraint: dict[str, Any]):
    refused = target.post(path, constrained(path, constraint))
    assert refused.status_code == 400, refused.text
    if "json" not in constraint:
        assert "structured_outputs" in refused.json()["error"]["param"]


def test_77_a_constraint_excludes_another_one_and_tools(target: Target):
    body = constrained("/v1/chat/completions", {"regex": "a"})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for more in ({"response_format": {"type": "json_object"}}, {"tools": [tool]}):
        refused = target.post("/v1/chat/completions", body | more)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "structured_outputs"
    answer = target.post("/v1/chat/completions", body | {"tools": [tool], "tool_choice": "none"})
    assert answer.json()["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    "constraint", [{"regex": "(ab){2}"}, {"ebnf": 'root ::= "abab"'}, {"json_schema": '{"const": 7}'}]
)
def test_sglangs_names_constrain_its_own_call_and_the_openai_api(target: Target, constraint: dict[str, Any]):
    expected = "7" if "json_schema" in constraint else "abab"
    answer = target.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 300} | constraint})
    assert answer.json()["text"] == expected
    answer = target.post("/v1/chat/completions", CALLS["/v1/chat/completions"] | constraint)
    assert answer.json()["choices"][0]["message"]["content"] == expected


def test_trl_reads_the_configuration_and_the_reset_as_json(target: Target):
    config = target.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] is not None
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert target.post("/reset_prefix_cache").json() == {"success": True}
