"""Rules that chance breaks seldom, each in a plan that tries it: what was asked holds for whoever comes back."""

from __future__ import annotations

import pytest

from headgate.testing.sim.hosts import ServerSettings
from headgate.testing.sim.judge import read
from tests.sim.plans import ask, deed

TWO = {"settings": ServerSettings(engines=2)}


def test_7_what_was_asked_to_end_goes_on_in_no_other_engine(carry_out):
    """Its engine hangs when it is asked to end, and dies before it has heard of that."""
    stall = deed(0.4, "stall_engine", which=0.0, lasts_s=2.0)
    abort = deed(0.5, "abort", req_ids=["a"], wait=True)
    report, _ = carry_out([ask("a", to="server0")], stall, abort, deed(0.6, "kill_engine", which=0.0), **TWO)
    assert not report.failures
    assert report.counts["tokens"] < 30 and "max_tokens" not in report.ends


@pytest.mark.parametrize("whole", [False, True], ids=["an engine", "a server"])
def test_29_who_comes_back_to_a_paused_fleet_is_paused(carry_out, whole):
    killed = deed(0.3, "pause_and_kill", lasts_s=3.0, mode="freeze", whole=whole, which=0.0)
    report, _ = carry_out([ask("a", to="server0")] if not whole else [], killed)
    assert not report.failures


def test_55_an_engine_that_comes_back_with_other_weights_gets_no_streams(carry_out):
    late = [ask(f"late-{i}", 2.0 + i / 20, to="server0", max_tokens=2) for i in range(12)]
    report, _ = carry_out(late, deed(0.2, "update", mode="abort"), deed(1.5, "return_old", which=0.0), **TWO)
    assert not report.failures
    assert {version for each in late for version in read(each).choices[0].versions} == {1}


def test_55_a_worker_that_comes_back_with_other_weights_gets_no_requests(carry_out):
    late = [ask(f"late-{i}", 1.5 + i / 20, max_tokens=2) for i in range(30)]
    gone = deed(1.0, "kill_server", lasts_s=0.5)
    report, _ = carry_out(late, deed(0.2, "update", mode="abort"), gone)
    assert not report.failures
    assert {version for each in late for version in read(each).choices[0].versions} == {1}
