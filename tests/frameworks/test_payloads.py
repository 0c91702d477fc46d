"""Whole payloads of trainers and routers, as their source sends them, which no other test of this folder has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.conftest import Target

# What sglang-router and vllm-router add to every chat, whatever their client sent.
BY_ROUTERS = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "ignore_eos": False,
}


def test_prime_rls_second_turn_names_where_routed_experts_begin(target: Target):
    """It sends the field for dense models too, with the policy's version as the salt of the prefix cache."""
    sampling = {"temperature": 1.0, "max_tokens": 4, "logprobs": 1, "top_k": -1, "min_p": 0.0, "seed": 1}
    first = {"token_ids": [1, 2, 3], "sampling_params": sampling, "cache_salt": "7"}
    headers = {"X-Session-ID": "rollout-1"}
    (choice,) = target.post("/inference/v1/generate", first, headers=headers).json()["choices"]
    ids = [1, 2, 3, *choice["token_ids"], 4]
    second = first | {"token_ids": ids, "sampling_params": sampling | {"routed_experts_prompt_start": len(ids) - 1}}
    answer = target.post("/inference/v1/generate", second, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"][0]["token_ids"], answer.text


def test_skyrls_tinker_samples_have_several_choices_and_scores(target: Target):
    sampling = {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 3, "temperature": 1.0, "max_tokens": 4}
    body = {"sampling_params": sampling, "model": None, "token_ids": [1, 2, 3]}
    answer = target.post("/inference/v1/generate", body, headers={"X-Session-ID": "a"}).json()
    assert len(answer["choices"]) == 2 and all(each["logprobs"]["content"] for each in answer["choices"])
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 3


def test_chats_that_routers_have_serialised_again_are_answered(target: Target):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": False}
    assert target.post("/v1/chat/completions", body | BY_ROUTERS).status_code == 200


def test_areal_pauses_twice_and_continues(target: Target):
    sampling = {
        "top_p": 1.0,
        "top_k": 100000000,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    }
    body = {
        "input_ids": [1, 2],
        "image_data": [],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    target.post("/pause_generation", {}).raise_for_status()
    target.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
    target.post("/continue_generation", {}).raise_for_status()
    answer = target.post("/generate", body)
    assert answer.status_code == 200 and len(answer.json()["meta_info"]["output_token_logprobs"]) == 4, answer.text


@pytest.mark.parametrize(
    "field",
    [{"lora_path": "default_lora-v1"}, {"return_routed_experts": True}, {"return_indexer_topk": True}],
)
def test_77_what_areal_and_miles_may_ask_beyond_tokens_is_refused_by_name(target: Target, field: dict[str, Any]):
    refused = target.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}} | field)
    (name,) = field
    assert refused.status_code == 400 and name in refused.json()["error"]["message"], refused.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/pull_weights", {"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 1}),
        ("get", "/parallelism_config?rank=0", None),
        ("post", "/load_lora_adapter", {"lora_name": "a-v1", "lora_path": "/a"}),
        ("post", "/unload_lora_adapter", {"lora_name": "a-v1"}),
        ("post", "/load_lora_adapter_from_tensors", {"lora_name": "a", "config_dict": {}}),
        ("post", "/v1/load_lora_adapter", {"lora_name": "a-v1", "lora_path": "/a"}),
        ("post", "/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("post", "/skyrl/v1/generate", {"token_ids": [1], "sampling_params": {}}),
        ("post", "/fetch_weights", {"target_version": 1, "sync_dir": "/a"}),
        ("post", "/post_process_weights", {"restore_weights_before_load": True}),
        ("post", "/init_broadcaster", {"host": "127.0.0.1", "port": 1}),  # prime-rl tolerates 404
        ("post", "/init_communicator/", {"host": "0.0.0.0", "port": 1, "world_size": 2}),
    ],
)
def test_77_calls_that_are_not_implemented_are_refused_by_their_path(
    target: Target, method: str, path: str, body: Any
):
    """No such call may look as if it had been carried out: trainers would go on with the old weights."""
    refused = target.get(path) if method == "get" else target.post(path, body)
    assert refused.status_code == 404 and path.partition("?")[0] in refused.json()["error"]["message"], refused.text
