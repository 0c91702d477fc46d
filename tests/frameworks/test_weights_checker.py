"""`/weights_checker` as slime and miles call it around an update."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer, live_server
from tests.frameworks.conftest import Target
from tests.router.fleets import LiveRouter, live_router


def check(target: Any, action: str, **more: Any) -> httpx.Response:
    # miles always sends these two.
    body = {"action": action, "allow_quant_error": False, "selector": "all"} | more
    answer: httpx.Response = target.post("/weights_checker", body)
    return answer


def update(target: Target, path: Path) -> None:
    assert target.post("/update_weights_from_disk", {"model_path": str(path)}).json()["success"]


def test_an_update_is_compared_with_a_snapshot(target: Target, old: Path, new: Path):
    update(target, old)
    assert check(target, "snapshot").json() == {"success": True, "message": "Success."}
    assert check(target, "compare").json()["success"]
    update(target, new)
    differs = check(target, "compare")
    assert differs.status_code == 400 and differs.json()["success"] is False
    assert "tensors differ" in differs.json()["message"] and "model.embed_tokens.weight" in differs.json()["message"]
    update(target, old)
    assert check(target, "compare").json()["success"]


def test_checksums_name_the_tensors_and_change_with_the_weights(target: Target, old: Path, new: Path):
    answers = []
    for path in (old, new, old):
        update(target, path)
        answers.append(check(target, "checksum").json())
    first, second, third = answers
    (rank,) = first["ranks"]
    assert "model.embed_tokens.weight" in rank["checksums"] and rank["parallelism_info"]["tp_size"] == 1
    assert first == third and first["per_engine_checksum"] != second["per_engine_checksum"]
    assert target.post("/weights_checker", {}).json() == third, "the default is a checksum"


def test_tensors_can_be_left_out(target: Target, old: Path, new: Path):
    update(target, old)
    check(target, "snapshot")
    update(target, new)
    assert check(target, "compare", skip_tensor_list=["model.", "lm_head"]).json()["success"]
    (rank,) = check(target, "checksum", skip_tensor_list=["embed"]).json()["ranks"]
    assert rank["checksums"] and not any("embed" in name for name in rank["checksums"])


def test_weights_that_sleep_and_wake_are_the_same(target: Target, old: Path):
    update(target, old)
    before = check(target, "checksum").json()
    target.post("/sleep")
    asleep = check(target, "checksum")
    assert (asleep.status_code, asleep.json()["error"]["code"]) == (409, "asleep")
    target.post("/wake_up")
    assert check(target, "checksum").json() == before


def test_an_update_after_a_reset_brings_back_every_tensor(target: Target, old: Path, new: Path):
    """slime with `--check-weight-update-equal`: requests of the meantime wait, and are answered by the new weights."""
    update(target, new)
    asked = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    expected = target.post("/generate", asked).json()["output_ids"]
    check(target, "snapshot")
    assert check(target, "reset_tensors", skip_tensor_list=["position_ids"]).json()["success"]
    assert check(target, "compare").json()["error"]["code"] == "asleep", "the old tensors are not served"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(target.post, "/generate", asked)
        assert target.post("/continue_generation", {}).status_code == 200  # nothing has arrived, so nothing resumes
        target.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        update(target, new)
        assert check(target, "compare").json()["success"]
        target.post("/continue_generation", {}).raise_for_status()
        assert waiting.result(60).json()["output_ids"] == expected
    update(target, old)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"action": "repair"}, "action"),
        ({"action": "compare", "allow_quant_error": True}, "allow_quant_error"),
    ],
)
def test_77_an_action_that_is_not_supported_is_refused_by_name(target: Target, body: dict[str, Any], param: str):
    before = check(target, "checksum").json()
    refused = target.post("/weights_checker", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    assert check(target, "checksum").json() == before


@pytest.fixture(scope="module")
def two(server: LiveServer, new: Path) -> Iterator[LiveRouter]:
    """A router in front of two servers with different weights."""
    with (
        live_server(new, device="cpu", kv_blocks=64, max_running=2) as other,
        live_router(server.url, other.url) as both,
    ):
        yield both


def test_a_router_reports_the_checksums_of_every_worker(two: LiveRouter, server: LiveServer, old: Path):
    update(Target(server.url), old)
    ranks = check(two, "checksum").json()["ranks"]
    assert len(ranks) == 2 and ranks[0]["per_gpu_checksum"] != ranks[1]["per_gpu_checksum"]


def test_a_comparison_without_a_snapshot_is_refused(two: LiveRouter):
    other = Target(list(two.router.fleet)[1].url)
    refused = check(other, "compare")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_snapshot")
