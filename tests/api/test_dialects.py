"""Clients written for SGLang and vLLM, unchanged but for the address: paths, bodies and fields are what they use."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.api.test_abort import idle

LONG = 6000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dialects")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    model = tiny_model(folder / "old", max_position_embeddings=16384)
    with live_server(model, device="cpu", kv_blocks=1024, max_running=8) as server:
        yield server


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    return tiny_model(folder / "new", seed=1, max_position_embeddings=16384)


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    yield
    server.post("/v1/resume", None)
    asyncio.run(idle(server))


def connect(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=30)


PARAMS = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}


# ------------------------------------------------------------------------------------------------------------- SGLang


def test_sglang_generate_from_ids_has_what_slime_reads(server: LiveServer):
    body = {"input_ids": [1, 2, 3], "sampling_params": PARAMS, "return_logprob": True, "rid": "slime-1"}
    output = server.post("/generate", body).json()
    meta = output["meta_info"]
    tokens = [item[1] for item in meta["output_token_logprobs"]]
    assert len(tokens) == 24 == meta["completion_tokens"] and tokens == output["output_ids"]
    assert all(item[0] <= 0 for item in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 24} and meta["prompt_tokens"] == 3
    assert meta["id"] == "slime-1" and meta["weight_version"] == "0" and isinstance(output["text"], str)


def test_sglang_generate_from_text_and_in_batches(server: LiveServer):
    one = server.post("/generate", {"text": "hello", "sampling_params": PARAMS}).json()
    several = server.post("/generate", {"text": ["hello", "world"], "sampling_params": PARAMS}).json()
    assert next(each["text"] for each in several) == one["text"] and len(several) == 2
    scored = {"text": "hello", "sampling_params": PARAMS, "return_logprob": True, "logprob_start_len": 0}
    inputs = server.post("/generate", scored).json()["meta_info"]["input_token_logprobs"]
    assert len(inputs) == 5 and inputs[0][0] is None and all(item[0] <= 0 for item in inputs[1:])


def test_sglang_streams_repeat_the_text_so_far(server: LiveServer):
    whole = server.post("/generate", {"text": "hello", "sampling_params": PARAMS}).json()
    events = server.events("/generate", {"text": "hello", "sampling_params": PARAMS})
    assert events[-1] == "[DONE]"
    outputs = [json.loads(event) for event in events[:-1]]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(outputs))
    assert outputs[-1]["text"] == whole["text"] and outputs[-1]["output_ids"] == whole["output_ids"]
    assert [bool(output["meta_info"]["finish_reason"]) for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_sglang_abort_all_gives_partial_rollouts_that_can_go_on(server: LiveServer):
    """As slime's partial rollout does: abort, keep the tokens, ask again with prompt and tokens as input."""

    async def main() -> None:
        async with connect(server) as client:
            params = PARAMS | {"max_new_tokens": LONG}
            bodies = [{"input_ids": [1, 2, i], "sampling_params": params, "return_logprob": True} for i in range(4)]
            tasks = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
            while server.status().running < 4:
                await asyncio.sleep(0.01)
            assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
            outputs = [(await task).json() for task in tasks]
            for body, output in zip(bodies, outputs, strict=True):
                assert output["meta_info"]["finish_reason"]["type"] == "abort"
                tokens = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
                more = body | {"input_ids": body["input_ids"] + tokens, "sampling_params": PARAMS}
                assert (await client.post("/generate", json=more)).json()["meta_info"]["finish_reason"][
                    "type"
                ] == "length"

    asyncio.run(main())


def test_sglang_abort_by_rid_ends_that_request(server: LiveServer):
    async def main() -> None:
        async with connect(server) as client:
            body = {"text": "a", "rid": "one", "sampling_params": PARAMS | {"max_new_tokens": LONG}}
            asked = asyncio.create_task(client.post("/generate", json=body))
            while not server.status().running:
                await asyncio.sleep(0.01)
            await client.post("/abort_request", json={"rid": "one"})
            assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_sglang_pause_holds_new_requests_until_continue(server: LiveServer, mode: str):
    async def main() -> None:
        async with connect(server) as client:
            params = PARAMS | {"max_new_tokens": 800}
            running = asyncio.create_task(client.post("/generate", json={"text": "a", "sampling_params": params}))
            while not server.status().running:
                await asyncio.sleep(0.01)
            assert (await client.post("/pause_generation", json={"mode": mode})).status_code == 200
            held = asyncio.create_task(client.post("/generate", json={"text": "b", "sampling_params": PARAMS}))
            while not server.status().waiting:
                await asyncio.sleep(0.01)
            assert (await client.post("/continue_generation", json={})).status_code == 200
            reason = (await running).json()["meta_info"]["finish_reason"]["type"]
            assert reason == ("abort" if mode == "abort" else "length")
            assert (await held).json()["meta_info"]["finish_reason"]["type"] == "length"

    asyncio.run(main())


def test_sglang_weights_are_updated_from_disk_as_slime_does(server: LiveServer, new: Path, folder: Path):
    def answer() -> dict[str, Any]:
        return server.post("/generate", {"input_ids": [5, 6], "sampling_params": PARAMS}).json()

    def update(path: Path, **more: Any) -> httpx.Response:
        return server.post("/update_weights_from_disk", {"model_path": str(path), **more})

    old = answer()
    server.post("/pause_generation", {})
    with server.http as http:
        assert http.get("/flush_cache").status_code == 200
    updated = update(new, weight_version="5")
    assert updated.status_code == 200 and updated.json()["success"] is True
    server.post("/continue_generation", {})
    assert answer()["output_ids"] != old["output_ids"] and answer()["meta_info"]["weight_version"] == "5"
    broken = update(folder / "nowhere")
    assert broken.status_code == 400 and broken.json()["success"] is False
    assert update(folder / "old").json()["success"] is True, "a server that runs is held for the update"
    assert answer()["output_ids"] == old["output_ids"] and answer()["meta_info"]["weight_version"] == "6"


def test_sglang_information_has_what_frameworks_read(server: LiveServer):
    with server.http as http:
        for path in ("/model_info", "/get_model_info"):
            assert http.get(path).json()["weight_version"].isdecimal() and http.get(path).json()["is_generation"]
        for path in ("/server_info", "/get_server_info"):
            assert http.get(path).json()["max_total_num_tokens"] == 1024 * 32
        (load,) = http.get("/v1/loads").json()["loads"]
        assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0
        assert http.get("/health_generate").status_code == 200


def test_sglang_memory_is_released_and_resumed(server: LiveServer):
    before = server.post("/generate", {"text": "x", "sampling_params": PARAMS}).json()["output_ids"]
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert set(server.status().asleep) == {"weights", "kv_cache"}
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.status().asleep == ("kv_cache",)
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).status_code == 200
    assert server.post("/generate", {"text": "x", "sampling_params": PARAMS}).json()["output_ids"] == before


# --------------------------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length"), ("keep", "length")])
def test_vllm_pause_resume_and_is_paused(server: LiveServer, mode: str, reason: str):
    async def main() -> None:
        async with connect(server) as client:
            body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not server.status().running:
                await asyncio.sleep(0.01)
            paused = await client.post("/pause", params={"mode": mode, "clear_cache": "true"})
            assert paused.status_code == 200 and paused.json() == {"status": "paused"}
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            held = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 4}))
            while not server.status().waiting:
                await asyncio.sleep(0.01)
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            assert (await client.get("/is_paused")).json() == {"is_paused": False}
            assert (await running).json()["choices"][0]["finish_reason"] == reason
            assert (await held).json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


def test_vllm_sleep_and_wake_up(server: LiveServer):
    with server.http as http:
        assert http.post("/sleep", params={"level": 1}).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up", params={"tags": "weights"}).status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_vllm_small_calls(server: LiveServer):
    with server.http as http:
        assert http.post("/pause", params={"mode": "never"}).status_code == 400
        assert http.get("/version").json() == {"version": "0"}
        assert http.get("/get_world_size").json() == {"world_size": 1}
        assert http.post("/reset_prefix_cache").status_code == 200


def test_vllm_token_ids_in_and_out(server: LiveServer):
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1, "detokenize": False}
    body = {"token_ids": [1, 2, 3], "sampling_params": params, "request_id": "t1"}
    whole = server.post("/inference/v1/generate", body).json()
    (choice,) = whole["choices"]
    assert whole["request_id"] == "t1" and len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 6
    assert choice["finish_reason"] == "length"
    events = server.events("/inference/v1/generate", body)
    tokens = [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]
    assert tokens == choice["token_ids"]
    refused = server.post("/inference/v1/generate", body | {"sampling_params": {"beam_width": 2}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "sampling_params.beam_width"
