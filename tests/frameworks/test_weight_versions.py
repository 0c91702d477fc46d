"""Weight versions as slime, miles and vLLM's trainers use them: a text that may repeat after a restart of the trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate.client import Fleet
from tests.api.live import LiveServer, live_server
from tests.frameworks.conftest import Target
from tests.router.fleets import live_router, wait_until

PARAMS = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def update(target: Target, path: Path, version: str) -> dict[str, Any]:
    """slime's update from disk."""
    target.post("/pause_generation", {})
    target.get("/flush_cache")
    answer = target.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": version})
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    target.post("/continue_generation", {})
    return target.post("/generate", {"input_ids": [5, 6], "sampling_params": PARAMS}).json()["meta_info"]


def test_78_a_trainer_that_restarts_counts_its_versions_from_1_again(target: Target, old: Path, new: Path):
    numbers = []
    for path, version in ((new, "3"), (old, "1"), (new, "1"), (old, "checkpoint/final")):
        meta = update(target, path, version)
        assert meta["weight_version"] == target.get("/model_info").json()["weight_version"] == version
        assert "weight_versions" not in meta, "all tokens are of one version"
        numbers.append(target.get("/v1/is_paused").json()["result"]["weight_version"])
    assert numbers == sorted(set(numbers)), "the number that keys and order use only rises"


def test_27_78_a_mixed_answer_has_the_version_of_every_token(server: LiveServer, target: Target, new: Path):
    for _ in range(5):
        meta = updated_while_running(server, target, new)
        if "weight_versions" in meta:  # otherwise it had ended before the pause
            break
    spans = meta["weight_versions"]
    assert meta["weight_version"] == "1" and [span["weight_version"] for span in spans] == ["2", "1"]
    assert sum(span["tokens"] for span in spans) == meta["completion_tokens"] == 3000


def updated_while_running(server: LiveServer, target: Target, new: Path) -> dict[str, Any]:
    """The metadata of a long answer, begun with version 2, during which version 1 is loaded."""
    update(target, new, "2")
    with ThreadPoolExecutor(1) as threads:
        body = {"input_ids": [7], "sampling_params": PARAMS | {"max_new_tokens": 3000}}
        running = threads.submit(target.post, "/generate", body)
        wait_until(lambda: running.done() or (server.status().running == 1 and server.status().output_tokens > 0))
        target.post("/pause_generation", {"mode": "in_place"})
        target.post("/update_weights_from_disk", {"model_path": str(new), "weight_version": "1"})
        target.post("/continue_generation", {})
        meta: dict[str, Any] = running.result(100).json()["meta_info"]
        return meta


def test_78_our_own_api_reports_number_and_label(target: Target, old: Path):
    fleet = Fleet(target.url)
    before = fleet.pause().weight_version
    state = fleet.update_weights(str(old), label="epoch 7")
    assert (state.weight_version, state.weight_label) == (before + 1, "epoch 7")
    fleet.resume()
    answer = target.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "return_weight_versions": True}).json()
    assert answer["choices"][0]["weight_versions"] == [{"version": before + 1, "tokens": 2, "label": "epoch 7"}]


def test_78_a_label_of_absurd_length_is_refused(server: LiveServer, old: Path):
    refused = server.post("/update_weights_from_disk", {"model_path": str(old), "weight_version": "x" * 1001})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "weight_version"


@pytest.fixture(scope="module")
def second(old: Path) -> Any:
    with live_server(old, device="cpu", kv_blocks=256, max_running=4) as server:
        yield server


def test_78_a_router_gives_all_workers_the_same_number(server: LiveServer, second: LiveServer, new: Path):
    for _ in range(2):  # now they differ
        assert server.post("/update_weights_from_disk", {"model_path": str(new)}).json()["success"]
    assert second.status().version < server.status().version
    with live_router(server.url, second.url) as router:
        wait_until(lambda: all(worker.version is not None for worker in router.router.fleet))
        answer = router.post("/update_weights_from_disk", {"model_path": str(new), "weight_version": "1"})
        assert answer.status_code == 200, answer.text
        assert second.status().version == server.status().version
        assert router.get("/model_info").json()["weight_version"] == "1"
