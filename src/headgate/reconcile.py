"""Computes the commands that bring one member of a group into the state that all members should have.

A group is the engines of a server, or the workers of a router. A member that was unreachable has missed commands: a
pause, a resume, new weights. `steps` is a pure function: from the desired state and the observed state of one member,
it returns the missing commands in order. The caller executes them and stops at the first that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class CatchUpStep(Enum):
    PAUSE = auto()  # because the group is paused
    PAUSE_FOR_UPDATE = auto()  # pause only for the time of the update, because the group is running
    UPDATE = auto()  # load the desired weights
    RESUME = auto()
    EXCLUDE = auto()  # send it no requests, because its weights are outdated and the desired ones cannot be sent


@dataclass(frozen=True, slots=True)
class Desired:
    """The state that every member should have."""

    paused: bool = False
    version: int | None = None  # version of the weights; None: any
    sendable: bool = False  # the weights can be sent to a member that lacks them


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of one member."""

    paused: bool = False
    version: int | None = None  # version of its weights; None: unknown
    missed_resume: bool = False  # it did not answer a resume


def is_outdated(wanted: Desired, observed: Observed) -> bool:
    """Whether the member's weights are older than the desired ones. Newer weights were loaded by another caller."""
    return None not in (wanted.version, observed.version) and observed.version < wanted.version  # type: ignore[operator]


def steps(wanted: Desired, observed: Observed) -> tuple[CatchUpStep, ...]:
    if observed.missed_resume and not wanted.paused:
        return (CatchUpStep.RESUME,)
    pause = (CatchUpStep.PAUSE,) if wanted.paused and not observed.paused else ()
    if not is_outdated(wanted, observed):
        return pause
    if not wanted.sendable:
        return (*pause, CatchUpStep.EXCLUDE)
    if wanted.paused:
        return (*pause, CatchUpStep.UPDATE)
    return CatchUpStep.PAUSE_FOR_UPDATE, CatchUpStep.UPDATE, CatchUpStep.RESUME
