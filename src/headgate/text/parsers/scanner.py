"""Reads text that arrives in pieces: generators that wait for more text wherever the text so far is ambiguous.

A method returns as soon as no later text can change its result. What a parser has emitted therefore depends on the text
that it has received, never on how that text was divided, and a parser that receives the same text elsewhere continues
exactly. Each character is read a bounded number of times.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from headgate.text.parsers.events import Event, Output

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields whenever it needs more text
Emit = Callable[[str], None]

MOST_NAME = 256  # longest name of a function or parameter; a longer one is content


class EndOfText(Exception):
    """The answer ended while more text was needed. Text since a mark is content; other text that is pending is dropped."""


class Scanner:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # start of the text that was not read
        self._mark: int | None = None  # start of markup that is content if it proves malformed
        self._ended = False

    def add(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text, self._at = self._text[kept:] + text, self._at - kept
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        self._ended = True

    # -- markup that may prove malformed ------------------------------------------------

    def mark(self, before: int = 0) -> None:
        """Remember the current position, less the `before` characters that were read last."""
        self._mark = self._at - before

    def unmark(self) -> None:
        self._mark = None

    def take_marked(self) -> str:
        """The text since the mark, which was read in vain; "" without a mark."""
        marked = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return marked

    # -- reading ------------------------------------------------------------------------

    def more(self) -> Reading[None]:
        if self._ended:
            self._at = len(self._text)
            raise EndOfText
        yield

    def peek(self) -> Reading[str]:
        """The next character, which is not consumed."""
        while self._at >= len(self._text):
            yield from self.more()
        return self._text[self._at]

    def pop(self) -> Reading[str]:
        char = yield from self.peek()
        self._at += 1
        return char

    def rest(self) -> str:
        """All text that has arrived."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def pass_to(self, reader: Callable[[str, int], int]) -> None:
        """Pass the text and the position to `reader`, which returns the position up to which it has read."""
        self._at = reader(self._text, self._at)

    def until(self, *markers: str, emit: Emit) -> Reading[str]:
        """Emit the text before the first of `markers`, and return that marker, which is consumed.

        If the answer ends first, the rest of the text is emitted. No marker may be the beginning of another one.
        """
        pattern = _any_of(markers)
        while True:
            if found := pattern.search(self._text, self._at):
                emit(self._text[self._at : found.start()])
                self._at = found.end()
                return found[0]
            safe = self._safe_end(markers)
            emit(self._text[self._at : safe])
            self._at = safe
            if self._ended:
                emit(self.rest())
            yield from self.more()

    def _safe_end(self, markers: tuple[str, ...]) -> int:
        """Where the text ends that is certainly not the beginning of a marker."""
        end = len(self._text)
        return end - max(overlap(self._text, marker, self._at) for marker in markers)

    def match(self, *options: str) -> Reading[str | None]:
        """Consume and return the one of `options` with which the text continues; None if there is none.

        No option may be the beginning of another one.
        """
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    self._at += len(option)
                    return option
            rest = self._text[self._at : self._at + max(map(len, options))]
            if not any(option.startswith(rest) for option in options):
                return None
            yield from self.more()

    def skip(self, chars: str = " \t\r\n") -> Reading[str]:
        """Consume and return all characters that are in `chars`."""
        skipped = []
        while (yield from self.peek()) in chars:
            skipped.append(self._text[self._at])
            self._at += 1
        return "".join(skipped)

    def name(self, ends: str) -> Reading[str | None]:
        """Consume a name up to one of the characters in `ends`, which stays; None if no name ends there."""
        read: list[str] = []
        while (char := (yield from self.peek())) not in ends:
            if len(read) == MOST_NAME or not (char.isalnum() or char in "_-./:$ "):
                return None
            read.append(char)
            self._at += 1
        return "".join(read).strip() or None

    def up_to(self, marker: str, most: int) -> Reading[str | None]:
        """Consume the text before `marker` and the marker; None if it does not begin within `most` characters."""
        while True:
            found = self._text.find(marker, self._at, self._at + most + len(marker))
            if found >= 0:
                text, self._at = self._text[self._at : found], found + len(marker)
                return text
            if len(self._text) - self._at >= most + len(marker):
                return None
            yield from self.more()


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def overlap(text: str, marker: str, start: int = 0) -> int:
    """How many characters at the end of `text[start:]` may be the beginning of `marker`."""
    longest = min(len(text) - start, len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


class Parser(ABC):
    """Divides one answer into events as its text arrives. The text is that of the answer without stop strings."""

    def __init__(self, seed: str = "") -> None:
        self._scan = Scanner()
        self._out = Output(seed)
        self._steps = self._read()

    @property
    def called(self) -> bool:
        """Whether a call has begun. The finish reason is then "tool_calls", if the answer ended by itself."""
        return self._out.calls > 0

    @property
    def in_call(self) -> bool:
        return self._out.in_call

    @property
    def in_reasoning(self) -> bool:
        return False

    def feed(self, text: str) -> list[Event]:
        """The events that `text` adds. None contains markup."""
        if text:
            self._scan.add(text)
            next(self._steps)
        return self._out.take()

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call this once, at the end of the answer."""
        self._scan.end()
        try:
            next(self._steps)
        except EndOfText:
            self._salvage(self._scan.take_marked())
        self._out.finish()
        return self._out.take()

    def _salvage(self, text: str) -> None:
        """The answer ended in `text`, which may be markup. Within a call it is; otherwise it is content."""
        if not self._out.in_call:
            self._out.say(text)

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the answer, without returning."""

    def _fail(self) -> None:
        """What was read since the mark is not markup: it is content."""
        self._out.say(self._scan.take_marked())
