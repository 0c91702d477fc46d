"""Catch-up steps for every combination of desired and observed state (guarantees 24, 29, 55, 75)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headgate.reconcile import CatchUpStep, Desired, Observed, is_outdated, steps

PAUSE, HOLD, UPDATE, RESUME, EXCLUDE = (
    CatchUpStep.PAUSE,
    CatchUpStep.PAUSE_FOR_UPDATE,
    CatchUpStep.UPDATE,
    CatchUpStep.RESUME,
    CatchUpStep.EXCLUDE,
)
WANTED = [Desired(*values) for values in itertools.product((False, True), (None, 1, 2), (False, True))]
OBSERVED = [Observed(*values) for values in itertools.product((False, True), (None, 1, 2), (False, True))]


@pytest.mark.parametrize(
    ("wanted", "observed", "expected"),
    [
        (Desired(), Observed(), ()),
        (Desired(), Observed(paused=True), ()),  # paused by another caller, which will resume it
        (Desired(), Observed(paused=True, missed_resume=True), (RESUME,)),
        (Desired(paused=True), Observed(), (PAUSE,)),
        (Desired(paused=True), Observed(paused=True), ()),
        (Desired(paused=True), Observed(missed_resume=True), (PAUSE,)),
        (Desired(version=2, sendable=True), Observed(version=1), (HOLD, UPDATE, RESUME)),
        (Desired(version=2, sendable=True), Observed(version=1, paused=True), (HOLD, UPDATE, RESUME)),
        (Desired(version=2, sendable=True, paused=True), Observed(version=1), (PAUSE, UPDATE)),
        (Desired(version=2, sendable=True, paused=True), Observed(version=1, paused=True), (UPDATE,)),
        (Desired(version=2), Observed(version=1), (EXCLUDE,)),
        (Desired(version=2, paused=True), Observed(version=1), (PAUSE, EXCLUDE)),
        (Desired(version=1, sendable=True), Observed(version=2), ()),
        (Desired(version=2, sendable=True), Observed(), ()),  # its version must be queried first
    ],
)
def test_steps_for_each_combination(wanted, observed, expected):
    assert steps(wanted, observed) == expected


@pytest.mark.parametrize("wanted", WANTED, ids=repr)
@pytest.mark.parametrize("observed", OBSERVED, ids=repr)
def test_a_member_that_has_caught_up_needs_no_more_steps(wanted, observed):
    """A missed resume comes first; other missed commands follow when the member is checked again."""
    for _ in range(2):
        observed = followed(wanted, observed)
    assert observed.paused or not wanted.paused
    assert set(steps(wanted, observed)) == ({EXCLUDE} if is_outdated(wanted, observed) else set())
    assert not (is_outdated(wanted, observed) and wanted.sendable)


def followed(wanted: Desired, observed: Observed) -> Observed:
    """The state of the member after it has executed all steps."""
    for step in steps(wanted, observed):
        match step:
            case CatchUpStep.PAUSE | CatchUpStep.PAUSE_FOR_UPDATE:
                observed = replace(observed, paused=True)
            case CatchUpStep.UPDATE:
                assert observed.paused, "weights change only in a pause"
                observed = replace(observed, version=wanted.version)
            case CatchUpStep.RESUME:
                assert not wanted.paused, "no step ends the pause of a fleet"
                observed = replace(observed, paused=False, missed_resume=False)
    return observed
