"""Simulated runs of whole fleets; docs/testing.md lists the checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest

import headgate
from headgate import __version__
from headgate.cli import main
from headgate.testing.sim import hostile
from headgate.testing.sim.actions import Actions
from headgate.testing.sim.kv import STAGES
from headgate.testing.sim.runner import run_seeds
from headgate.testing.sim.script import CONTROL, FAULTS, KV_FAULTS, ROUTERS, draw
from headgate.testing.sim.world import simulate
from tests.router.compiled import compiled_fast_path

FRESH_SEEDS, SEEDS_PER_TEST = 200, 50
ROOT = Path(__file__).parents[2]


def first_fresh_seed() -> int:
    """Return a first seed that differs for every commit or, outside a checkout, for every version."""
    try:
        run = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        commit = blake2b(__version__.encode()).hexdigest()
    return int(commit[:8], 16)


@pytest.mark.parametrize("offset", range(0, FRESH_SEEDS, SEEDS_PER_TEST))
def test_a_fleet_under_faults_keeps_every_guarantee(offset):
    first = first_fresh_seed() + offset
    counts: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = simulate(seed)
        assert not report.failures, f"headgate simulate --seed {seed} --trace\n" + "\n".join(report.failures)
        counts += report.counts
    assert counts["requests"] > 100 and counts["tokens"] > 1000
    assert counts["resumes"] > 0 and counts["transfers"] > 0


def test_fresh_seeds_depend_on_the_commit_or_outside_a_checkout_on_the_version(tmp_path, monkeypatch):
    inside = first_fresh_seed()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # not a repository
    outside = first_fresh_seed()
    assert 0 <= inside < 2**32 and outside == int(blake2b(__version__.encode()).hexdigest()[:8], 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_more_seeds_keep_every_guarantee():
    summary = run_seeds(range(200, 2200))
    assert not summary.failures
    assert summary.counts["resumes"] > 300
    assert summary.counts["transfers"] > 500 and summary.counts["transfers lost"] > 100
    assert {f"killed at {stage}" for stage in STAGES} <= summary.faults.keys()
    assert {"KV corrupted", "KV cut short", "queue full", "client left", "deadline passed"} <= summary.faults.keys()


def test_every_kind_of_action_is_drawn_and_so_are_two_routers_and_roles():
    plans = [draw(seed) for seed in range(300)]
    assert {action.kind for plan in plans for action in plan.actions} == {*FAULTS, *KV_FAULTS, *CONTROL}
    assert {plan.routers for plan in plans} == {1, 2}
    assert {role for plan in plans for role in plan.roles} == {"prefill", "decode", "mixed"}
    assert {action.via for plan in plans for action in plan.actions} == {*ROUTERS}


def test_about_half_of_all_plans_have_hostile_actors_and_every_hostile_action_is_drawn():
    pairs = [(draw(seed), hostile.draw(seed)) for seed in range(300)]
    with_actors = [with_actors_plan for base, with_actors_plan in pairs if repr(base) != repr(with_actors_plan)]
    assert 100 < len(with_actors) < 200
    assert {*hostile.ACTIONS} <= {action.kind for plan in with_actors for action in plan.actions}
    assert any(plan.tenants for plan in with_actors)


def test_every_kind_of_action_is_implemented():
    assert not [what for what in (*FAULTS, *KV_FAULTS, *CONTROL, *hostile.ACTIONS) if not hasattr(Actions, what)]


def test_a_run_is_the_same_to_the_byte_when_its_routers_run_in_c():
    python = [simulate(seed).hash for seed in range(20)]
    assert [simulate(seed, fast_path=compiled_fast_path()).hash for seed in range(20)] == python


def test_the_same_seed_is_the_same_run_to_the_byte_in_any_process():
    script = "from headgate.testing.sim.world import simulate; print(*[simulate(s).hash for s in range(%d, 12)])"
    hashes = []
    for hash_seed, first in (("1", 0), ("2", 6)):  # independently of earlier runs in the process
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = [sys.executable, "-c", script % first]
        output = subprocess.run(run, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.split()
        hashes.append(output[-6:])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 6


def test_a_range_of_seeds_is_summed_up(capsys):
    assert main(["simulate", "--seeds", "0:3", "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    assert "3 seeds" in output and "failures  0" in output
    for name in ("requests", "tokens", "faults", "control"):
        assert f"\n{name}" in output


def source_of(package: Path, jobs: int) -> str:
    """Return the fingerprint that a run of this copy of the package prints."""
    script = "import sys; from headgate.cli import main; sys.exit(main())"
    run = [sys.executable, "-c", script, "simulate", "--seeds", "0:9" if jobs > 1 else "0:1", "--jobs", str(jobs)]
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    output = subprocess.run(run, env=env, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.match(r"\d seeds, \d+ s of virtual time, source ([0-9a-f]{12})\n", output)
    assert found is not None, output
    return found[1]


def test_runs_of_the_same_code_have_the_same_fingerprint_and_others_do_not(tmp_path):
    package = Path(headgate.__file__).parent
    copy = tmp_path / "elsewhere" / "headgate"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    unchanged = source_of(package, jobs=1)
    assert source_of(copy, jobs=2) == unchanged
    scheduler = copy / "core" / "scheduler.py"
    code = scheduler.read_text()
    scheduler.write_text(code.replace('"""', '"""In other words: ', 1) + "# a comment\n")
    assert source_of(copy, jobs=1) == unchanged
    scheduler.write_text(code + "assert True\n")
    assert source_of(copy, jobs=1) != unchanged


def test_the_trace_of_a_seed_names_processes_and_their_actions(capsys):
    assert main(["simulate", "--seed", "1", "--trace"]) == 0
    output = capsys.readouterr().out
    assert "clients/ask-0" in output and "server0/engine0" in output and "seed 1: passed" in output


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b", "3:3"])
def test_an_invalid_range_of_seeds_is_refused_with_an_explanation(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--seeds", seeds])
    assert "a range of seeds is A:B" in capsys.readouterr().err
