"""The fleet: candidates, circuit breaking, weight versions, and load released once (guarantees 44, 55, 41)."""

from __future__ import annotations

from random import Random

import pytest

from headgate.config import RouteConfig
from headgate.errors import RequestError
from headgate.router.exchange.attempt import Answered
from headgate.router.exchange.retry_state import Progress, RetryBudget, RetryState
from headgate.router.fleet.fleet import FAILURES, MAX_COOLDOWN_S, SUCCESSES, NoSuchWorker, Workers
from headgate.router.fleet.worker import Worker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet_of(*urls: str, clock: Clock | None = None) -> tuple[Workers, list[Worker]]:
    fleet = Workers(clock=clock or Clock())
    workers = [fleet.add(url) for url in urls]
    for worker in workers:
        fleet.set_kind(worker, "headgate", ["m"])
        fleet.probed(worker, "ready")
    return fleet, workers


A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_44_a_worker_goes_down_after_several_consecutive_failures_and_not_before():
    assert FAILURES > 1
    fleet, (a, b) = fleet_of(A, B)
    for _ in range(5):
        for _ in range(FAILURES - 1):
            fleet.failed(a, "test")
        assert a.state == "ready"
        fleet.answered(a)
    for _ in range(FAILURES):
        fleet.failed(a, "test")
    assert a.state == "down"
    assert fleet.candidates("mixed", None) == (b,)


def test_44_a_worker_comes_back_after_its_cooldown_and_several_good_probes():
    clock = Clock()
    fleet, (a,) = fleet_of(A, clock=clock)
    fleet.give_up(a)
    for _ in range(10):
        fleet.probed(a, "ready")
    assert a.state == "down"  # the cooldown has not passed
    clock.now_s += 1000
    for _ in range(SUCCESSES - 1):
        fleet.probed(a, "ready")
        assert a.state == "down"
    fleet.probed(a, "ready")
    assert (a.state, a.failures) == ("ready", 0)


def test_74_a_restart_that_no_probe_has_seen_allows_new_attempts():
    fleet, (a,) = fleet_of(A)
    fleet.set_boot_id(a, "first")
    retry_state = RetryState(RouteConfig(), lambda: True, Random(0))
    refusal = Answered(503, [], b'{"error":{"code":"shutting_down"}}')
    retry_state.judge(a, refusal, Progress())
    assert retry_state.unwilling == {a}
    changes: list[None] = []
    fleet.on_change = lambda: changes.append(None)
    fleet.set_boot_id(a, "second")
    assert retry_state.unwilling == set()
    assert changes, "requests that wait for a worker are not woken"


def test_44_cooldowns_grow_until_the_worker_has_answered_a_request():
    clock = Clock()
    fleet, (a,) = fleet_of(A, clock=clock)
    breaks = []
    for _ in range(10):
        fleet.give_up(a)
        breaks.append(a.open_until_s - clock.now_s)
        clock.now_s += 1000
        for _ in range(SUCCESSES):
            fleet.probed(a, "ready")
        assert a.state == "ready"
    assert breaks[0] < 1 and breaks[3] > 2 * breaks[0] and MAX_COOLDOWN_S * 0.7 < breaks[-1] < MAX_COOLDOWN_S * 1.3
    fleet.answered(a)
    fleet.give_up(a)
    assert a.open_until_s - clock.now_s < 1


def test_marking_a_worker_down_ends_its_requests_once():
    fleet, (a,) = fleet_of(A)
    lost: list[str] = []
    fleet.on_lost = lambda worker, _: lost.append(worker.url)
    fleet.give_up(a)
    fleet.give_up(a)
    for _ in range(FAILURES):
        fleet.failed(a, "test")
    assert lost == [A]


def test_41_load_is_released_once_and_a_second_release_is_counted():
    fleet, (a,) = fleet_of(A)
    taken = fleet.add_load(a, 100)
    assert (a.in_flight, a.pending_tokens) == (1, 100)
    taken.first_token()
    taken.first_token()
    assert (a.in_flight, a.pending_tokens) == (1, 0)
    taken.give_back()
    assert (a.in_flight, a.pending_tokens, fleet.double_releases) == (0, 0, 0)
    taken.give_back()
    assert (a.in_flight, a.pending_tokens, fleet.double_releases) == (0, 0, 1)


def test_41_load_is_also_released_before_the_first_token():
    fleet, (a,) = fleet_of(A)
    fleet.add_load(a, 7).give_back()
    assert (a.in_flight, a.pending_tokens) == (0, 0)


def test_44_a_removed_worker_finishes_its_requests_before_it_leaves():
    fleet, (a, b) = fleet_of(A, B)
    taken = fleet.add_load(a, 1)
    fleet.remove(a)
    assert fleet.candidates("mixed", None) == (b,) and list(fleet) == [b]
    assert a in fleet.with_leaving and a.state == "draining"
    fleet.probed(a, "ready")
    fleet.give_up(a)
    assert a.state == "draining"
    fleet.pool(a)  # still there for requests in flight
    taken.give_back()
    assert a not in fleet.with_leaving
    with pytest.raises(NoSuchWorker, match="GET /v1/workers"):
        fleet.find(A)


def test_an_address_that_leaves_twice_is_forgotten_twice():
    """An address is removed with a request in flight, added again, and removed again.

    The router forgets each of the two workers when the last request of that worker has ended.
    """
    fleet, (first,) = fleet_of(A)
    slow = fleet.add_load(first, 1)
    fleet.remove(first)
    second = fleet.add(A)
    assert second is not first
    fleet.set_kind(second, "headgate", ["m"])
    fleet.probed(second, "ready")
    quick = fleet.add_load(second, 1)
    fleet.remove(second)
    slow.give_back()
    quick.give_back()
    assert fleet.with_leaving == []
    with pytest.raises(KeyError):
        fleet.pool(first)
    with pytest.raises(KeyError):
        fleet.pool(second)


def test_adding_a_known_address_changes_its_role_and_nothing_else():
    fleet, (a,) = fleet_of(A)
    taken = fleet.add_load(a, 1)
    assert fleet.add(A + "/v1", "decode") is a
    assert (a.role, a.in_flight, a.state) == ("decode", 1, "ready")
    taken.give_back()


@pytest.mark.parametrize(
    "url", ["a:1", "ftp://a", "http://a b", "http://ä", "", "http://a:99999", "http://a:x", "http://[a", "http://"]
)
def test_invalid_addresses_are_refused(url: str):
    fleet, workers = fleet_of(A)
    with pytest.raises(RequestError, match="http://HOST:PORT"):
        fleet.add(url)
    assert list(fleet) == workers


def test_candidates_are_those_that_are_ready_have_the_model_and_are_not_excluded():
    fleet, (a, b, c) = fleet_of(A, B, C)
    fleet.set_kind(b, "headgate", ["other"])
    fleet.probed(c, "paused")
    assert fleet.candidates("mixed", "m") == (a,)
    assert fleet.candidates("mixed", "other") == (b,)
    assert set(fleet.candidates("mixed", None)) == {a, b}
    assert set(fleet.candidates("mixed", "nobody has it")) == {a, b}  # its refusal lists the models
    assert fleet.candidates("mixed", "m", {a}) == ()
    assert fleet.candidates("mixed", "m") is fleet.candidates("mixed", "m")


def test_the_memory_for_unknown_model_names_is_bounded():
    fleet, _ = fleet_of(A)
    for i in range(5000):
        fleet.candidates("mixed", f"model-{i}")
    assert len(fleet._candidates) <= 1001


def test_roles_are_preferences():
    fleet, (a, b, c) = fleet_of(A, B, C)
    fleet.add(A, "prefill")
    fleet.add(B, "decode")
    assert fleet.disaggregated
    assert set(fleet.candidates("prefill", None)) == {a, c}
    assert set(fleet.candidates("decode", None)) == {b, c}
    for worker in (b, c):
        fleet.give_up(worker)
    assert fleet.candidates("decode", None) == (a,)
    assert not fleet.disaggregated


def test_55_a_worker_with_older_weights_than_the_fleet_gets_no_requests():
    fleet, (a, b, c) = fleet_of(A, B, C)
    for worker, version in ((a, 2), (b, 2), (c, 1)):
        fleet.set_version(worker, version)
    for worker in (a, b, c):
        fleet.probed(worker, "ready")
    assert c.state == "outdated" and set(fleet.candidates("mixed", None)) == {a, b}
    fleet.set_version(c, 2)
    fleet.probed(c, "ready")
    assert c.state == "ready"


def test_55_the_version_of_an_update_counts_even_against_a_majority():
    fleet, (a, b, c) = fleet_of(A, B, C)
    fleet.wanted_version = 2
    for worker, version in ((a, 2), (b, 1), (c, 1)):
        fleet.set_version(worker, version)
    for worker in (a, b, c):
        fleet.probed(worker, "ready")
    assert fleet.candidates("mixed", None) == (a,)


def test_the_retry_budget_is_a_share_of_requests():
    budget = RetryBudget()
    taken = 0
    while budget.take():
        taken += 1
    assert taken == RetryBudget.MOST
    for _ in range(100):
        budget.earn()
    assert sum(budget.take() for _ in range(100)) in (19, 20)
