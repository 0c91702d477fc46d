"""FastDeploy: its control clients send no body, tags in the query, and `req_ids` beside `abort_all`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer
from tests.api.serving import wait_until
from tests.frameworks.conftest import Target, held_request

LONG = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "request_id": "long"}


@pytest.fixture
def held(server: LiveServer, target: Target) -> Iterator[Future[httpx.Response]]:
    with held_request(server, target, "/v1/completions", LONG) as answer:
        yield answer


@pytest.fixture(autouse=True)
def resumed(target: Target) -> Iterator[None]:
    """After each test, resume through the router as well, because it keeps a pause that was made through it."""
    yield
    target.post("/v1/wakeup")
    target.post("/v1/resume")


def succeeded(response: httpx.Response) -> Any:
    """Check the HTTP status and the field `status`, as FastDeploy's clients do, and return the result."""
    assert response.status_code == 200 and response.json()["status"] == "success", response.text
    return response.json()["result"]


def test_a_round_of_calls_without_a_body(target: Target):
    assert not succeeded(target.get("/v1/is_paused"))["is_paused"]
    succeeded(target.post("/v1/pause"))
    assert succeeded(target.get("/v1/is_paused"))["is_paused"]
    refused = target.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert refused.status_code == 503, "not an empty 200"
    succeeded(target.post("/v1/sleep"))
    succeeded(target.post("/v1/wakeup"))
    succeeded(target.post("/v1/resume"))
    assert not succeeded(target.get("/v1/is_paused"))["is_paused"]


@pytest.mark.parametrize(
    ("tags", "asleep"),
    [("weight,kv_cache", ["weights", "kv_cache"]), ("weight", ["weights"]), ("kv_cache", ["kv_cache"])],
)
def test_tags_in_the_query_select_what_sleeps(target: Target, tags: str, asleep: list[str]):
    succeeded(target.post("/v1/pause"))
    assert succeeded(target.post(f"/v1/sleep?tags={tags}"))["asleep"] == asleep
    assert succeeded(target.post(f"/v1/wakeup?tags={tags}"))["asleep"] == []


@pytest.mark.parametrize(
    ("query", "body"), [("tags=lora", None), ("tags=", None), ("tags=weight", {"tags": ["weights"]})]
)
def test_tags_that_are_unknown_or_given_twice_are_refused(target: Target, query: str, body: Any):
    succeeded(target.post("/v1/pause"))
    refused = target.post(f"/v1/sleep?{query}", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("tags")
    assert succeeded(target.get("/v1/is_paused"))["asleep"] == []


def test_a_sleep_needs_a_pause_and_a_wakeup_does_not_resume(target: Target):
    refused = target.post("/v1/sleep")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_paused")
    succeeded(target.post("/v1/pause"))
    succeeded(target.post("/v1/sleep"))
    assert succeeded(target.post("/v1/wakeup"))["is_paused"]


@pytest.mark.parametrize("ids", [["other"], [], None])
def test_1_abort_all_beside_a_list_of_ids_aborts_all(target: Target, held: Future[httpx.Response], ids: Any):
    result = succeeded(target.post("/v1/abort_requests", {"abort_all": True, "req_ids": ids}))
    assert [each["request_id"] for each in result["aborted"]] == ["long"] and result["not_found"] == []
    assert held.result(100).json()["choices"][0]["finish_reason"] == "abort"


def test_1_without_abort_all_only_the_list_counts(target: Target, held: Future[httpx.Response]):
    result = succeeded(target.post("/v1/abort_requests", {"abort_all": False, "req_ids": ["other"]}))
    assert result["not_found"] == ["other"] and result["aborted"] == [] and not held.done()
    refused = target.post("/v1/abort_requests", {"stop_all": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_all")


@pytest.mark.parametrize("clear", [True, False])
def test_a_pause_clears_the_prefix_cache_on_request(server: LiveServer, target: Target, clear: bool):
    target.post("/v1/completions", {"prompt": [7] * 200, "max_tokens": 1}).raise_for_status()
    wait_until(lambda: server.status().cached_blocks > 0)  # the answer may precede the end of its last step
    paused = succeeded(target.post("/v1/pause", {"clear_cache": clear}))
    assert (server.status().cached_blocks == 0) is clear
    assert (paused.get("blocks", 0) > 0) is clear


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"version": "global_step_1200", "path": "/w"}, "version"),
        ({"rsync_config": {"etcd_server": "127.0.0.1:2379"}}, "rsync_config"),
    ],
)
def test_77_an_update_from_a_server_of_checkpoints_is_refused_by_name(target: Target, body: Any, param: str):
    succeeded(target.post("/v1/pause"))
    refused = target.post("/v1/update_weights", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
