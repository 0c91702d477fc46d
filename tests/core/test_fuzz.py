from __future__ import annotations

import pytest

from tests.core.fuzz import World

SEEDS_PER_TEST = 25


@pytest.mark.parametrize("first", range(0, 200, SEEDS_PER_TEST))
def test_two_engines_in_trouble_keep_every_promise(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        counts = World(seed).run()
        assert counts["requests"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_seeds_keep_every_promise():
    for seed in range(200, 2200):
        assert World(seed).run()["tokens"] > 0
