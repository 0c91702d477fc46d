from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.router.fleet.prefix_index import (
    CUTS,
    LOOKBACK_MESSAGES,
    MAX_WORKERS_PER_NODE,
    MIN_NODES,
    Match,
    Path,
    PrefixIndex,
)
from headgate.router.fleet.worker import Worker
from tests.router.compiled import compiled_fast_path

ROOT = 1


def prefix_index(max_nodes: int = 1_000_000) -> PrefixIndex:
    return PrefixIndex(max_nodes, compiled_fast_path())


def path_in(root: int, prompt: bytes, *, chat: bool) -> Path:
    """Return the path of a prompt, which is the same in every index with the same fast path."""
    return prefix_index().path(root, prompt, chat=chat)


def fleet(count: int) -> list[Worker]:
    return [Worker(f"http://worker-{number}") for number in range(count)]


def text(size: int, root: int = ROOT) -> Path:
    """The first `size` bytes of an endless text."""
    return path_in(root, (b"0123456789abcdef" * (size // 16 + 1))[:size], chat=False)


def prose(rng: random.Random, size: int) -> str:
    return "".join(rng.choices('abc {}"\\é\n', k=size))


def chat(messages: list[dict[str, Any]], **style: Any) -> Path:
    return path_in(ROOT, json.dumps(messages, **style).encode()[:-1], chat=True)


def sizes(match: Match) -> dict[Worker, int]:
    return {worker: found.size for worker, found in match.found.items()}


# -- matches ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_up_to_the_last_cut_in_it():
    index, (worker,) = prefix_index(), fleet(1)
    index.insert(text(3000), worker)
    assert sizes(index.match(text(10_000))) == {worker: 2048}
    assert sizes(index.match(text(3000))) == {worker: 3000}, "an identical prompt is found completely"
    assert sizes(index.match(text(600))) == {worker: 512}
    assert sizes(index.match(text(255))) == {}


def test_a_match_ends_where_prompts_begin_to_differ():
    index, (worker,) = prefix_index(), fleet(1)
    index.insert(text(10_000), worker)
    other = path_in(ROOT, text(10_000).prompt[:3100] + b"!" * 5000, chat=False)
    assert sizes(index.match(other)) == {worker: 3072}


def test_cuts_miss_at_most_a_third_of_a_shared_prefix():
    assert all(here < there for here, there in pairwise(CUTS))
    assert all(there / here <= 1.5 for here, there in pairwise(CUTS[1:])) and CUTS[-1] > 2**30


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9000)), max_size=40), st.integers(0, 9000))
def test_every_workers_longest_prefix_counts(visits: list[tuple[int, int]], size: int):
    index, workers = prefix_index(), fleet(21)
    for number, length in visits[: MAX_WORKERS_PER_NODE * 2]:
        index.insert(text(length), workers[number % MAX_WORKERS_PER_NODE])
    longest: dict[Worker, int] = {}
    for number, length in visits[: MAX_WORKERS_PER_NODE * 2]:
        known = size if length == size else max((cut for cut in CUTS if cut <= min(length, size)), default=0)
        worker = workers[number % MAX_WORKERS_PER_NODE]
        longest[worker] = max(longest.get(worker, 0), known)
    assert sizes(index.match(text(size))) == {worker: known for worker, known in longest.items() if known}


def test_a_shared_prefix_is_remembered_for_the_last_few_workers():
    index, workers = prefix_index(), fleet(MAX_WORKERS_PER_NODE + 3)
    for worker in workers:
        index.insert(text(5000), worker)
    for _ in range(MAX_WORKERS_PER_NODE):
        index.insert(text(5000), workers[-2])
    assert set(index.match(text(5000)).found) == {*workers[-MAX_WORKERS_PER_NODE:]}


def test_workers_that_lost_a_prefix_do_not_crowd_out_one_that_has_it():
    index, (keeper, *losers) = prefix_index(), fleet(MAX_WORKERS_PER_NODE + 1)
    for worker in (keeper, *losers[:-1]):
        index.insert(text(5000), worker)
    for worker in losers:
        worker.generation += 1
    index.insert(text(5000), losers[-1])
    assert set(index.match(text(5000)).found) == {keeper, losers[-1]}


@given(st.integers(), st.integers(), st.binary(min_size=1, max_size=3000), st.booleans())
def test_nothing_is_found_across_roots(one: int, other: int, prompt: bytes, as_chat: bool):
    index, (worker,) = prefix_index(), fleet(1)
    index.insert(path_in(one, prompt, chat=as_chat), worker)
    assert bool(index.match(path_in(other, prompt, chat=as_chat)).found) == (hash(one) == hash(other))


def test_40_an_empty_prompt_matches_nothing():
    index, (worker,) = prefix_index(), fleet(1)
    for as_chat in (True, False):
        nothing = path_in(ROOT, b"", chat=as_chat)
        index.insert(nothing, worker).end(1.0)
        assert not index.match(nothing).found and not index.match(nothing).last_workers
    assert len(index) == 0


# -- the previous turn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_a_conversation_is_found_at_the_worker_of_its_last_turn(style: dict[str, Any]):
    rng = random.Random(5)
    index, workers = prefix_index(), fleet(8)
    for _ in range(20):
        messages, home = [{"role": "system", "content": "Be kind. " * 700}], None
        for _ in range(8):
            messages.append({"role": "user", "content": prose(rng, rng.randrange(1, 300))})
            path = chat(messages, **style)
            match = index.match(path)
            if home is not None:
                assert match.last_workers == [home] and match.found[home].size > CUTS[0]
            home = rng.choice(workers)
            index.insert(path, home).end(1.0)
            messages.append({"role": "assistant", "content": prose(rng, rng.randrange(1, 900))})


def test_tool_calls_and_their_results_belong_to_the_turn():
    index, (worker,) = prefix_index(), fleet(1)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo and in Rome?"}]
    index.insert(chat(messages), worker)
    calls = [{"id": str(n), "function": {"name": "weather", "arguments": '{"city": "x"}'}} for n in range(3)]
    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": str(n), "content": '{"rain": true}'} for n in range(3)]
    assert index.match(chat(messages)).last_workers == [worker]


@pytest.mark.parametrize("keys", [("role", "content"), ("content", "role")])
def test_the_search_for_the_last_turn_is_bounded(keys: tuple[str, str]):
    index, (worker,) = prefix_index(), fleet(1)
    message = dict.fromkeys(keys, "user")
    index.insert(chat([message]), worker)
    assert index.match(chat([message] * (LOOKBACK_MESSAGES + 1))).last_workers == [worker]
    assert index.match(chat([message] * (LOOKBACK_MESSAGES + 2))).last_workers == []


@pytest.mark.parametrize("said", ["if (x) { y(); }", '{"a": {}}, {"role": "user"}', "}, {", "}}}} {"])
def test_braces_in_a_text_do_not_hide_the_last_turn(said: str):
    index, (worker,) = prefix_index(), fleet(1)
    messages = [{"role": "user", "content": "Show me some code"}]
    index.insert(chat(messages), worker)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": said}]
    assert index.match(chat(messages)).last_workers == [worker]


def test_an_earlier_turn_does_not_make_a_longer_prefix_shorter():
    index, (worker,) = prefix_index(), fleet(1)
    question = {"role": "user", "content": "Tell me a story. " * 20}
    story = {"role": "assistant", "content": "Once upon a time there was a river. " * 60}
    index.insert(chat([question]), worker)
    index.insert(chat([question, story, {"role": "user", "content": "Another!"}]), worker)
    match = index.match(chat([question, story, {"role": "user", "content": "No, a sad one!"}]))
    assert match.last_workers == [worker] and match.found[worker].size == 2048


def test_a_new_conversation_with_a_known_system_prompt_has_no_previous_turn():
    index, (worker,) = prefix_index(), fleet(1)
    system = {"role": "system", "content": "Be kind. " * 700}
    index.insert(chat([system, {"role": "user", "content": "Hello"}]), worker).end(1.0)
    match = index.match(chat([system, {"role": "user", "content": "Good evening"}]))
    assert match.last_workers == [] and match.found[worker].size == 6144


def test_a_repeated_long_prompt_counts_as_a_turn_and_a_short_one_does_not():
    index, (worker,) = prefix_index(), fleet(1)
    for size, homes in ((1024, [worker]), (200, [])):
        index.insert(text(size), worker)
        match = index.match(text(size))
        assert match.last_workers == homes and match.found[worker].size == size


def test_a_text_that_continues_an_answered_prompt_is_its_next_turn():
    index, (worker,) = prefix_index(), fleet(1)
    visit = index.insert(text(3000), worker)
    assert index.match(text(3500)).last_workers == [], "a prompt cannot continue one that was not answered yet"
    visit.end(1.0)
    assert index.match(text(3500)).last_workers == [worker]
    branch = path_in(ROOT, text(3000).prompt[:2000] + b"!" * 1000, chat=False)
    assert index.match(branch).last_workers == [], "it differs before the end"


# -- evictions -------------------------------------------------------------------------------------------------------


def test_42_what_was_last_used_before_the_horizon_is_gone():
    index, (one, other) = prefix_index(), fleet(2)
    index.insert(text(3000), one).end(10.0)
    index.insert(text(3000), other).end(10.0)
    one.horizon_s = 9.9
    assert set(index.match(text(3000)).found) == {one, other}
    one.horizon_s = 10.0
    assert set(index.match(text(3000)).found) == {other}
    index.insert(text(3000), one).end(11.0)
    assert set(index.match(text(3000)).found) == {one, other}


def test_prefixes_in_use_are_not_evicted():
    index, (worker,) = prefix_index(), fleet(1)
    visit = index.insert(text(3000), worker)
    worker.horizon_s = 1e9
    assert worker in index.match(text(3000)).found
    visit.end(2.0)
    assert not index.match(text(3000)).found


def test_a_request_that_never_ran_leaves_no_trace_in_matches():
    index, (worker,) = prefix_index(), fleet(1)
    index.insert(text(3000), worker).undo()
    assert not index.match(text(3000)).found


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["send", "restart"])), max_size=40))
def test_42_visits_of_an_earlier_generation_do_not_count_whenever_they_end(steps: list[tuple[int, int, str]]):
    index, workers = prefix_index(), fleet(4)
    visits, alive = [], {}
    for now_s, (number, prompt, what) in enumerate(steps):
        worker = workers[number]
        if what == "send":
            visits.append(index.insert(text(1000, root=prompt), worker))
            alive[number, prompt] = True
        else:
            worker.generation += 1
            alive = {key: True for key in alive if key[0] != number}
            for visit in visits:
                visit.end(float(now_s))
    for prompt in range(5):
        found = index.match(text(1000, root=prompt)).found
        assert {workers.index(worker) for worker in found} == {who for who, what in alive if what == prompt}


# -- bounds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(MIN_NODES, 1000), st.lists(st.integers(0, 40_000), min_size=1, max_size=30), st.randoms())
def test_42_the_index_is_bounded_under_endless_distinct_prompts(most: int, lengths: list[int], rng: random.Random):
    index, workers = prefix_index(most), fleet(3)
    for number in range(10 * len(lengths)):
        path = path_in(number, bytes(lengths[number % len(lengths)]), chat=False)
        index.insert(path, rng.choice(workers))
        assert len(index) <= most
        assert not path.size or index.match(path).found, "the newest is present"


def test_a_workers_prefix_is_kept_when_another_worker_gets_it_a_generation_later():
    index, (one, other) = prefix_index(1000), fleet(2)
    index.insert(text(3000), one)
    number = 2
    while text(3000).tail in index._young:
        index.insert(path_in(number := number + 1, b"x", chat=False), one)
    assert sizes(index.match(text(3500))) == {one: 2048}
    index.insert(text(3000), other)
    assert sizes(index.match(text(3000))) == {one: 3000, other: 3000}


def test_recently_used_prefixes_stay_when_the_index_is_full():
    index, (worker,) = prefix_index(1000), fleet(1)
    for number in range(1000):
        index.insert(text(3000), worker)
        index.insert(path_in(2 + number, b"x" * 3000, chat=False), worker)
        assert sizes(index.match(text(3000))) == {worker: 3000}
    assert not index.match(path_in(2, b"x" * 3000, chat=False)).found, "the oldest was evicted"
    assert repr(index) == f"<PrefixIndex {len(index)} of 1000 nodes>"


def test_an_index_too_small_for_one_prompt_is_refused():
    with pytest.raises(ValueError, match=f"give it {MIN_NODES} or more"):
        prefix_index(MIN_NODES - 1)
