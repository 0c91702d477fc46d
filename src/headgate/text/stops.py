"""Finds stop strings in a stream of deltas.

The stream ends at the stop string that is *completed* first, however the text is divided into deltas; if one
character completes two, the longer one counts. Only text that may be the beginning of a stop string is held back.

A resumed stream needs no state from before: the text held back when the stream broke was not delivered, so the
detokenizer produces it again for a new `StopStrings`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.errors import RequestError


class StopStrings:
    """Passes text through until one of `stops` appears in it; returns nothing after that."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise RequestError("a stop string must not be empty", param="stop")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self.held = ""  # always a proper prefix of a stop string
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Return the text that may be shown now. Once `matched` is set, the answer has ended."""
        if not self._stops:
            return delta
        if self.matched is not None:
            return ""
        text = self.held + delta
        if (match := self._first_match(text)) is not None:
            end, start, self.matched = match
            self.held = ""
            return text[: end if self._include_stop else start]
        safe = min(_possible_start(text, stop) for stop in self._stops)
        self.held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text held back for a stop string that did not appear."""
        held, self.held = self.held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=None)


def _possible_start(text: str, stop: str) -> int:
    """Return the first index in `text` from which the rest is a prefix of `stop`; the length of `text` if none is."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
