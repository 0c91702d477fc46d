"""Clients written for SGLang and vLLM, unchanged except for the address: the paths, bodies and fields that they use."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.device.weights.loading import SafetensorsFolder
from headgate.testing.tiny import tiny_model
from headgate.weights import send_weights
from tests.api.clients import Missed, unless_missed, until
from tests.api.live import LiveServer, live_server
from tests.api.test_abort import idle
from tests.ports import own_port

LONG = 15000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dialects")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    model = tiny_model(folder / "old", max_position_embeddings=16384)
    with live_server(model, device="cpu", kv_blocks=2048, max_running=8) as server:
        yield server


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    return tiny_model(folder / "new", seed=1, max_position_embeddings=16384)


@pytest.fixture(autouse=True)
def clean(server: LiveServer) -> Iterator[None]:
    yield
    server.post("/v1/wakeup", None)
    server.post("/v1/resume", None)
    asyncio.run(idle(server))


def connect(server: LiveServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=100)


def is_running(server: LiveServer, asked: asyncio.Task[httpx.Response]) -> bool:
    if asked.done():
        raise Missed
    return bool(server.status().running)


PARAMS = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}


# ------------------------------------------------------------------------------------------------------------- SGLang


def test_sglang_reports_the_matched_stop_string_and_answers_a_batch_with_a_list(server: LiveServer):
    whole = server.post("/generate", {"text": "a", "sampling_params": PARAMS}).json()["text"]
    params = PARAMS | {"stop": ["never-said", whole[4:7]]}
    stopped = server.post("/generate", {"text": "a", "sampling_params": params}).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[4:7]}
    alone, (one,) = (
        server.post("/generate", {"input_ids": ids, "sampling_params": PARAMS}).json() for ids in ([1, 2], [[1, 2]])
    )
    assert one["output_ids"] == alone["output_ids"]


def test_sglang_accepts_biases_by_name_and_refuses_a_schema_that_is_not_json(server: LiveServer):
    biased = {"input_ids": [1, 2], "sampling_params": PARAMS | {"logit_bias": {"65": 100}}}
    assert set(server.post("/generate", biased).json()["output_ids"]) == {65}
    refused = server.post("/generate", {"text": "a", "sampling_params": PARAMS | {"json_schema": "{nothing"}})
    assert refused.status_code == 400, refused.text


def test_sglang_generate_from_ids_returns_the_fields_that_slime_reads(server: LiveServer):
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


def test_sglang_abort_all_returns_partial_rollouts_that_can_be_continued(server: LiveServer):
    """Like slime's partial rollout: abort, keep the tokens, send a new request with prompt and tokens as input."""

    async def main() -> None:
        async with connect(server) as client:
            params = PARAMS | {"max_new_tokens": LONG}
            bodies = [{"input_ids": [1, 2, i], "sampling_params": params, "return_logprob": True} for i in range(4)]
            tasks = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
            await until(lambda: server.status().running == 4)
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
            await until(lambda: bool(server.status().running))
            await client.post("/abort_request", json={"rid": "one"})
            assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_sglang_new_requests_wait_during_a_pause_until_continue(server: LiveServer, mode: str):
    async def main(longer: int) -> None:
        async with connect(server) as client:
            params = PARAMS | {"max_new_tokens": LONG if mode == "abort" else min(4000 * longer, LONG)}
            running = asyncio.create_task(client.post("/generate", json={"text": "a", "sampling_params": params}))
            await until(partial(is_running, server, running))
            assert (await client.post("/pause_generation", json={"mode": mode})).status_code == 200
            held = asyncio.create_task(client.post("/generate", json={"text": "b", "sampling_params": PARAMS}))
            await until(lambda: bool(server.status().waiting))
            assert (await client.post("/continue_generation", json={})).status_code == 200
            reason = (await running).json()["meta_info"]["finish_reason"]["type"]
            assert reason == ("abort" if mode == "abort" else "length")
            assert (await held).json()["meta_info"]["finish_reason"]["type"] == "length"

    unless_missed(main)


def test_sglang_weights_are_updated_from_disk_as_slime_does(server: LiveServer, new: Path, folder: Path):
    def answer() -> dict[str, Any]:
        return server.post("/generate", {"input_ids": [5, 6], "sampling_params": PARAMS}).json()

    def update(path: Path, **more: Any) -> httpx.Response:
        return server.post("/update_weights_from_disk", {"model_path": str(path), **more})

    old = answer()
    server.post("/pause_generation", {})
    with server.http as http:
        assert http.get("/flush_cache").status_code == 200
    updated = update(new, weight_version="step-5")
    assert updated.status_code == 200 and updated.json()["success"] is True
    server.post("/continue_generation", {})
    assert answer()["output_ids"] != old["output_ids"] and answer()["meta_info"]["weight_version"] == "step-5"
    broken = update(folder / "nowhere")
    assert broken.status_code == 400 and broken.json()["success"] is False
    assert update(folder / "old").json()["success"] is True, "a server that runs is held for the update"
    number = str(server.status().version)
    assert answer()["output_ids"] == old["output_ids"] and answer()["meta_info"]["weight_version"] == number


def test_sglang_information_has_the_fields_that_frameworks_read(server: LiveServer):
    with server.http as http:
        for path in ("/model_info", "/get_model_info"):
            assert isinstance(http.get(path).json()["weight_version"], str) and http.get(path).json()["is_generation"]
        for path in ("/server_info", "/get_server_info"):
            assert http.get(path).json()["max_total_num_tokens"] == 2048 * 32
        (load,) = http.get("/v1/loads").json()["loads"]
        assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0
        assert load["num_free_blocks"] == load["num_total_blocks"] == 2048 and load["block_size"] == 32
        assert http.get("/health_generate").status_code == 200


def test_63_a_probe_that_generates_a_token_is_not_a_second_tenant(server: LiveServer):
    assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}).status_code == 200
    with server.http as http:
        assert http.get("/health_generate").status_code == 200
    assert not server.api.ledger.sharing.several


def test_42_loads_report_the_horizon_of_the_prefix_cache(server: LiveServer):
    def age_s() -> float:
        with server.http as http:
            told = http.get("/v1/loads").json()
        assert told["cache_horizon_age_s"] == min(load["cache_horizon_age_s"] for load in told["loads"])
        return told["cache_horizon_age_s"]

    old_s = age_s()
    assert age_s() >= old_s > 0, "it is as old as the engine, or as what it has evicted"
    flushed_s = time.monotonic()
    with server.http as http:
        assert http.get("/flush_cache").status_code == 200
    assert age_s() <= time.monotonic() - flushed_s + 0.001, "a flush brings it to now"


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
    async def main(longer: int) -> None:
        async with connect(server) as client:
            tokens = LONG if mode == "abort" else 600 * longer
            body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(partial(is_running, server, running))
            paused = await client.post("/pause", params={"mode": mode, "clear_cache": "true"})
            assert paused.status_code == 200 and paused.json() == {"status": "paused"}
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            held = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 4}))
            await until(lambda: bool(server.status().waiting))
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            assert (await client.get("/is_paused")).json() == {"is_paused": False}
            assert (await running).json()["choices"][0]["finish_reason"] == reason
            assert (await held).json()["choices"][0]["finish_reason"] == "length"

    unless_missed(main)


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
        assert http.post("/reset_prefix_cache").json() == {"success": True}


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


# --------------------------------------------------------------------------------------------------- weight transfer


def free_place() -> tuple[str, int]:
    return "127.0.0.1", own_port()


def greedy(server: LiveServer) -> list[int]:
    return server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": PARAMS}).json()["output_ids"]


def sent_by_a_trainer(folder: Path, place: tuple[str, int], call: Callable[[], httpx.Response]) -> httpx.Response:
    """Return the answer to `call`, which is made while a trainer sends the weights in `folder`."""
    tensors, where = dict(SafetensorsFolder(folder)), "tcp://{}:{}".format(*place)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send_weights, tensors, where, 2, timeout_s=60)
        answer = call()
        sending.result(60)
    return answer


def test_vllm_weight_transfer_in_the_order_of_trl(server: LiveServer, new: Path, folder: Path):
    """Init, start, update, finish; the server is paused from start to finish and then continues with the new weights."""
    old, place = greedy(server), free_place()
    meeting = {"transport": "headgate", "master_address": place[0], "master_port": place[1], "world_size": 2}
    assert server.post("/init_weight_transfer_engine", {"init_info": meeting | {"rank_offset": 1}}).status_code == 200
    assert server.post("/start_weight_update", None).status_code == 200
    assert server.status().state == "paused"
    names = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}
    told = sent_by_a_trainer(new, place, lambda: server.post("/update_weights", {"update_info": names}))
    version = server.status().version
    assert told.status_code == 200 and told.json()["weight_version"] == str(version)
    done = server.post("/finish_weight_update", {"weight_version": "step 1"})
    assert done.status_code == 200 and done.json()["weight_version"] == "step 1"
    assert server.status().state == "running" and greedy(server) != old
    # Restore the old weights from files.
    server.post("/start_weight_update", None)
    told = server.post("/update_weights", {"update_info": {"path": str(folder / "old"), "version": version + 5}})
    assert told.json()["weight_version"] == str(version + 5)
    server.post("/finish_weight_update", {})
    assert greedy(server) == old


def test_vllm_finish_does_not_resume_a_pause_of_another_caller(server: LiveServer):
    server.post("/pause?mode=keep", None)
    assert server.post("/start_weight_update", None).status_code == 200
    assert server.post("/finish_weight_update", None).json()["error"]["code"] == "no_update"
    assert server.status().state == "paused"


def test_sglang_weights_from_a_trainer_with_our_transport(server: LiveServer, new: Path, folder: Path):
    old, place = greedy(server), free_place()
    meeting = {"master_address": place[0], "master_port": place[1], "rank_offset": 1, "world_size": 2}
    body = meeting | {"group_name": "headgate", "backend": "gloo"}
    assert server.post("/init_weights_update_group", body).json()["success"]
    told = sent_by_a_trainer(
        new, place, lambda: server.post("/update_weights_from_distributed", {"group_name": "headgate"})
    )
    assert told.json()["success"] and server.status().state == "running" and greedy(server) != old
    assert server.post("/destroy_weights_update_group", {"group_name": "headgate"}).json()["success"]
    none = server.post("/update_weights_from_distributed", {"group_name": "headgate"})
    assert none.status_code == 400 and none.json()["error"]["code"] == "no_group"
    assert server.post("/update_weights_from_disk", {"model_path": str(folder / "old")}).json()["success"]
    assert greedy(server) == old


def test_sglang_nccl_on_a_cpu_is_refused_at_once(server: LiveServer):
    refused = server.post("/init_weights_update_group", MEETING | {"group_name": "slime", "backend": "nccl"})
    assert refused.status_code == 400 and "nccl needs a GPU" in refused.json()["message"]


MEETING = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
EXPLODING = base64.b64encode(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.").decode()
NAMED = "the pickle names posix.system, which is not allowed"
UNSUPPORTED = [
    ("/init_weight_transfer_engine", {"init_info": MEETING | {"packed": True}}, "nccl needs a GPU"),
    ("/update_weights", {"update_info": {"names": [], "ipc_handles_pickled": EXPLODING}}, NAMED),
    ("/update_weights", {"update_info": {"names": [], "ipc_handles_pickled": "gASV"}}, "the pickle is malformed"),
    ("/update_weights", {"update_info": {"names": [], "ipc_handles": [1]}}, "send handles as ipc_handles_pickled"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [EXPLODING]}, NAMED),
]


@pytest.mark.parametrize(
    ("path", "body", "why"), UNSUPPORTED, ids=lambda value: value if str(value)[:1] == "/" else ""
)
def test_54_pickled_data_is_refused_by_field_name(server: LiveServer, path: str, body: Any, why: str):
    refused = server.post(path, body)
    told = refused.json()["error"]
    assert refused.status_code == 400 and told["code"] == "unsupported_transfer" and why in told["message"]
    assert server.status().state == "running"
