"""What tests of the simulation share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.testing.sim.script import PlannedAction, PlannedRequest
from headgate.testing.sim.world import SimulationReport, World
from tests.sim.plans import PLAN


@pytest.fixture
def carry_out(tmp_path: Path):
    def carry_out(asks: list[PlannedRequest], *deeds: PlannedAction, **plan: Any) -> tuple[SimulationReport, World]:
        world = World(0, replace(PLAN, asks=asks, deeds=list(deeds), **plan), chatty=False, folder=tmp_path)
        return world.run(), world

    return carry_out
