from __future__ import annotations

import random
import runpy
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from headgate import config
from headgate.router.data_path.request_info import RequestInfo
from headgate.router.fleet.policy import (
    MAX_EXTRA_WORK,
    POLICIES,
    PREFIX_BONUS,
    SMALL_FLEET,
    Members,
    Policy,
    Ring,
    work,
)
from headgate.router.fleet.prefix_index import Match, WorkerPrefix
from headgate.router.fleet.worker import Worker

PLACEMENT = Path(__file__).parents[2] / "benchmarks/router/placement.py"


def fleet(count: int) -> tuple[Worker, ...]:
    return tuple(Worker(f"http://worker-{number}") for number in range(count))


def ask(session: bytes = b"") -> RequestInfo:
    return RequestInfo(None, False, None, session, 1, 0, b"", False, 0, False)


def known(*workers: Worker, size: int = 4096, home: bool = True) -> Match:
    """Return a match of `size` bytes at these workers, which also had the previous turn if `home`."""
    return Match({worker: WorkerPrefix(size, 1.0) for worker in workers}, list(workers) if home else [])


NOTHING = Match({}, [])


class Chooser:
    """A policy with a seed."""

    def __init__(self, name: str, workers: tuple[Worker, ...], seed: int = 0) -> None:
        self.workers = workers
        self._policy: Policy = POLICIES[name]()
        self._rng = random.Random(seed)

    def __call__(self, match: Match = NOTHING, *, session: bytes = b"") -> Worker:
        return self._policy.choose(self.workers, ask(session), match, self._rng)

    def spread(self, times: int) -> Counter[Worker]:
        return Counter(self() for _ in range(times))


# -- all policies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("count", [1, 2, SMALL_FLEET, SMALL_FLEET + 1, 300])
def test_40_every_policy_chooses_a_candidate_with_or_without_a_prompt(name: str, count: int):
    choose, gone = Chooser(name, fleet(count)), Worker("http://gone")
    for match in (NOTHING, known(gone), known(choose.workers[-1]), known(gone, home=False)):
        for session in (b"", b"somebody"):
            assert choose(match, session=session) in choose.workers


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"session"}))
@pytest.mark.parametrize("count", [4, 40])
def test_equal_workers_get_equal_shares(name: str, count: int):
    choose = Chooser(name, fleet(count))
    shares = choose.spread(100 * count)
    assert max(shares.values()) <= 1.4 * mean(shares.values()) and len(shares) == count


@pytest.mark.parametrize(
    ("name", "busy"),
    [
        ("cache_aware", "in_flight"),
        ("cache_aware", "other_requests"),
        ("cache_aware", "pending_tokens"),
        ("least_requests", "in_flight"),
        ("least_requests", "other_requests"),
        ("least_tokens", "pending_tokens"),
        ("least_tokens", "in_flight"),
        ("session", "in_flight"),
        ("metrics", "running"),
        ("metrics", "waiting"),
    ],
)
def test_the_worker_with_the_least_work_is_chosen(name: str, busy: str):
    workers = fleet(5)
    for worker in workers[:2] + workers[3:]:
        setattr(worker, busy, 10_000)
    assert Chooser(name, workers)() is workers[2]


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"random", "round_robin", "session"}))
def test_a_worker_much_busier_than_all_others_gets_few_requests(name: str):
    workers = fleet(100)
    busy = workers[50]
    busy.in_flight = busy.running = 1000
    busy.pending_tokens = 1000 * 1024
    assert Chooser(name, workers).spread(2000)[busy] <= 2


# -- cache_aware -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 200])
def test_a_conversation_stays_at_its_worker(count: int):
    workers = fleet(count)
    choose = Chooser("cache_aware", workers)
    workers[3].in_flight = int(MAX_EXTRA_WORK)
    assert {choose(known(workers[3])) for _ in range(50)} == {workers[3]}


@pytest.mark.parametrize("count", [4, 200])
def test_a_conversation_leaves_a_worker_with_far_more_work_than_others(count: int):
    workers = fleet(count)
    workers[3].in_flight = int(MAX_EXTRA_WORK) + 2
    assert Chooser("cache_aware", workers)(known(workers[3])) is not workers[3]
    assert Chooser("cache_aware", workers)(known(workers[3], size=4 * 4096)) is workers[3], (
        "moving would recompute more"
    )


def test_a_conversation_stays_if_all_workers_are_busy():
    workers = fleet(4)
    for worker in workers:
        worker.in_flight = 100
    workers[1].in_flight = 145
    assert Chooser("cache_aware", workers)(known(workers[1])) is workers[1], "less than one and a half times the work"
    workers[1].in_flight = 155
    assert Chooser("cache_aware", workers)(known(workers[1])) is not workers[1]
    for worker in workers:
        worker.in_flight = 5
    workers[1].in_flight = 13
    assert Chooser("cache_aware", workers)(known(workers[1])) is workers[1], (
        "twice a small amount of work is still small"
    )


def test_the_least_loaded_of_several_previous_workers_is_chosen():
    workers = fleet(4)
    workers[1].in_flight, workers[2].in_flight = 3, 2
    assert Chooser("cache_aware", workers)(known(workers[1], workers[2])) is workers[2]


def test_a_previous_worker_that_is_no_candidate_is_skipped():
    workers = fleet(4)
    choose = Chooser("cache_aware", workers[1:])
    assert choose(known(workers[0])) in workers[1:]


def test_a_new_conversation_prefers_a_worker_that_has_its_system_prompt():
    workers = fleet(4)
    assert {Chooser("cache_aware", workers, seed)(known(workers[2], home=False)) for seed in range(20)} == {
        workers[2]
    }
    large = fleet(400)
    assert Chooser("cache_aware", large)(known(large[399], home=False)) is large[399], "whether sampled or not"


def test_a_popular_system_prompt_does_not_draw_all_requests_to_one_worker():
    workers = fleet(4)
    choose = Chooser("cache_aware", workers)
    shares = Counter(choose(known(workers[2], size=100_000, home=False)) for _ in range(40))
    assert max(shares, key=lambda worker: shares[worker]) is workers[2]
    assert shares[workers[2]] <= 10 + PREFIX_BONUS and min(shares.values()) >= 8


def test_new_conversations_are_spread_evenly_even_if_nothing_is_in_flight():
    workers = fleet(4)
    choose = Chooser("cache_aware", workers)
    shares = choose.spread(64)
    assert set(shares.values()) == {16}


def test_a_worker_that_joins_gets_its_share_and_is_not_flooded():
    choose = Chooser("cache_aware", fleet(4))
    choose.spread(1000)
    newcomer = Worker("http://newcomer")
    choose.workers = (*choose.workers, newcomer)
    assert 20 <= choose.spread(100)[newcomer] <= 45


def test_workers_that_left_are_forgotten():
    choose = Chooser("cache_aware", fleet(4))
    choose.spread(100)
    choose.workers = fleet(2)
    choose.spread(1000)
    assert set(choose._policy._placed) <= set(choose.workers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("popularity", ["uniform", "zipf"])
def test_conversations_with_popular_system_prompts_stay_and_are_spread(popularity: str):
    placement = runpy.run_path(str(PLACEMENT))
    weights = [1.0 if popularity == "uniform" else 1 / rank for rank in range(1, 9)]
    for seed in range(3):
        simulation = placement["Simulation"]("cache_aware", placement["SCENARIOS"]["over 30 s"], workers=4, seed=seed)
        figures = simulation.run(64, 8, weights).figures(4)
        assert figures["at_home"] >= 0.98 and figures["busiest_over_mean"] <= 1.25


# -- other policies ---------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns():
    choose = Chooser("round_robin", fleet(3))
    assert [choose() for _ in range(6)] == 2 * [choose.workers[1], choose.workers[2], choose.workers[0]]


def test_power_of_two_takes_the_less_loaded_of_two():
    workers = fleet(2)
    workers[0].pending_tokens = 1
    shares = Chooser("power_of_two", workers).spread(1000)
    assert 200 <= shares[workers[0]] <= 300, "only if it was drawn twice"


def test_reported_load_weighs_waiting_requests_more_and_breaks_ties_by_free_blocks():
    one, other = workers = fleet(2)
    one.running, other.waiting = 5, 3
    assert Chooser("metrics", workers)() is one
    one.running, one.free_blocks, other.free_blocks = 6, 10, 20
    assert {Chooser("metrics", workers, seed)() for seed in range(10)} == {other}


def test_work_counts_requests_and_prompts_not_computed_yet():
    (worker,) = fleet(1)
    worker.in_flight, worker.other_requests, worker.pending_tokens = 2, 3, 512
    assert work(worker) == 5.5


# -- sessions --------------------------------------------------------------------------------------------------------

SESSIONS = [b"session-%d" % number for number in range(3000)]


def homes(choose: Chooser) -> list[Worker]:
    return [choose(session=session) for session in SESSIONS]


def test_sessions_are_spread_and_every_router_spreads_them_alike():
    ours, others = homes(Chooser("session", fleet(10))), homes(Chooser("session", fleet(10), seed=1))
    assert max(Counter(ours).values()) <= 1.35 * len(SESSIONS) / 10
    assert [worker.name for worker in ours] == [worker.name for worker in others]


def test_a_worker_that_joins_takes_its_share_of_sessions_and_moves_no_others():
    choose = Chooser("session", fleet(9))
    before = homes(choose)
    newcomer = Worker("http://newcomer")
    choose.workers = (*choose.workers, newcomer)
    moved = [after for was, after in zip(before, homes(choose), strict=True) if after is not was]
    assert set(moved) == {newcomer} and 0.06 <= len(moved) / len(SESSIONS) <= 0.14


def test_only_the_sessions_of_a_worker_that_leaves_move():
    choose = Chooser("session", fleet(10))
    before, leaver = homes(choose), choose.workers[4]
    everyone = choose.workers
    choose.workers = tuple(worker for worker in everyone if worker is not leaver)
    after = homes(choose)
    assert all(now is was for was, now in zip(before, after, strict=True) if was is not leaver)
    orphans = Counter(now for was, now in zip(before, after, strict=True) if was is leaver)
    assert leaver not in orphans and len(orphans) == 9, "they are spread over the others"
    choose.workers = everyone
    assert homes(choose) == before, "they return with the worker"


def test_a_ring_is_rebuilt_only_when_necessary():
    workers = fleet(6)
    ring, members = Ring(workers), Members()
    assert ring.serves(members.of(workers)) and ring.serves(members.of(workers[:4]))
    assert not ring.serves(members.of(workers[:2])), "most of its positions belong to workers that are gone"
    assert not ring.serves(members.of((*workers, Worker("http://new"))))


def test_the_set_of_members_is_built_once_per_fleet():
    members, workers = Members(), fleet(3)
    assert members.of(workers) is members.of(workers) and members.of(workers[:2]) == frozenset(workers[:2])


def test_every_policy_can_be_configured():
    assert set(POLICIES) == set(config.POLICIES)
