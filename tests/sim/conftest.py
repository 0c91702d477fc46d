"""Fixtures of the simulation tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.script import PlannedAction, PlannedRequest
from headgate.testing.sim.world import World
from tests.sim.plans import PLAN


@pytest.fixture
def run_plan(tmp_path: Path):
    def run_plan(
        requests: list[PlannedRequest], *actions: PlannedAction, **plan: Any
    ) -> tuple[SimulationReport, World]:
        world = World(
            0, replace(PLAN, requests=requests, actions=list(actions), **plan), chatty=False, folder=tmp_path
        )
        return world.run(), world

    return run_plan
