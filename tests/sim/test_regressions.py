"""What the simulation has found, each as the smallest plan that shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.sim.caller import Manners
from headgate.testing.sim.engine import Pace
from headgate.testing.sim.hosts import MODEL, ServerSettings
from headgate.testing.sim.network import Weather
from headgate.testing.sim.script import ROUTER, Ask, Deed, Plan
from headgate.testing.sim.world import Report, World

PLAN = Plan(
    servers=2,
    settings=ServerSettings(),
    pace=Pace(step_s=0.02),
    weather=Weather(),
    policy="round_robin",
    asks=[],
    deeds=[],
)


@pytest.fixture
def carry_out(tmp_path: Path):
    def carry_out(asks: list[Ask], *deeds: Deed, **plan: Any) -> tuple[Report, World]:
        world = World(0, replace(PLAN, asks=asks, deeds=list(deeds), **plan), chatty=False, folder=tmp_path)
        return world.run(), world

    return carry_out


def ask(name: str, at_s: float = 0.0, to: str = ROUTER, **body: Any) -> Ask:
    """Sixty tokens, which take more than a second."""
    prompt = (3, 4, 5, *name.encode())
    asked = {"model": MODEL, "prompt": list(prompt), "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True}
    asked |= {"return_token_ids": True, "return_weight_versions": True, "tags": {"run": "a"}, **body}
    headers = {"x-request-id": name}
    path = "/v1/completions"
    return Ask(name=name, at_s=at_s, to=to, path=path, body=asked, prompt=prompt, manners=Manners(), headers=headers)


def deed(at_s: float, what: str, who: str = "server0", lasts_s: float = 1.0, **more: Any) -> Deed:
    return Deed(at_s=at_s, what=what, who=who, lasts_s=lasts_s, more=more)


def test_44_a_worker_that_shuts_down_in_a_pause_gets_requests_again_when_it_is_back(carry_out):
    """It answers the pause as *draining*, which the router took for its own draining, and never ended."""
    pause = deed(0.3, "pause", mode="drain", new_requests="reject", timeout=5.0)
    report, world = carry_out([ask("a"), ask("b")], pause, deed(0.4, "shutdown"))
    assert not report.failures
    assert {worker.state for worker in world.router.router.fleet} == {"ready"}


def test_a_second_signal_after_the_deadline_of_a_shutdown_changes_nothing(carry_out):
    """The first one's deadline had passed, and moving it raised an error in the signal handler."""
    stuck = deed(0.3, "stop_engine", lasts_s=4.0, which=0.0)
    report, _ = carry_out([ask("a", to="server0")], stuck, deed(0.5, "shutdown"), deed(1.5, "shutdown"), **HASTY)
    assert not report.failures
    assert report.deeds["shutdown"] == 2


def test_22_a_control_call_that_a_shutdown_breaks_off_is_no_bug(carry_out):
    """The handler was cancelled under the HTTP server, which logged it as an exception of ours."""
    stuck = deed(0.3, "stop_engine", lasts_s=20.0, which=0.0)
    pause = deed(0.4, "pause_one", mode="drain", timeout=60.0)
    report, _ = carry_out([], stuck, pause, deed(0.5, "shutdown"), **HASTY)
    assert not report.failures


def test_5_a_stream_that_is_aborted_in_the_routers_queue_ends_with_its_usage(carry_out):
    """The router's own last words had no usage, although the client had asked for it."""
    waiting = ask("waiting", 0.1, stream_options={"include_usage": True})
    report, _ = carry_out([ask("first"), waiting], deed(0.5, "abort", req_ids=["waiting"]), max_in_flight=1)
    assert not report.failures
    assert waiting.reply.events()[-2]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


HASTY: dict[str, Any] = {"settings": ServerSettings(drain_s=0.2)}
