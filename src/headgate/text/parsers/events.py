"""What a parser finds in an answer, in order, and the `Output` that collects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. Only the first piece has `id` and `name`; the `arguments` pieces add up to JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Event = Reasoning | Content | CallDelta


class Output:
    """Collects events. Adjacent texts of one kind become one event.

    White space at the end of content is held back: it is dropped if a call follows, and if the answer ends after a call.
    `seed` determines the ids of calls: it is the request's id, so that a replayed stream has the same ids.
    """

    def __init__(self, seed: str) -> None:
        self.calls = 0  # number of calls begun so far
        self.in_call = False  # whether the last call is incomplete
        self._seed = seed
        self._events: list[Event] = []
        self._blanks: list[str] = []

    def say(self, text: str) -> None:
        if said := text.rstrip():
            self.pass_on("".join([*self._blanks, said]))
            self._blanks = []
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def pass_on(self, text: str) -> None:
        """Add content whose white space is not held back."""
        if text:
            self._events.append(Content(text))

    def think(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str, arguments: str = "") -> None:
        self._blanks = []
        self._events.append(CallDelta(self.calls, arguments, self._call_id(), name))
        self.calls += 1
        self.in_call = True

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        if text:
            self._events.append(CallDelta(self.calls - 1, text))

    def end_call(self) -> None:
        self.in_call = False

    def finish(self) -> None:
        """Release held white space, at the end of the answer."""
        if not self.calls:
            self.pass_on("".join(self._blanks))
        self._blanks = []

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events if len(events) < 2 else merged(events)

    def _call_id(self) -> str:
        return f"call_{blake2b(f'{self._seed}/{self.calls}'.encode(), digest_size=12).hexdigest()}"


def merged(events: Sequence[Event]) -> list[Event]:
    """The events with adjacent texts of one kind as one event."""
    return [_sum(list(run)) for _, run in groupby(events, _kind)]


def _kind(event: Event) -> object:
    return event.index if isinstance(event, CallDelta) else type(event)


def _sum(run: Sequence[Event]) -> Event:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, CallDelta):
        arguments = "".join(event.arguments for event in run if isinstance(event, CallDelta))
        return CallDelta(first.index, arguments, first.id, first.name)
    return type(first)("".join(event.text for event in run if not isinstance(event, CallDelta)))
