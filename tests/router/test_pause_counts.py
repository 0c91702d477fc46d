"""A pause counts each request once, although several workers may have ended attempts at it."""

from __future__ import annotations

from headgate.contract.control import FleetResult, RequestName
from headgate.router.control.results import count_requests

A, B, C = ("ann", "x"), ("bob", "x"), ("ann", "y")


def named(aborted: list[RequestName], finished: list[RequestName]) -> FleetResult:
    return FleetResult(
        is_paused=True,
        state="paused",
        aborted=len(aborted),
        finished=len(finished),
        aborted_requests=aborted,
        finished_requests=finished,
    )


def test_72_a_request_that_two_workers_ended_is_one_count():
    assert count_requests([named([A, C], []), named([A], [])], []) == (2, 0)


def test_72_two_tenants_requests_of_the_same_id_are_two_counts():
    assert count_requests([named([A, B], [])], []) == (2, 0)


def test_72_a_request_that_the_router_ended_is_counted_with_those_of_workers():
    assert count_requests([named([A], [])], [A, C]) == (2, 0)


def test_72_a_request_that_finished_at_a_lost_worker_and_was_aborted_is_aborted():
    assert count_requests([named([], [A, B]), named([A], [])], []) == (1, 1)


def test_counts_of_workers_that_name_no_requests_are_added():
    counts_only = FleetResult(is_paused=True, state="paused", aborted=2, finished=1)
    assert count_requests([named([A], []), counts_only], []) == (3, 1)
