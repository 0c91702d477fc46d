"""`return_routed_experts` in every API: the experts of prompt and answer, without those of the last token."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate import LLM, SamplingParams
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server

IDS = [*range(40, 80), 3, 1, 4, 1, 5]
OPTIONS: dict[str, Any] = {"device": "cpu", "max_context": 256, "block_size": 16, "routed_experts": True}
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SGLANG = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("experts") / "tiny", "qwen3_moe")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder, kv_blocks=128, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """Those of an engine in this process; `tests/test_routed_experts.py` compares them with the reference."""
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, return_routed_experts=True)
    with LLM(folder, kv_blocks=128, **OPTIONS) as llm:
        (answer,) = llm.generate([IDS], asked, progress=False)
    assert answer.routed_experts is not None and len(answer.routed_experts) == len(IDS) + 19
    return answer.routed_experts


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def int32(text: str, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, *like.shape[1:])


def test_sglangs_generate_returns_them_as_int32(server: LiveServer, expected: np.ndarray):
    body = {"input_ids": IDS, "sampling_params": SGLANG, "return_routed_experts": True}
    meta = server.post("/generate", body).json()["meta_info"]
    np.testing.assert_array_equal(int32(meta["routed_experts"], expected), expected)
    later = server.post("/generate", body | {"routed_experts_start_len": 44}).json()["meta_info"]
    np.testing.assert_array_equal(int32(later["routed_experts"], expected), expected[44:])
    nothing = server.post("/generate", body | {"routed_experts_start_len": 500}).json()["meta_info"]
    assert nothing["routed_experts"] == ""
    *events, last, done = server.events("/generate", body)
    assert done == "[DONE]" and not any("routed_experts" in json.loads(event)["meta_info"] for event in events)
    assert json.loads(last)["meta_info"]["routed_experts"] == meta["routed_experts"]
    unasked = server.post("/generate", {"input_ids": IDS, "sampling_params": SGLANG}).json()
    assert "routed_experts" not in unasked["meta_info"]


def test_vllms_generate_returns_them_with_every_answer(server: LiveServer, expected: np.ndarray):
    body = {"token_ids": IDS, "sampling_params": GREEDY | {"n": 2}}
    for choice in server.post("/inference/v1/generate", body).json()["choices"]:
        np.testing.assert_array_equal(npy(choice["routed_experts"]), expected)
    second = {"token_ids": IDS, "sampling_params": GREEDY | {"routed_experts_prompt_start": 44}}
    (choice,) = server.post("/inference/v1/generate", second).json()["choices"]
    np.testing.assert_array_equal(npy(choice["routed_experts"]), expected[44:])
    *events, last, _ = server.events("/inference/v1/generate", second)
    assert json.loads(last)["choices"][0]["routed_experts"] == choice["routed_experts"]
    assert not any("routed_experts" in json.loads(event)["choices"][0] for event in events)
    (choice,) = server.post("/inference/v1/generate", second | {"return_routed_experts": False}).json()["choices"]
    assert "routed_experts" not in choice


def test_completions_and_chat_return_them_on_request(server: LiveServer, expected: np.ndarray):
    body = GREEDY | {"prompt": IDS, "return_routed_experts": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    np.testing.assert_array_equal(npy(choice["routed_experts"]), expected)
    *_, last, _ = server.events("/v1/completions", body)
    assert json.loads(last)["choices"][0]["routed_experts"] == choice["routed_experts"]
    chat = GREEDY | {"messages": [{"role": "user", "content": "Hello"}], "return_routed_experts": True}
    answer = server.post("/v1/chat/completions", chat).json()
    assert len(npy(answer["choices"][0]["routed_experts"])) == answer["usage"]["total_tokens"] - 1
    (choice,) = server.post("/v1/completions", GREEDY | {"prompt": IDS}).json()["choices"]
    assert "routed_experts" not in choice


def test_an_answer_cut_by_a_stop_string_has_only_the_experts_of_its_own_tokens(
    server: LiveServer, expected: np.ndarray
):
    body = GREEDY | {"prompt": IDS, "return_routed_experts": True, "return_token_ids": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    stopped = server.post("/v1/completions", body | {"stop": whole["text"][3:6]}).json()["choices"][0]
    count = len(stopped["token_ids"])
    assert stopped["finish_reason"] == "stop" and count < 20
    np.testing.assert_array_equal(npy(stopped["routed_experts"]), expected[: len(IDS) + count - 1])


def test_an_answer_that_another_server_began_has_them_for_all_tokens(server: LiveServer, expected: np.ndarray):
    body = GREEDY | {"prompt": IDS, "return_routed_experts": True, "return_token_ids": True}
    ids = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    begun = {"index": 0, "token_ids": ids[:7], "versions": [[0, 7]], "delivered_chars": 0}
    journal = {"X-Headgate-Journal": "1", "X-Request-Id": "begun"}
    *_, last, _ = server.events("/v1/completions", body | {"resume": {"choices": [begun]}}, headers=journal)
    np.testing.assert_array_equal(npy(json.loads(last)["choices"][0]["routed_experts"]), expected)
    resumed = server.post("/v1/completions", body | {"generated_token_ids": ids[:7]}).json()["choices"][0]
    np.testing.assert_array_equal(npy(resumed["routed_experts"]), expected)


def test_a_prompt_without_an_answer_has_them(server: LiveServer, expected: np.ndarray):
    body = {"input_ids": IDS, "sampling_params": SGLANG | {"max_new_tokens": 0}, "return_routed_experts": True}
    meta = server.post("/generate", body).json()["meta_info"]
    np.testing.assert_array_equal(int32(meta["routed_experts"], expected), expected[: len(IDS) - 1])


def test_a_server_that_keeps_none_refuses_to_return_them(tmp_path: Path):
    with live_server(tiny_model(tmp_path / "dense"), device="cpu", max_context=256) as dense:
        for path, body in (
            ("/generate", {"input_ids": IDS, "sampling_params": SGLANG}),
            ("/v1/completions", GREEDY | {"prompt": IDS}),
            ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": GREEDY}),
        ):
            refused = dense.post(path, body | {"return_routed_experts": True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_routed_experts"
        turn = {"token_ids": IDS, "sampling_params": GREEDY | {"routed_experts_prompt_start": 44}}
        (choice,) = dense.post("/inference/v1/generate", turn).json()["choices"]
        assert len(choice["token_ids"]) == 20 and "routed_experts" not in choice
