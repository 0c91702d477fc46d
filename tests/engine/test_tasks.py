"""Errors of task groups."""

from __future__ import annotations

import pytest

from headgate.engine.tasks import lone_errors
from headgate.errors import EngineDead


def test_a_single_error_is_raised_without_its_groups():
    with pytest.raises(EngineDead, match="killed"), lone_errors():
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [EngineDead("killed")])])


def test_two_reports_of_one_failure_are_raised_as_the_first():
    """Regression: an engine that was killed and did not answer ended the server (found by seed 779757294146)."""
    with pytest.raises(EngineDead, match="killed"), lone_errors():
        raise ExceptionGroup("outer", [EngineDead("killed"), ExceptionGroup("inner", [EngineDead("no answer")])])


def test_a_bug_beside_an_expected_error_is_not_hidden():
    with pytest.raises(ExceptionGroup) as raised, lone_errors():
        raise ExceptionGroup("outer", [EngineDead("killed"), KeyError("bug")])
    assert raised.value.subgroup(KeyError) is not None
