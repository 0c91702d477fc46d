"""The RL example learns, interrupts samples, and finishes them under newer weights, as its docstring states."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/rl_loop.py"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_reward_rises_and_samples_are_made_by_several_weight_versions(tmp_path: Path):
    plot = tmp_path / "rl.png"
    command = [sys.executable, EXAMPLE, "--plot", plot, "--rounds", "24"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d+) +(\d+) +(\d+)  (.*)$", run.stdout, re.MULTILINE)
    rewards = [float(row[1]) for row in rows]
    assert rewards[0] < 0.3 and rewards[-1] > rewards[0] + 0.2
    assert any(int(mixed) for *_, mixed, _ in rows) and plot.stat().st_size > 1000
