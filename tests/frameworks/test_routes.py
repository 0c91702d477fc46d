"""Status and small control calls under the names that trainers and gateways use (guarantee 77)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer
from tests.frameworks.conftest import CONTEXT, Target, held_request
from tests.router.fleets import wait_until

LONG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0}}


@pytest.fixture
def held(server: LiveServer, target: Target) -> Iterator[Future[httpx.Response]]:
    with held_request(server, target, "/generate", LONG | {"rid": "long"}) as answer:
        yield answer


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_slime_discovers_an_external_engine(target: Target, path: str):
    info = target.get(path).json()
    assert (info["tp_size"], info["pp_size"], info["ep_size"], info["dp_size"]) == (1, 1, 1, 1)
    assert info["disaggregation_mode"] not in ("prefill", "decode") and info["enable_memory_saver"] is True
    assert info["context_length"] == CONTEXT and isinstance(info["internal_states"], list)


def test_trl_reads_the_dtype_of_the_server(target: Target):
    config = target.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == CONTEXT
    assert config["parallel_config"]["tensor_parallel_size"] == 1
    assert config["cache_config"]["num_gpu_blocks"] == 512


def test_the_configuration_is_text_unless_json_is_requested_as_in_vllm(target: Target):
    assert "dtype='torch.float32'" in target.get("/server_info").json()["vllm_config"]
    refused = target.get("/server_info", params={"config_format": "yaml"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")


def test_78_the_weight_version_has_four_names_and_can_be_set(target: Target):
    changed = target.post("/update_weight_version", {"new_version": "run-0001"})
    assert changed.status_code == 200 and changed.json()["success"] and changed.json()["new_version"] == "run-0001"
    for path in ("/get_weight_version", "/weight_version", "/weight_info"):
        assert target.get(path).json() == {"weight_version": "run-0001"}
    assert target.get("/model_info").json()["weight_version"] == "run-0001"
    before = target.get("/v1/is_paused").json()["result"]["weight_version"]
    target.post("/update_weight_version", {"new_version": "run-0000"})
    assert target.get("/v1/is_paused").json()["result"]["weight_version"] == before, "the weights are the same"


def test_a_new_label_aborts_requests_only_on_request(target: Target, held: Future[httpx.Response]):
    assert target.post("/update_weight_version", {"new_version": "a"}).status_code == 200
    assert not held.done()
    # miles always sends the field.
    target.post("/update_weight_version", {"new_version": "b", "abort_all_requests": True})
    assert held.result(100).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_liveness_as_prime_rl_probes_it(target: Target):
    assert target.get("/liveness").status_code == 200


def test_get_load_as_routers_of_sglang_and_vllm_read_it(target: Target, held: Future[httpx.Response]):
    (load,) = target.get("/get_load").json()
    assert load["dp_rank"] == 0 and load["num_reqs"] == 1 and load["num_waiting_reqs"] == 0
    assert load["num_tokens"] > 0


@pytest.mark.parametrize("body", [{}, {"request_ids": None}, {"request_ids": ["long"]}])
def test_vllms_abort_of_all_or_named_requests(target: Target, held: Future[httpx.Response], body: dict[str, Any]):
    assert target.post("/abort_requests", body).json() == {"status": "aborted", "aborted": 1}
    assert held.result(100).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("body", "param"), [({"request_ids": []}, "request_ids"), ({"req_ids": ["long"]}, "req_ids"), (None, None)]
)
def test_1_an_empty_list_a_misspelt_field_or_no_body_aborts_nothing(
    target: Target, held: Future[httpx.Response], body: Any, param: str | None
):
    refused = target.post("/abort_requests", body) if body is not None else target.post("/abort_requests", content="")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not held.done()


def test_2_an_unknown_id_is_not_counted_as_aborted(target: Target):
    assert target.post("/abort_requests", {"request_ids": ["unknown"]}).json()["aborted"] == 0


def test_memory_is_released_and_resumed_with_json_bodies(target: Target):
    assert target.post("/release_memory_occupation", {}).json() is None
    assert target.post("/resume_memory_occupation", {"tags": ["weights"]}).json() is None
    assert target.get("/is_sleeping").json()["is_sleeping"]
    assert target.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).json() is None
    assert target.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("query", "asleep"),
    [
        ("", ["weights", "kv_cache"]),
        ("?level=1", ["weights", "kv_cache"]),
        ("?level=2", ["weights", "kv_cache"]),
        ("?level=0", []),
        ("?level=1&tags=kv_cache", ["kv_cache"]),
        ("?level=2&tags=weights&tags=kv_cache", ["weights", "kv_cache"]),
    ],
)
def test_vllms_sleep_honours_level_and_tags(target: Target, query: str, asleep: list[str]):
    assert target.post(f"/sleep{query}").status_code == 200
    state = target.get("/v1/is_paused").json()["result"]
    assert state["is_paused"] and state["asleep"] == asleep
    assert target.post("/wake_up").status_code == 200
    assert target.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(("query", "param"), [("level=3", "level"), ("level=x", "level"), ("tags=lora", "tags[0]")])
def test_an_unknown_level_or_tag_is_refused_and_nothing_sleeps(target: Target, query: str, param: str):
    refused = target.post(f"/sleep?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert target.get("/is_paused").json() == {"is_paused": False}


def test_a_port_may_be_text_as_areal_sends_it(target: Target):
    group = {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 2}
    ours = target.post("/init_weights_update_group", group | {"group_name": "headgate", "backend": "gloo"})
    assert ours.status_code == 200, ours.text
    theirs = target.post("/init_weight_transfer_engine", {"init_info": group | {"transport": "headgate"}})
    assert theirs.status_code == 200, theirs.text
    for wrong in ("", "http", "0", "65536", "-1"):
        refused = target.post("/init_weights_update_group", group | {"group_name": "headgate", "master_port": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "master_port")


def test_prime_rl_updates_weights_from_a_folder(target: Target, old: Path, new: Path):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "temperature": 0}, "cache_salt": "1"}
    tokens = []
    for path in (new, old, new):
        assert target.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert target.post("/update_weights", {"weight_dir": path.as_posix()}).status_code == 200
        assert target.post("/resume").json() == {"status": "resumed"}
        tokens.append(target.post("/inference/v1/generate", body).json()["choices"][0]["token_ids"])
    assert tokens[0] == tokens[2] != tokens[1]


def test_a_version_of_prime_rl_that_does_not_pause_first(target: Target, server: LiveServer, new: Path):
    before = target.get("/v1/is_paused").json()["result"]["weight_version"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(target.post, "/generate", LONG)
        wait_until(lambda: server.status().running == 1 or answer.done())
        assert target.post("/update_weights", {"weight_dir": new.as_posix()}).status_code == 200
        state = target.get("/v1/is_paused").json()["result"]
        assert (state["state"], state["weight_version"]) == ("running", before + 1)
        assert answer.result(100).json()["meta_info"]["completion_tokens"] == 4000, "the request goes on"


@pytest.mark.parametrize("body", [{}, {"weight_dir": None}, {"weight_dir": "a", "update_info": {}}])
def test_an_update_from_nowhere_is_refused_by_name(target: Target, body: dict[str, Any]):
    refused = target.post("/update_weights", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "update_info")
    assert "weight_dir" in refused.json()["error"]["message"]


def test_a_folder_without_weights_changes_nothing(target: Target, tmp_path: Path):
    before = target.get("/v1/is_paused").json()["result"]["weight_version"]
    assert target.post("/update_weights", {"weight_dir": tmp_path.as_posix()}).status_code >= 400
    state = target.get("/v1/is_paused").json()["result"]
    assert (state["state"], state["weight_version"]) == ("running", before)
