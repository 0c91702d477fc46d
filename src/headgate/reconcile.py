"""What brings a member of a fleet into the state that the fleet was last asked for.

Members are the engines of a server and the servers of a router. A member that was away has missed what was asked meanwhile:
a pause, a resume, new weights. `steps` is pure: from what is wanted of the fleet and what is observed of one member it
returns the commands that are still to be given, in their order. The caller gives them, and stops at the first that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class CatchUpStep(Enum):
    PAUSE = auto()  # as the fleet is paused
    PAUSE_FOR_UPDATE = auto()  # of a fleet that runs
    UPDATE = auto()  # to the fleet's weights
    RESUME = auto()
    EXCLUDE = auto()  # from requests: it has older weights than the fleet, and cannot be given them


@dataclass(frozen=True, slots=True)
class Desired:
    """Of every member."""

    paused: bool = False
    version: int | None = None  # of the weights; None: whatever a member has
    sendable: bool = False  # the weights can be given to a member that lacks them


@dataclass(frozen=True, slots=True)
class Observed:
    """Of one member."""

    paused: bool = False
    version: int | None = None  # of its weights; None: not known
    missed_resume: bool = False  # it was asked to resume, and has not answered


def is_outdated(wanted: Desired, observed: Observed) -> bool:
    """Newer weights than the fleet's are not outdated: another caller has given them."""
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
