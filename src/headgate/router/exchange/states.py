"""The states of a routed request, as a table: `transition(state, event, facts)` returns the next state and the actions.

    state       owns                                    event -> next state: actions

    QUEUED      nothing                                 ADMITTED -> PLACING: place; REFUSED -> CLOSED: report the error
    PLACING     a place in flight                       PLACED -> CONNECTING: connect; SPLIT -> PREFILLING: get a ticket;
                                                        NO_WORKER -> CLOSED: report the last outcome
    PREFILLING  place, load on two workers,             TICKET -> CONNECTING: connect;
                a prefill request                       HELD -> PLACING: undo the placement, place
    CONNECTING  place, load                             CONNECTED -> ASKING: send; a failed connection: an outcome, below
    ASKING      place, load, an attempt                 FIRST_BYTES -> STREAMING; outcomes: below; END_ASKED -> ENDING
    STREAMING   the same; the client has a part         as in ASKING
    MOVING      a place in flight                       FORMER_ENDED -> PLACING: place
    ENDING      as in ASKING; the worker was asked      FINAL -> CLOSED: pass on; other outcomes: end
                to end the request
    RENDERING   as in ASKING; the request has ended,    FINAL -> CLOSED: pass on; UNFINISHED: another worker, or report the
                a worker turns its token ids into text  end; other outcomes -> CLOSED: report the end
    CLOSED      nothing                                 every event -> CLOSED

Outcomes of an attempt: FINAL -> CLOSED: pass on. EXHAUSTED (no further attempt is allowed) -> CLOSED: report the last
outcome. STALE (a kept connection had been closed) -> CONNECTING on a fresh one. OVERTAKEN (refused because a pause reached
the worker first) -> PLACING. UNFINISHED -> PLACING, or MOVING while the worker still has an earlier attempt.

In every state: END_NOW and END_ASKED end the request (report the end -> CLOSED, or -> RENDERING if the router does
not know the text of the answer); DEADLINE -> CLOSED: report the end, after extra time for the worker that has the
request; GONE (the client disconnected) and CLOSING (the router stops) -> CLOSED. While the fleet is paused, nothing
is sent: a request that would be sent goes back to PLACING. If the pause aborts requests, a request that would be
placed again ends.

Entering CLOSED gives back everything that the state owned, once. The relay carries out the actions; this module is
pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class State(Enum):
    __hash__ = object.__hash__  # hashes by identity; the hash of Enum is computed in Python, which is slow

    QUEUED = auto()
    PLACING = auto()
    PREFILLING = auto()
    CONNECTING = auto()
    ASKING = auto()
    STREAMING = auto()
    MOVING = auto()
    ENDING = auto()
    RENDERING = auto()
    CLOSED = auto()


# The relay compares with these for every request: looking up a global costs a tenth of looking up an Enum member.
QUEUED, PLACING, ASKING, STREAMING, CLOSED = State.QUEUED, State.PLACING, State.ASKING, State.STREAMING, State.CLOSED


class Event(Enum):
    __hash__ = object.__hash__  # hashes by identity; the hash of Enum is computed in Python, which is slow

    ADMITTED = auto()
    REFUSED = auto()  # admission raised an error
    PLACED = auto()  # on one worker
    SPLIT = auto()  # on two: one computes the prompt for the other
    NO_WORKER = auto()
    TICKET = auto()  # the prefill request was answered, with a ticket or without
    CONNECTED = auto()
    FIRST_BYTES = auto()  # the first bytes of a streamed answer have arrived
    FINAL = auto()
    EXHAUSTED = auto()
    STALE = auto()
    OVERTAKEN = auto()
    UNFINISHED = auto()
    FORMER_ENDED = auto()  # the earlier attempt at the same worker has ended
    HELD = auto()  # the fleet is being paused
    END_ASKED = auto()  # the worker that has the request was asked to end it
    END_NOW = auto()
    DEADLINE = auto()
    GONE = auto()
    CLOSING = auto()


class Action(Enum):
    __hash__ = object.__hash__  # hashes by identity; the hash of Enum is computed in Python, which is slow

    ADMIT = auto()
    PLACE = auto()
    PREFILL = auto()
    CONNECT = auto()
    CONNECT_FRESH = auto()
    SEND = auto()
    UNDO = auto()  # undo the placement, because no worker was asked
    DROP = auto()  # abandon the attempt and its placement
    COUNT_MOVE = auto()
    END_FORMER = auto()
    START_GRACE = auto()
    GIVE_UP = auto()  # stop waiting for the worker, so that another one answers
    END_BY_PAUSE = auto()  # set the cause to the pause, unless there is a cause
    END_BY_DEADLINE = auto()
    RENDER = auto()
    RENDER_AGAIN = auto()  # ask another worker for the text
    PASS_ON = auto()
    PASS_TEXT_ON = auto()
    REPORT_LAST = auto()
    REPORT_END = auto()
    REPORT_ERROR = auto()
    REPORT_CLOSING = auto()


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts on which a transition depends, in addition to state and event."""

    holding: bool = False  # the fleet is paused, or being paused: nothing is sent
    aborting: bool = False  # a pause is to end this request
    text_missing: bool = False  # the tokens of the answer are known, but its text is not; a worker could render it
    former: bool = False  # the worker refused the request because it still has an earlier attempt
    graces: int = 0  # how often workers were given extra time since the deadline
    others: bool = False  # another worker could end the request after its deadline


Step = tuple[State, tuple[Action, ...]]
Rule = Step | Callable[[Facts], Step]

MOST_GRACES: Final = 2


class Impossible(Exception):
    """An event happened that is impossible in this state, which is a bug in the relay."""


def transition(state: State, event: Event, facts: Facts) -> Step:
    rule = TABLE[state].get(event)
    if rule is None:
        raise Impossible(f"{event.name} in {state.name}")
    return rule(facts) if callable(rule) else rule


def _end(facts: Facts, *before: Action) -> Step:
    if facts.text_missing:
        return State.RENDERING, (*before, Action.RENDER)
    return State.CLOSED, (*before, Action.REPORT_END)


def _unless_held(state: State, action: Action) -> Rule:
    """Carry out `action`, which sends something, unless the fleet was paused meanwhile."""
    return lambda facts: (State.PLACING, (Action.UNDO, Action.PLACE)) if facts.holding else (state, (action,))


def _exhausted(facts: Facts) -> Step:
    if facts.aborting:
        return _end(facts, Action.COUNT_MOVE, Action.END_BY_PAUSE)
    return State.CLOSED, (Action.REPORT_LAST,)


def _overtaken(facts: Facts) -> Step:
    return _end(facts, Action.END_BY_PAUSE) if facts.aborting else (State.PLACING, (Action.PLACE,))


def _unfinished(facts: Facts) -> Step:
    if facts.aborting:
        return _end(facts, Action.COUNT_MOVE, Action.END_BY_PAUSE)
    if facts.former:
        return State.MOVING, (Action.COUNT_MOVE, Action.END_FORMER)
    return State.PLACING, (Action.COUNT_MOVE, Action.PLACE)


def _former_ended(facts: Facts) -> Step:
    return _end(facts, Action.END_BY_PAUSE) if facts.aborting else (State.PLACING, (Action.PLACE,))


def _rendered_nothing(facts: Facts) -> Step:
    """The worker did not render the text: ask another one, if possible, else report the end without text."""
    if facts.text_missing:
        return State.RENDERING, (Action.COUNT_MOVE, Action.RENDER_AGAIN)
    return State.CLOSED, (Action.COUNT_MOVE, Action.REPORT_END)


def _overdue(state: State) -> Rule:
    """At the deadline, give the worker extra time to end the request; after that, give extra time to another worker.

    A worker knows the usage and the text that it holds back; the router does not.
    """

    def rule(facts: Facts) -> Step:
        if not facts.graces:
            return state, (Action.START_GRACE,)
        if facts.graces < MOST_GRACES and facts.others:
            return state, (Action.START_GRACE, Action.GIVE_UP)
        return _LATE

    return rule


_CLOSED: Final[Step] = (State.CLOSED, ())
_LATE: Final[Step] = (State.CLOSED, (Action.END_BY_DEADLINE, Action.REPORT_END))
_END: Final[Mapping[Event, Rule]] = {
    Event.END_ASKED: _end,
    Event.END_NOW: _end,
    Event.DEADLINE: _LATE,
    Event.GONE: _CLOSED,
    Event.CLOSING: (State.CLOSED, (Action.REPORT_CLOSING,)),
}
_ENDED: Final[Mapping[Event, Rule]] = {
    Event.GONE: _CLOSED,
    Event.CLOSING: (State.CLOSED, (Action.REPORT_END,)),
}


def _attempt(state: State) -> Mapping[Event, Rule]:
    """The rules of ASKING and STREAMING."""
    return {
        Event.FIRST_BYTES: (State.STREAMING, ()),
        Event.FINAL: (State.CLOSED, (Action.PASS_ON,)),
        Event.EXHAUSTED: _exhausted,
        Event.STALE: (State.CONNECTING, (Action.CONNECT_FRESH,)),
        Event.OVERTAKEN: _overtaken,
        Event.UNFINISHED: _unfinished,
        Event.HELD: (state, ()),
        **_END,
        Event.END_ASKED: (State.ENDING, ()),
        Event.END_NOW: lambda facts: _end(facts, Action.DROP),
        Event.DEADLINE: _overdue(state),
    }


TABLE: Final[Mapping[State, Mapping[Event, Rule]]] = {
    State.QUEUED: {
        Event.ADMITTED: (State.PLACING, (Action.PLACE,)),
        Event.REFUSED: (State.CLOSED, (Action.REPORT_ERROR,)),
        Event.HELD: (State.QUEUED, ()),
        **_END,
    },
    State.PLACING: {
        Event.PLACED: _unless_held(State.CONNECTING, Action.CONNECT),
        Event.SPLIT: _unless_held(State.PREFILLING, Action.PREFILL),
        Event.NO_WORKER: (State.CLOSED, (Action.REPORT_LAST,)),
        Event.HELD: (State.PLACING, ()),
        **_END,
    },
    State.PREFILLING: {
        Event.TICKET: _unless_held(State.CONNECTING, Action.CONNECT),
        Event.HELD: (State.PLACING, (Action.UNDO, Action.PLACE)),
        **_END,
    },
    State.CONNECTING: {
        Event.CONNECTED: _unless_held(State.ASKING, Action.SEND),
        Event.EXHAUSTED: _exhausted,
        Event.UNFINISHED: _unfinished,
        Event.HELD: (State.CONNECTING, ()),
        **_END,
    },
    State.ASKING: _attempt(State.ASKING),
    State.STREAMING: _attempt(State.STREAMING),
    State.MOVING: {
        Event.FORMER_ENDED: _former_ended,
        Event.HELD: (State.MOVING, ()),
        **_END,
    },
    State.ENDING: {
        Event.FIRST_BYTES: (State.ENDING, ()),
        Event.FINAL: (State.CLOSED, (Action.PASS_ON,)),
        Event.EXHAUSTED: lambda facts: _end(facts, Action.COUNT_MOVE),
        Event.OVERTAKEN: _end,
        Event.UNFINISHED: lambda facts: _end(facts, Action.COUNT_MOVE),
        Event.HELD: (State.ENDING, ()),
        Event.END_ASKED: (State.ENDING, ()),
        Event.END_NOW: lambda facts: _end(facts, Action.DROP),
        Event.DEADLINE: _overdue(State.ENDING),
        **_ENDED,
    },
    State.RENDERING: {
        Event.NO_WORKER: (State.CLOSED, (Action.REPORT_END,)),
        Event.CONNECTED: lambda facts: (
            (State.CLOSED, (Action.REPORT_END,)) if facts.holding else (State.RENDERING, (Action.SEND,))
        ),
        Event.FIRST_BYTES: (State.RENDERING, ()),
        Event.FINAL: (State.CLOSED, (Action.PASS_TEXT_ON,)),
        Event.EXHAUSTED: (State.CLOSED, (Action.REPORT_END,)),
        Event.OVERTAKEN: (State.CLOSED, (Action.REPORT_END,)),
        Event.UNFINISHED: _rendered_nothing,
        Event.HELD: (State.RENDERING, ()),
        Event.END_ASKED: (State.RENDERING, ()),
        Event.END_NOW: (State.CLOSED, (Action.REPORT_END,)),
        Event.DEADLINE: (State.CLOSED, (Action.REPORT_END,)),
        **_ENDED,
    },
    State.CLOSED: dict.fromkeys(Event, _CLOSED),
}
