"""The whole fleet, seed by seed; docs/testing.md says what is checked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headgate.cli import main
from headgate.testing.sim.runner import run_seeds
from headgate.testing.sim.script import draw
from headgate.testing.sim.world import simulate

SEEDS_PER_TEST = 25


@pytest.mark.parametrize("first", range(0, 200, SEEDS_PER_TEST))
def test_a_fleet_in_trouble_keeps_every_promise(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        report = simulate(seed)
        assert not report.failures, f"headgate simulate --seed {seed} --trace\n" + "\n".join(report.failures)
        assert report.counts["requests"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_more_seeds_keep_every_promise():
    summary = run_seeds(range(200, 2200))
    assert not summary.failures
    assert summary.counts["resumes"] > 300


def test_every_kind_of_trouble_happens_and_answers_move():
    deeds = {deed.what for seed in range(200) for deed in draw(seed).deeds}
    assert {
        "kill_engine",
        "kill_server",
        "cut",
        "stop_server",
        "shutdown",
        "update",
        "roll",
        "pause",
        "abort",
    } <= deeds
    summary = run_seeds(range(40), jobs=1)
    assert summary.counts["resumes"] > 0 and summary.counts["tokens"] > 1000


def test_the_same_seed_is_the_same_run_to_the_byte_in_any_process():
    script = "from headgate.testing.sim.world import simulate; print(*[simulate(s).hash for s in range(%d, 12)])"
    hashes = []
    for hash_seed, first in (("1", 0), ("2", 6)):  # and whatever ran before it
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = [sys.executable, "-c", script % first]
        told = subprocess.run(run, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.split()
        hashes.append(told[-6:])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 6


def test_a_range_of_seeds_is_told_in_sums(capsys):
    assert main(["simulate", "--seeds", "0:3", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "3 seeds" in told and "failures  0" in told


def test_the_trace_of_a_seed_says_who_did_what_when(capsys):
    assert main(["simulate", "--seed", "1", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "clients/ask-0" in told and "server0/engine0" in told and "all is well" in told


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b", "3:3"])
def test_a_range_that_is_none_is_refused_in_a_sentence(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--seeds", seeds])
    assert "a range of seeds is A:B" in capsys.readouterr().err
