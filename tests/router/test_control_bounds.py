"""Control calls to a fleet in which one worker answers probes and nothing else (guarantee 61)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headgate.router.control.fan_out import IS_DOWN
from headgate.router.router import Router
from tests.fuzzing.test_control_answers import Speaker, call, with_pair
from tests.router.client import until

AT_MOST_S = 8.0  # for a call with a timeout of half a second, with a margin for a busy machine
TIMED = [
    ("/v1/abort_requests", {"req_ids": ["one"]}),
    ("/v1/abort_requests", {"abort_all": True}),
    ("/v1/pause", {"mode": "abort"}),
    ("/v1/pause", {"mode": "drain"}),
    ("/v1/resume", {}),
    ("/v1/flush_cache", {}),
    ("/v1/update_weights", {"path": "/nowhere"}),
    ("/v1/update_weights", {"group": {"init_method": "tcp://x:1", "world_size": 3}}),
    ("/v1/sleep", {}),
    ("/v1/wakeup", {}),
]
UNTIMED = [
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/one"),
    ("GET", "/v1/is_paused"),
    ("GET", "/is_paused"),
    ("GET", "/is_sleeping"),
    ("GET", "/get_world_size"),
    ("GET", "/model_info"),
]


@pytest.mark.parametrize(("path", "body"), TIMED)
def test_61_a_call_is_answered_in_time_and_names_the_worker_that_is_silent(path: str, body: dict[str, Any]):
    async def main(silent: Speaker, honest: Speaker, router: Router, url: str) -> None:
        silent.hangs = True
        began_s = time.monotonic()
        answer = await call(url, "POST", path, body | {"timeout": 0.5})
        assert time.monotonic() - began_s < AT_MOST_S
        workers = answer.json.get("result", {}).get("workers", {})
        assert workers.get(silent.url, {}).get("error") or silent.url in answer.error["message"]
        silent.hangs = False

    with_pair(main, probe_interval_s=60.0)


@pytest.mark.parametrize(("method", "path"), UNTIMED)
def test_61_a_call_without_a_timeout_has_one(method: str, path: str):
    async def main(silent: Speaker, honest: Speaker, router: Router, url: str) -> None:
        silent.hangs = True
        began_s = time.monotonic()
        answer = await call(url, method, path, None)
        assert time.monotonic() - began_s < AT_MOST_S and answer.status == 200
        silent.hangs = False

    with_pair(main, probe_interval_s=60.0, control_timeout_s=0.5, probe_timeout_s=0.5)


def test_61_a_pause_that_a_worker_has_not_answered_is_reported_as_pending():
    async def main(silent: Speaker, honest: Speaker, router: Router, url: str) -> None:
        silent.hangs = True
        result = (await call(url, "POST", "/v1/pause", {"timeout": 0.5})).json["result"]
        assert (result["state"], result["is_paused"]) == ("pausing", False)
        assert result["workers"][silent.url]["state"] == "pausing"
        assert result["workers"][honest.url]["state"] == "paused"
        look = (await call(url, "GET", "/v1/is_paused", None)).json["result"]
        assert (look["state"], look["is_paused"]) == ("pausing", False) and router.holding
        silent.hangs = False
        await call(url, "POST", "/v1/resume", {})

    with_pair(main, probe_interval_s=60.0, control_timeout_s=0.5)


def test_29_a_worker_that_went_down_before_it_paused_is_named_as_long_as_it_is_down():
    async def main(silent: Speaker, honest: Speaker, router: Router, url: str) -> None:
        silent.hangs = True
        assert (await call(url, "POST", "/v1/pause", {"timeout": 0.5})).status == 502
        router.fleet.give_up(router.fleet.find(silent.url))
        look = (await call(url, "GET", "/v1/is_paused", None)).json["result"]
        assert (look["state"], look["is_paused"]) == ("paused", True) and router.holding
        assert look["workers"][silent.url] == {"state": "down", "error": IS_DOWN, "code": "unreachable"}
        silent.hangs = False

    with_pair(main, probe_interval_s=60.0)


def test_61_a_pause_does_not_wait_longer_for_a_resume_than_its_timeout():
    async def main(silent: Speaker, honest: Speaker, router: Router, url: str) -> None:
        silent.hangs = True
        async with asyncio.TaskGroup() as tasks:
            resuming = tasks.create_task(call(url, "POST", "/v1/resume", {"timeout": 3}))
            await until(lambda: honest.opened > 2)
            began_s = time.monotonic()
            refused = await call(url, "POST", "/v1/pause", {"timeout": 0.2})
            assert refused.status == 409 and refused.error["code"] == "resuming" and not resuming.done()
            assert time.monotonic() - began_s < AT_MOST_S
        silent.hangs = False

    with_pair(main, probe_interval_s=60.0)
