"""slime: registers its engines at SGLang's router, samples through it, and updates the weights of every engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer
from tests.frameworks.conftest import CONTEXT, Target
from tests.router.fleets import LiveRouter, live_router

SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 4,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@pytest.fixture
def empty() -> Iterator[LiveRouter]:
    with live_router() as router:
        yield router


def test_an_engine_is_registered_used_and_removed_by_its_id(empty: LiveRouter, server: LiveServer):
    added = empty.post("/workers", {"url": server.url, "worker_type": "regular"})
    added.raise_for_status()
    empty.wait_for(ready=1)
    body = {"input_ids": [1, 2], "sampling_params": SAMPLING, "return_logprob": True}
    assert len(empty.post("/generate", body).json()["output_ids"]) == 4
    listed = empty.get("/workers").json()
    (worker,) = listed["workers"]
    assert worker["url"] == server.url and worker["is_healthy"] and worker["worker_type"] == "regular"
    assert listed["total"] == 1 and listed["stats"]["healthy_workers"] == 1
    assert listed["stats"]["by_type"] == {"regular": 1, "prefill": 0, "decode": 0}
    assert empty.get(f"/workers/{worker['id']}").json()["id"] == worker["id"] == added.json()["worker_id"]
    assert empty.delete(f"/workers/{worker['id']}").status_code == 200
    assert empty.get("/workers").json()["workers"] == []


def test_older_versions_name_the_address_instead_of_an_id(empty: LiveRouter, server: LiveServer):
    empty.post("/workers", {"url": server.url}).raise_for_status()
    empty.delete(f"/workers/{quote(server.url, safe='')}").raise_for_status()
    empty.post(f"/add_worker?url={server.url}").raise_for_status()
    assert empty.get("/list_workers").json() == {"urls": [server.url]}
    empty.post(f"/remove_worker?url={server.url}").raise_for_status()
    assert empty.get("/list_workers").json() == {"urls": []}


def test_prefill_and_decode_engines_keep_their_roles(empty: LiveRouter):
    prefill = {"url": "http://127.0.0.1:9", "worker_type": "prefill", "bootstrap_port": 8998, "api_key": "secret"}
    empty.post("/workers", prefill).raise_for_status()
    empty.post("/workers", {"url": "http://127.0.0.1:10", "worker_type": "decode"}).raise_for_status()
    assert [worker["worker_type"] for worker in empty.get("/workers").json()["workers"]] == ["prefill", "decode"]
    assert {each["role"] for each in empty.get("/v1/workers").json()["workers"]} == {"prefill", "decode"}
    assert [worker.key for worker in empty.router.fleet] == ["secret", None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "nonsense"}, "url"),
        ({"url": "http://h:1", "worker_type": "encode"}, "worker_type"),
        ({"url": "http://h:1", "priority": 90}, "priority"),
        ({"url": "http://h:1", "cost": 0.5}, "cost"),
        ({"url": "http://h:1", "dp_aware": True}, "dp_aware"),
        ({"url": "http://h:1", "colour": "red"}, "colour"),
    ],
)
def test_77_what_would_change_placement_is_refused_by_name(empty: LiveRouter, body: dict[str, Any], param: str):
    refused = empty.post("/workers", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert empty.get("/workers").json()["total"] == 0


def test_an_unknown_worker_is_not_found(empty: LiveRouter):
    for method in (empty.get, empty.delete):
        missing = method("/workers/9e107d9d-372b-4e1e-8e6c-111111111111")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_worker"), missing.text


def test_weights_from_disk_between_two_rollouts(target: Target, old: Path, new: Path):
    """slime's order with files: wait for idle, pause, flush, update, continue, and its check in CI."""
    for version, path in (("1", new), ("2", old)):
        target.post("/abort_request", {"abort_all": True}).raise_for_status()
        loads = target.get("/v1/loads?include=core").json()["loads"]
        assert sum(load["num_total_reqs"] for load in loads) == 0
        target.post("/pause_generation", {}).raise_for_status()
        target.get("/flush_cache").raise_for_status()
        update = target.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": version})
        assert update.json()["success"]
        target.post("/continue_generation", {}).raise_for_status()
        assert target.get("/get_weight_version").json()["weight_version"] == version
        answer = target.post("/generate", {"input_ids": [1], "sampling_params": SAMPLING}).json()
        assert answer["meta_info"]["weight_version"] == version


def test_colocated_training_releases_and_resumes_memory(target: Target):
    """slime decodes every answer as JSON."""
    target.get("/flush_cache").raise_for_status()
    for path, body in (
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
    ):
        answer = target.post(path, body)
        answer.raise_for_status()
        answer.json()
    assert target.post("/generate", {"input_ids": [1], "sampling_params": SAMPLING}).status_code == 200


def test_colocated_training_updates_weights_while_memory_is_released(target: Target, new: Path):
    """slime with `--colocate`: generation continues before the KV cache is back, and rollouts wait for it.

    The second round wakes weights that came from files which are gone, as weights from a trainer are.
    """
    answers = []
    for seed in (1, 2):
        with tempfile.TemporaryDirectory() as parent:
            weights = tiny_model(Path(parent, "weights"), seed=seed, max_position_embeddings=CONTEXT)
            target.post("/release_memory_occupation", {}).raise_for_status()
            target.post("/resume_memory_occupation", {"tags": ["weights"]}).raise_for_status()
            target.post("/pause_generation", {}).raise_for_status()
            target.get("/flush_cache").raise_for_status()
            assert target.post("/update_weights_from_disk", {"model_path": str(weights)}).json()["success"]
            target.post("/continue_generation", {}).raise_for_status()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(target.post, "/generate", {"input_ids": [1], "sampling_params": SAMPLING})
            target.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}).raise_for_status()
            answers.append(waiting.result(60).json()["output_ids"])
    assert answers[0] != answers[1]
    target.post("/update_weights_from_disk", {"model_path": str(new)}).raise_for_status()


def test_memory_is_not_resumed_with_weights_that_nothing_can_bring_back(target: Target, old: Path):
    """Without tags no update is to follow, so the caller must know that the weights are lost."""
    with tempfile.TemporaryDirectory() as parent:
        weights = tiny_model(Path(parent, "weights"), seed=3, max_position_embeddings=CONTEXT)
        target.post("/update_weights_from_disk", {"model_path": str(weights)}).raise_for_status()
    target.post("/release_memory_occupation", {}).raise_for_status()
    refused = target.post("/resume_memory_occupation", {})
    assert refused.status_code >= 500 and "send the weights with an update" in refused.text, refused.text
    target.post("/update_weights_from_disk", {"model_path": str(old)}).raise_for_status()
    target.post("/resume_memory_occupation", {}).raise_for_status()
    assert target.post("/generate", {"input_ids": [1], "sampling_params": SAMPLING}).status_code == 200
