"""Layers with attention windows: the scheduler gives back the blocks that no window needs any more."""

from __future__ import annotations

import random

import pytest

from headgate.contract.sampling import SamplingParams
from headgate.core.leases import Granted
from headgate.errors import ContextTooLong
from headgate.protocol.groups import ABSENT, LayerGroups, present
from headgate.protocol.request import Ticket
from tests.core.engine import BLOCK_SIZE, Engine, prompt_of

FULL_AND_8 = (None, 8)


def held(engine: Engine) -> int:
    return engine.pool.held


# -- giving blocks back -----------------------------------------------------------


def test_a_window_gives_its_blocks_back_while_the_sequence_runs():
    engine = Engine(windows=FULL_AND_8)
    engine.add(1, prompt=8, max_tokens=40)
    most = 0
    while engine.step():
        most = max(most, held(engine))
    assert engine.tokens[1] == engine.answer(prompt_of(1, 8), 40)
    # 48 tokens are 12 blocks. The window is two blocks long, and touches one more.
    assert most == 12 + 3


def test_a_model_with_windows_in_all_layers_is_bounded_by_the_window():
    engine = Engine(blocks=6, windows=(8,), budget=8)
    assert engine.scheduler.max_context == 100
    engine.add(1, prompt=60, max_tokens=30)
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, 60), 30)
    assert engine.scheduler.counters.preemptions == 0


def test_a_long_prompt_never_holds_more_than_the_window_and_a_step():
    engine = Engine(blocks=100, windows=FULL_AND_8, budget=8)
    engine.add(1, prompt=80, max_tokens=1)
    engine.launch()
    # 20 blocks of the layers without a window, and those of the first step of the others.
    assert held(engine) == 20 + 2
    engine.land()
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, 80), 1)


def test_a_block_is_not_reused_in_the_step_that_reads_it_last():
    engine = Engine(blocks=8, windows=(4,), budget=12)
    engine.add(1, prompt=8, max_tokens=4)
    engine.add(2, prompt=4, max_tokens=4)
    first = engine.launch()
    blocks = [block for join in first.joins for block in join.blocks]
    assert len(blocks) == len(set(blocks)) == 3
    assert held(engine) == 2, "the first block of the longer prompt was given back after the plan"
    engine.land()
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, 8), 4)


def test_a_slice_that_sampled_nothing_finds_the_window_of_its_last_token():
    for prompt in range(6, 14):
        engine = Engine(windows=(5,))
        engine.add(1, prompt=prompt, sampling=grammar(), max_tokens=None)
        engine.step(0)
        while engine.step(1):
            pass
        assert engine.tokens[1] == engine.answer(prompt_of(1, prompt), 6)


def grammar() -> SamplingParams:
    return SamplingParams(max_tokens=6, grammar="start: /.*/")


def test_a_tenant_is_not_charged_for_what_a_window_gave_back():
    engine = Engine(windows=FULL_AND_8, blocks=64)
    engine.add(1, prompt=20, max_tokens=30, tenant="a")
    for _ in range(20):
        engine.step()
    (seq,) = engine.scheduler.running
    assert seq.own == len(present(seq.blocks)) == held(engine)


def test_a_tenant_is_not_charged_for_cached_blocks_either():
    engine = Engine(windows=FULL_AND_8, blocks=64)
    engine.add(1, prompt=20, max_tokens=1)
    engine.run()
    engine.add(2, prompt=[*prompt_of(1, 20), 7], max_tokens=30)
    for _ in range(20):
        engine.step()
    (seq,) = engine.scheduler.running
    # 5 blocks of the layers without a window were found in the cache and are still held.
    assert (seq.found, seq.own) == (5, held(engine) - 5)


@pytest.mark.parametrize("seed", range(40))
def test_a_pool_of_the_bound_is_enough_for_one_sequence(seed):
    rng = random.Random(seed)
    windows = (*(rng.choice([None, *range(2, 14)]) for _ in range(rng.randrange(3))), rng.randrange(2, 14))
    budget, prompt = rng.randrange(1, 20), rng.randrange(1, 60)
    groups = LayerGroups(BLOCK_SIZE, windows)
    blocks = groups.most_blocks(groups.stripes_for(prompt + 10), budget)
    engine = Engine(blocks=blocks, windows=windows, budget=budget)
    engine.add(1, prompt=prompt, max_tokens=10)
    engine.run()
    assert engine.tokens[1] == engine.answer(prompt_of(1, prompt), 10)
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("window", range(1, 10))
@pytest.mark.parametrize("budget", [1, 3, 4, 8])
def test_the_bound_of_a_window_is_reached(window, budget):
    groups = LayerGroups(BLOCK_SIZE, (window,))
    most = 0
    for start in range(20, 40):
        stripes = groups.stripes_for(start + budget)
        most = max(most, stripes - groups.first_needed(0, start))
    assert groups.most_blocks(100, budget) == most


def test_the_longest_context_is_the_longest_that_fits():
    rng = random.Random(0)
    for _ in range(200):
        groups = LayerGroups(4, (rng.choice([None, 3, 9, 20]), 7)[: rng.randrange(1, 3)])
        blocks, budget = rng.randrange(40), rng.randrange(1, 20)
        fits = [n for n in range(26) if groups.most_blocks(n, budget) <= blocks]
        assert groups.longest_context(blocks, budget, 100) == 4 * max(fits)


# -- the prefix cache -------------------------------------------------------------


def test_the_next_turn_of_a_conversation_hits_all_of_the_last_one():
    engine = Engine(windows=FULL_AND_8)
    engine.add(1, prompt=21, max_tokens=8)
    engine.run()
    turn = [*prompt_of(1, 21), *engine.tokens[1], 5]
    engine.add(2, prompt=turn, max_tokens=4)
    engine.run()
    assert engine.ended[2].cached_tokens == 28
    assert engine.tokens[2] == engine.answer(turn, 4)


def test_a_shared_prefix_hits_while_what_the_window_needs_is_cached():
    engine = Engine(windows=FULL_AND_8)
    shared = prompt_of(1, 16)
    engine.add(1, prompt=[*shared, *range(900, 920)], max_tokens=1)
    engine.run()
    engine.add(2, prompt=[*shared, *range(800, 805)], max_tokens=4)
    engine.run()
    assert engine.ended[2].cached_tokens == 16
    assert engine.tokens[2] == engine.answer([*shared, *range(800, 805)], 4)


def test_a_prefix_is_not_hit_when_its_window_has_left_the_cache():
    engine = Engine(blocks=20, windows=FULL_AND_8, budget=16)
    shared = prompt_of(1, 16)
    engine.add(1, prompt=[*shared, *range(900, 911)], max_tokens=12)
    engine.step()
    while engine.scheduler.running:
        engine.step()
        engine.pool.flush()  # blocks that were given back leave the cache
    prompt = [*shared, *range(800, 805)]
    engine.add(2, prompt=prompt, max_tokens=4)
    engine.run()
    assert engine.ended[2].cached_tokens == 0
    assert engine.tokens[2] == engine.answer(prompt, 4)


def test_the_usable_prefix_is_the_longest_that_has_everything():
    rng = random.Random(1)
    for _ in range(2000):
        groups = LayerGroups(4, (rng.choice([None, 1, 4, 9]), 5, 3)[: rng.randrange(1, 4)])
        found = [rng.choice([ABSENT, 1, 1, 1]) for _ in range(rng.randrange(8) * len(groups))]
        usable = [
            n
            for n in range(len(found) // len(groups) + 1)
            if ABSENT not in [found[place] for place in groups.places_for(n * 4, n)]
        ]
        assert groups.usable_prefix(found) == max(usable)


def test_a_block_given_back_before_its_tokens_were_known_is_not_published():
    engine = Engine(windows=(1,))
    engine.add(1, prompt=3, max_tokens=8)
    for _ in range(3):
        engine.launch()
    assert held(engine) == 1, "the window has left the first block, whose last token has not landed"
    for _ in range(3):
        engine.land()
    engine.run()
    assert engine.pool.cached == 1, "of two full blocks, only the second is in the cache"
    assert engine.tokens[1] == engine.answer(prompt_of(1, 3), 8)


# -- transfers --------------------------------------------------------------------


def test_an_export_lends_what_the_windows_need_after_it():
    engine = Engine(windows=FULL_AND_8, blocks=64, budget=4)
    engine.add(1, prompt=21, export_kv=True)
    engine.launch()
    (granted,) = engine.scheduler.leases.take_news()
    assert isinstance(granted, Granted) and len(granted.lease.blocks) == 5 + 2
    engine.land()
    filled = [engine.scheduler.leases.take_news()[0].blocks]
    for _ in range(4):
        engine.step()
        filled += [news.blocks for news in engine.scheduler.leases.take_news()]
    # The first three stripes lend one block each, the last two also those of the window.
    assert filled == [1, 2, 3, 5, 7]


def test_an_export_that_does_not_fit_as_a_whole_is_refused():
    engine = Engine(windows=FULL_AND_8, blocks=16, budget=4)
    assert (engine.scheduler.max_context, engine.scheduler.admission.max_whole) == (48, 32)
    engine.add(1, prompt=36, export_kv=True)
    with pytest.raises(ContextTooLong, match="this engine holds at most 32"):
        engine.add(2, prompt=37, export_kv=True)


@pytest.mark.parametrize(("prompt", "fetches"), [(31, 1), (41, 0)])
def test_a_prompt_that_cannot_be_fetched_as_a_whole_is_computed(prompt, fetches):
    engine = Engine(windows=FULL_AND_8, blocks=16, budget=4)
    other = Engine(windows=FULL_AND_8, blocks=64)
    other.add(1, prompt=prompt_of(1, prompt), export_kv=True)
    other.step()
    ticket: Ticket = other.outputs_taken[-1].tickets[1]
    engine.add(1, prompt=prompt, max_tokens=2, ticket=ticket)
    assert len(engine.launch().fetches) == fetches
    if not fetches:
        engine.land()
        engine.run()
        assert engine.tokens[1] == engine.answer(prompt_of(1, prompt), 2)
