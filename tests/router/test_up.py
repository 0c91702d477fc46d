"""`headgate up`: a fleet in one command that replaces failed servers and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

import headgate.cli.up
from headgate import cli
from headgate.cli.up import served
from headgate.config import RouteConfig
from headgate.testing.tiny import tiny_model
from tests.api import serving
from tests.api.serving import Served, wait_until
from tests.api.test_cli import run, the_sentence

SMALL = ("--kv-blocks", 64, "--max-context", 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("up") / "tiny")


def up(*arguments: object, **environment: str) -> AbstractContextManager[Served]:
    return serving.up(*SMALL, *arguments, hurry=True, **environment)


def workers(http: httpx.Client) -> list[dict[str, Any]]:
    """Return the workers; those that answer come first."""
    return sorted(http.get("/v1/workers").json()["workers"], key=lambda worker: worker["role"])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


@pytest.mark.timeout(300)
def test_a_fleet_replaces_failed_servers_and_shuts_down_cleanly(model: Path):
    with up("--model", model, "--prefill", 1, "--decode", 1) as fleet, fleet.client() as http:
        told = workers(http)
        assert [(each["role"], each["state"]) for each in told] == [("decode", "ready"), ("prefill", "ready")]
        assert {each["pid"] for each in told} <= set(descendants(fleet.process.pid))
        body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        victim = told[0]
        os.kill(victim["pid"], signal.SIGKILL)
        # The other server answers meanwhile, and the failed one comes back at its address.
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        wait_until(lambda: workers(http)[0]["pid"] != victim["pid"], 90)
        wait_until(lambda: workers(http)[0]["state"] == "ready", 60)
        assert workers(http)[0]["url"] == victim["url"] and workers(http)[0]["role"] == "decode"
        everyone = descendants(fleet.process.pid)
        assert len(everyone) >= 4  # two servers and their engines
        assert fleet.stop(signal.SIGINT) == 0
        wait_until(lambda: not any(map(is_running, everyone)))
    assert not any("Traceback" in message for message in fleet.messages())
    assert any("has exited; restarting it" in message for message in fleet.messages())


def test_servers_end_when_their_parent_is_killed(model: Path):
    with up(model, "--mixed", 1, HEADGATE_ADMIN_KEY="root") as fleet:
        everyone = descendants(fleet.process.pid)
        with fleet.client("root") as http:
            (worker,) = workers(http)
        # Its servers accept only the router's key if it has keys.
        assert httpx.post(worker["url"] + "/v1/pause", timeout=60, trust_env=False).status_code == 401
        fleet.process.kill()
        wait_until(lambda: not any(map(is_running, everyone)))


def test_a_port_in_use_is_reported_in_one_sentence(model: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("up", model, "--port", other.getsockname()[1])
    assert result.returncode == 1 and "is taken" in the_sentence(result)


def test_the_error_of_a_server_that_cannot_start_is_reported_in_one_sentence(model: Path, tmp_path: Path):
    result = run("up", tmp_path, "--port", 0)
    assert result.returncode == 1 and "holds no model" in the_sentence(result)
    result = run("up", model, "--mixed", 2, "--port", 0, "--kv-blocks", 1, "--max-context", 512)
    assert result.returncode == 1 and "512 tokens" in the_sentence(result)


def test_flags_about_preempted_answers_reach_the_router_and_its_servers(monkeypatch: pytest.MonkeyPatch):
    made: list[RouteConfig] = []

    async def run(config: RouteConfig, *_: object) -> None:
        made.append(config)

    monkeypatch.setattr(headgate.cli.up, "run", run)
    monkeypatch.setattr(headgate.cli.up, "prepare", lambda *_: ("model", None))
    flags = ["--disaggregate-tokens", "64", "--preempt-retry-count", "1", "--no-preempt-retry-exclude-decode"]
    on_preempt = []
    for more in ([], [*flags, "--on-preempt", "reschedule"]):
        options = cli.parser().parse_args(["up", "--prefill", "1", "--decode", "1", "--port", "0", *more])
        assert options.run(options, {}) == 0
        arguments = served(options)
        on_preempt.append(arguments[arguments.index("--on-preempt") + 1])
    assert on_preempt == ["recompute", "reschedule"]  # by default, an answer never depends on another server's room
    assert [(c.disaggregate_tokens, c.preempt_retry_count, c.preempt_retry_exclude_decode) for c in made] == [
        (256, 3, True),
        (64, 1, False),
    ]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_servers_log_that_they_are_ready_at_every_level_of_the_fleet(level: str):
    options = cli.parser().parse_args(["up", "--log-level", level])
    arguments = served(options)
    assert arguments[arguments.index("--log-level") + 1].lower() == ("debug" if level == "debug" else "info")


@pytest.mark.parametrize(
    ("flags", "about"),
    [
        (("--prefill", 1), "--prefill requires at least one --decode or --mixed server"),
        (("--mixed", -1), "--mixed"),
        (("--port", 99999), "--port"),
        (("--model", "another"), "--model"),
    ],
)
def test_an_invalid_fleet_is_reported_in_one_sentence(model: Path, flags: tuple, about: str):
    result = run("up", model, *flags)
    assert result.returncode == 2 and about in the_sentence(result)
