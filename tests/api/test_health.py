"""A busy engine is healthy, a wedged one is not (guarantee 50). `test_server` tests this with real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.api.accounting.metrics import EngineView
from headgate.api.compat import sglang
from headgate.api.control.health import judge, judge_readiness, overall
from headgate.contract.status import Readiness
from headgate.protocol.message import EngineInfo, EngineStatus, Pong

INFO = EngineInfo(512, 260, (0,), 64, 32, 8, "cpu", "torch", "float32")


def view(quiet_s: float, *, busy: bool) -> EngineView:
    return EngineView(0, 0, INFO, Pong(1, quiet_s, EngineStatus(0.0, busy)))


@pytest.mark.parametrize(
    ("engine", "state"),
    [
        (view(0.5, busy=False), "ok"),
        (view(0.5, busy=True), "ok"),
        (view(60, busy=True), "busy"),  # a long prefill
        (view(60, busy=False), "wedged"),  # the loop hangs without a step on the device
        (view(3600, busy=True), "wedged"),  # longer than any step
        (EngineView(0, 0, INFO, None), "wedged"),  # does not answer
        (EngineView(0, 1, None, None), "down"),  # restarting
        (replace(view(0.5, busy=False), outdated=True), "outdated"),
        (replace(view(60, busy=False), outdated=True), "wedged"),
    ],
)
def test_the_health_of_an_engine_follows_from_its_pong(engine, state):
    assert judge(engine).state == state


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ({"ok"}, "ok"),
        ({"ok", "busy"}, "ok"),
        ({"busy"}, "ok"),
        ({"ok", "down"}, "degraded"),
        ({"ok", "outdated"}, "degraded"),
        ({"outdated"}, "unhealthy"),
        ({"down"}, "unhealthy"),
        ({"ok", "wedged"}, "unhealthy"),
    ],
)
def test_a_server_is_as_healthy_as_its_engines(states, status):
    assert overall(states) == status


def test_50_55_a_server_with_only_outdated_engines_is_not_ready():
    good, old = view(0.5, busy=False), replace(view(0.5, busy=False), outdated=True)
    assert judge_readiness([old]) == Readiness(False, "outdated")
    assert judge_readiness([good, old]) == Readiness(True)
    assert judge_readiness([EngineView(0, 1, None, None)]) == Readiness(False, "no engine is ready")


@pytest.mark.parametrize(("outdated", "state"), [(True, "outdated"), (False, "running")])
def test_55_the_load_of_an_outdated_engine_reports_it_as_outdated(outdated, state):
    load = sglang.load_of(replace(view(0.5, busy=False), outdated=outdated))
    assert load is not None and load["state"] == state
