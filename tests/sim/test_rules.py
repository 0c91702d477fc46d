"""Rules that random plans rarely test: aborts, pauses and updates also apply to processes that restart later.

The last tests break the product and show that the judge notices.
"""

from __future__ import annotations

import pytest

from headgate.api.control import lifecycle
from headgate.router.control import lifecycle as fleet_lifecycle
from headgate.router.exchange.retry_state import RetryState
from headgate.testing.sim.engine import EngineProfile
from headgate.testing.sim.hosts import ServerSettings
from headgate.testing.sim.judge import read
from tests.sim.plans import action, request

TWO = {"settings": ServerSettings(engines=2)}


def test_7_an_aborted_request_does_not_continue_on_another_engine(run_plan):
    """The engine hangs when the abort is sent, and dies before it receives the abort."""
    stall = action(0.4, "stall_engine", which=0.0, duration_s=2.0)
    abort = action(0.5, "abort", req_ids=["a"], wait=True)
    report, _ = run_plan([request("a", to="server0")], stall, abort, action(0.6, "kill_engine", which=0.0), **TWO)
    assert not report.failures
    assert report.counts["tokens"] < 30 and "max_tokens" not in report.ends


@pytest.mark.parametrize("whole", [False, True], ids=["an engine", "a server"])
def test_29_a_process_that_restarts_in_a_paused_fleet_is_paused(run_plan, whole):
    killed = action(0.3, "pause_and_kill", duration_s=3.0, mode="freeze", whole=whole, which=0.0)
    report, _ = run_plan([request("a", to="server0")] if not whole else [], killed)
    assert not report.failures


def test_55_an_engine_that_restarts_with_other_weights_gets_no_streams(run_plan):
    late = [request(f"late-{i}", 2.0 + i / 20, to="server0", max_tokens=2) for i in range(12)]
    report, _ = run_plan(late, action(0.2, "update", mode="abort"), action(1.5, "return_old", which=0.0), **TWO)
    assert not report.failures
    assert {version for each in late for version in read(each).choices[0].versions} == {1}


def test_55_a_worker_that_restarts_with_other_weights_gets_no_requests(run_plan):
    late = [request(f"late-{i}", 1.5 + i / 20, max_tokens=2) for i in range(30)]
    gone = action(1.0, "kill_server", duration_s=0.5)
    report, _ = run_plan(late, action(0.2, "update", mode="abort"), gone)
    assert not report.failures
    assert {version for each in late for version in read(each).choices[0].versions} == {1}


def test_72_a_pause_that_counts_choices_is_noticed(run_plan, monkeypatch):
    pause = action(0.4, "pause", mode="abort")
    report, _ = run_plan([request("a", n=3), request("b", n=3)], pause)
    assert not report.failures
    monkeypatch.setattr(lifecycle, "_requests", list)
    monkeypatch.setattr(
        fleet_lifecycle, "count_requests", lambda results, _: (sum(each.aborted for each in results), 0)
    )
    report, _ = run_plan([request("a", n=3), request("b", n=3)], pause)
    assert [failure for failure in report.failures if failure.startswith("72: a pause reports 6")]


def test_74_an_answer_that_is_given_up_too_early_is_noticed_in_spite_of_faults(run_plan, monkeypatch):
    full = EngineProfile(step_s=0.02, blocks=32, rows=8, reschedules=True)
    stopped_later = action(3.9, "stop_server", duration_s=0.1)
    report, _ = run_plan([request(f"r{i}", max_tokens=60) for i in range(8)], stopped_later, profile=full)
    assert not report.failures and report.counts["resumes"]
    monkeypatch.setattr(RetryState, "_may_try", lambda *_, **__: False)
    report, _ = run_plan([request(f"r{i}", max_tokens=60) for i in range(8)], stopped_later, profile=full)
    assert [failure for failure in report.failures if "74: returned unfinished" in failure]
