"""The RL examples do what their docstrings state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/rl_loop.py"
OVER_A_GROUP = EXAMPLE.with_name("sglang_group.py")


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


@pytest.mark.timeout(300)
def test_a_trainer_killed_during_an_update_over_sglangs_group_is_replaced_and_learns(tmp_path: Path):
    plot = tmp_path / "group.svg"
    command = [sys.executable, OVER_A_GROUP, "--rounds", "8", "--kill", "4", "--rate", "3e-3", "--plot", plot]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "round 4: the trainer is killed between two buckets" in run.stdout
    assert "the checkpoint lacks tensor" in run.stdout and "answers as before, with version 4" in run.stdout
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["rounds"] == 8 and result["last_reward"] > result["first_reward"] + 0.2, result
    assert plot.read_text().startswith("<?xml")
