from __future__ import annotations

import pytest

from tests.core.fuzz import FuzzRun

SEEDS_PER_TEST = 25


@pytest.mark.parametrize("first", range(0, 200, SEEDS_PER_TEST))
def test_two_engines_under_faults_keep_every_guarantee(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        counts = FuzzRun(seed).run()
        assert counts["requests"] > 0


# Seeds that once failed, and why.
REGRESSIONS = {
    484: "a ticket for a prompt shorter than a block had no key, so nothing tied it to the weights it named",
}


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_once_failed_passes(seed):
    assert FuzzRun(seed).run()["requests"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_seeds_keep_every_guarantee():
    for seed in range(200, 2200):
        assert FuzzRun(seed).run()["tokens"] > 0
