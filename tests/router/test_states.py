"""The state table of a routed request: every state with every event, and properties of every walk through it."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Final

import pytest

from headgate.router.exchange.states import Action, Event, Facts, Impossible, State, Step, transition

# A deliberate second copy of the table, with the default facts. `-` marks events that cannot happen.
EXPECTED: Final = """
              QUEUED            PLACING           PREFILLING        CONNECTING        ASKING            STREAMING         MOVING            ENDING            RENDERING
ADMITTED      PLACING:place     -                 -                 -                 -                 -                 -                 -                 -
REFUSED       CLOSED:error      -                 -                 -                 -                 -                 -                 -                 -
PLACED        -                 CONNECTING:conn   -                 -                 -                 -                 -                 -                 -
SPLIT         -                 PREFILLING:pre    -                 -                 -                 -                 -                 -                 -
NO_WORKER     -                 CLOSED:last       -                 -                 -                 -                 -                 -                 CLOSED:end
TICKET        -                 -                 CONNECTING:conn   -                 -                 -                 -                 -                 -
CONNECTED     -                 -                 -                 ASKING:send       -                 -                 -                 -                 RENDERING:send
FIRST_BYTES   -                 -                 -                 -                 STREAMING         STREAMING         -                 ENDING            RENDERING
FINAL         -                 -                 -                 -                 CLOSED:pass       CLOSED:pass       -                 CLOSED:pass       CLOSED:text
EXHAUSTED     -                 -                 -                 CLOSED:last       CLOSED:last       CLOSED:last       -                 CLOSED:move,end   CLOSED:end
STALE         -                 -                 -                 -                 CONNECTING:fresh  CONNECTING:fresh  -                 -                 -
OVERTAKEN     -                 -                 -                 -                 PLACING:place     PLACING:place     -                 CLOSED:end        CLOSED:end
UNFINISHED    -                 -                 -                 PLACING:move,place PLACING:move,place PLACING:move,place -              CLOSED:move,end   CLOSED:move,end
FORMER_ENDED  -                 -                 -                 -                 -                 -                 PLACING:place     -                 -
HELD          QUEUED            PLACING           PLACING:undo,place CONNECTING       ASKING            STREAMING         MOVING            ENDING            RENDERING
END_ASKED     CLOSED:end        CLOSED:end        CLOSED:end        CLOSED:end        ENDING            ENDING            CLOSED:end        ENDING            RENDERING
END_NOW       CLOSED:end        CLOSED:end        CLOSED:end        CLOSED:end        CLOSED:drop,end   CLOSED:drop,end   CLOSED:end        CLOSED:drop,end   CLOSED:end
DEADLINE      CLOSED:late,end   CLOSED:late,end   CLOSED:late,end   CLOSED:late,end   ASKING:grace      STREAMING:grace   CLOSED:late,end   ENDING:grace      CLOSED:end
GONE          CLOSED            CLOSED            CLOSED            CLOSED            CLOSED            CLOSED            CLOSED            CLOSED            CLOSED
CLOSING       CLOSED:closing    CLOSED:closing    CLOSED:closing    CLOSED:closing    CLOSED:closing    CLOSED:closing    CLOSED:closing    CLOSED:end        CLOSED:end
"""  # noqa: E501
SHORT: Final = {
    "place": Action.PLACE,
    "pre": Action.PREFILL,
    "conn": Action.CONNECT,
    "fresh": Action.CONNECT_FRESH,
    "send": Action.SEND,
    "undo": Action.UNDO,
    "drop": Action.DROP,
    "move": Action.COUNT_MOVE,
    "former": Action.END_FORMER,
    "grace": Action.START_GRACE,
    "give_up": Action.GIVE_UP,
    "pause": Action.END_BY_PAUSE,
    "late": Action.END_BY_DEADLINE,
    "render": Action.RENDER,
    "again": Action.RENDER_AGAIN,
    "pass": Action.PASS_ON,
    "text": Action.PASS_TEXT_ON,
    "last": Action.REPORT_LAST,
    "end": Action.REPORT_END,
    "error": Action.REPORT_ERROR,
    "closing": Action.REPORT_CLOSING,
}
REPORTS: Final = {
    action for name, action in SHORT.items() if name in ("pass", "text", "last", "end", "error", "closing")
}
SENDING: Final = {Action.CONNECT, Action.CONNECT_FRESH, Action.PREFILL, Action.SEND}
ALL_FACTS: Final = [
    Facts(*flags, graces=graces, others=others)
    for *flags, graces, others in itertools.product(*[(False, True)] * 4, (0, 1, 2), (False, True))
]


def step(text: str) -> Step:
    state, _, actions = text.partition(":")
    return State[state], tuple(SHORT[name] for name in actions.split(",") if name)


@cache
def expected() -> dict[tuple[State, Event], Step | None]:
    header, *rows = EXPECTED.strip("\n").splitlines()
    states = [State[name] for name in header.split()]
    return {
        (state, Event[name]): None if cell == "-" else step(cell)
        for name, *cells in (row.split() for row in rows)
        for state, cell in zip(states, cells, strict=True)
    } | {(State.CLOSED, event): step("CLOSED") for event in Event}


def after(state: State, event: Event, facts: Facts = Facts()) -> Step | None:  # noqa: B008 (a frozen value)
    try:
        return transition(state, event, facts)
    except Impossible:
        return None


def test_the_expected_table_has_every_pair_of_state_and_event():
    assert expected().keys() == set(itertools.product(State, Event))


@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state_leads_where_the_table_says(state: State):
    assert {event: after(state, event) for event in Event} == {
        event: step for (of, event), step in expected().items() if of is state
    }


@pytest.mark.parametrize("state", State)
def test_the_events_possible_in_a_state_do_not_depend_on_facts(state: State):
    for event, facts in itertools.product(Event, ALL_FACTS):
        assert (after(state, event, facts) is None) == (expected()[state, event] is None)


@pytest.mark.parametrize(
    ("state", "event", "facts", "leads_to"),
    [
        ("PLACING", "PLACED", Facts(holding=True), "PLACING:undo,place"),
        ("PLACING", "SPLIT", Facts(holding=True), "PLACING:undo,place"),
        ("PREFILLING", "TICKET", Facts(holding=True), "PLACING:undo,place"),
        ("CONNECTING", "CONNECTED", Facts(holding=True), "PLACING:undo,place"),
        ("RENDERING", "CONNECTED", Facts(holding=True), "CLOSED:end"),
        ("ASKING", "OVERTAKEN", Facts(aborting=True), "CLOSED:pause,end"),
        ("ASKING", "UNFINISHED", Facts(aborting=True), "CLOSED:move,pause,end"),
        ("STREAMING", "EXHAUSTED", Facts(aborting=True), "CLOSED:move,pause,end"),
        ("STREAMING", "UNFINISHED", Facts(aborting=True, text_missing=True), "RENDERING:move,pause,render"),
        ("ASKING", "UNFINISHED", Facts(former=True), "MOVING:move,former"),
        ("MOVING", "FORMER_ENDED", Facts(aborting=True), "CLOSED:pause,end"),
        ("PLACING", "END_NOW", Facts(text_missing=True), "RENDERING:render"),
        ("ENDING", "END_NOW", Facts(text_missing=True), "RENDERING:drop,render"),
        ("ENDING", "UNFINISHED", Facts(text_missing=True), "RENDERING:move,render"),
        ("RENDERING", "UNFINISHED", Facts(text_missing=True), "RENDERING:move,again"),
        ("RENDERING", "DEADLINE", Facts(text_missing=True), "CLOSED:end"),
        ("STREAMING", "DEADLINE", Facts(graces=1, others=True), "STREAMING:grace,give_up"),
        ("STREAMING", "DEADLINE", Facts(graces=1), "CLOSED:late,end"),
        ("STREAMING", "DEADLINE", Facts(graces=2, others=True), "CLOSED:late,end"),
    ],
)
def test_transitions_that_depend_on_facts(state: str, event: str, facts: Facts, leads_to: str):
    assert transition(State[state], Event[event], facts) == step(leads_to)


def test_the_shortcuts_of_the_relay_are_paths_of_the_table():
    """A request that need not wait goes from QUEUED to ASKING, and from there to CLOSED, without the table."""
    state, done = State.QUEUED, []
    for event in (Event.ADMITTED, Event.PLACED, Event.CONNECTED):
        state, actions = transition(state, event, Facts())
        done += actions
    assert (state, done) == (State.ASKING, [Action.PLACE, Action.CONNECT, Action.SEND])
    assert transition(State.ASKING, Event.FIRST_BYTES, Facts()) == (State.STREAMING, ())
    for state, facts in itertools.product((State.ASKING, State.STREAMING, State.ENDING), ALL_FACTS):
        assert transition(state, Event.FINAL, facts) == (State.CLOSED, (Action.PASS_ON,))


def test_nothing_is_sent_while_the_fleet_is_paused():
    """A stale connection is no exception: its worker is asked again only after CONNECTED."""
    for (state, event), facts in itertools.product(expected(), ALL_FACTS):
        came = after(state, event, facts) if facts.holding else None
        if came is not None and event is not Event.STALE:
            assert SENDING.isdisjoint(came[1])


def test_every_walk_ends_with_one_report_and_sends_nothing_after_an_end_was_requested():
    for seed in range(2000):
        rng, state, reports, ended, gone = random.Random(seed), State.QUEUED, 0, False, False
        for _ in range(200):
            facts = rng.choice(ALL_FACTS)
            event = rng.choice([event for event in Event if expected()[state, event] is not None])
            state, actions = transition(state, event, facts)
            reports += len(REPORTS.intersection(actions))
            ended |= event in (Event.END_ASKED, Event.END_NOW) or Action.END_BY_PAUSE in actions
            gone |= event is Event.GONE
            assert not (ended and {Action.PLACE, Action.PREFILL, Action.CONNECT} & set(actions)), seed
            if state is State.CLOSED:
                break
        assert state is State.CLOSED and reports == (0 if gone else 1), seed
