"""The comparison of a plan with strict and with other clients (guarantee 73)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headgate.router.exchange import attempt
from headgate.router.exchange.attempt import Withheld
from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.script import SimulationPlan
from headgate.testing.sim.strict_pairs import PlanResult, add_pair
from headgate.testing.sim.world import World
from tests.sim.plans import PLAN, request


@pytest.fixture
def compare(tmp_path: Path):
    def run(plan: SimulationPlan) -> PlanResult:
        world = World(0, plan, chatty=False, folder=tmp_path)
        return PlanResult(plan.requests, world.placements, world.run())

    def compare() -> SimulationReport:
        report = SimulationReport(0)
        requests = [request(f"r{i}", stream=i % 2 == 0) for i in range(8)]
        add_pair(report, replace(PLAN, requests=requests, servers=1), run)
        return report

    return compare


def test_73_answers_for_strict_clients_move_like_all_others(compare):
    report = compare()
    assert not report.failures
    assert report.counts["moves in strict pairs"]


def test_73_a_router_that_reads_the_presented_finish_reason_is_noticed(compare, monkeypatch):
    correct = attempt.withheld

    def reads_the_event(ending: bytes) -> Withheld:
        return replace(correct(ending), rescheduled=b'"finish_reason":"pd_reschedule"' in ending)

    monkeypatch.setattr(attempt, "withheld", reads_the_event)
    assert [failure for failure in compare().failures if failure.startswith("73: ")]
