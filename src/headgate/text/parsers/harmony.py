"""The messages of gpt-oss: each has a channel, and may be addressed to a function.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

`analysis` is reasoning, and messages to functions are calls if there are tools. Everything else is content.
"""

from __future__ import annotations

import re

from headgate.text.parsers.scanner import MOST_NAME, Parser, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # a start without an end before it ends a message, too
MARKERS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class Harmony(Parser):
    """Without `thinks`, reasoning is content, too; without `calls`, messages to functions are."""

    def __init__(self, *, thinks: bool, calls: bool, seed: str) -> None:
        super().__init__(seed)
        self._thinks, self._calls = thinks, calls
        self._thinking = False
        self._spoken = ""  # the kinds of text that came before, so that two messages are separated

    @property
    def in_reasoning(self) -> bool:
        return self._thinking

    def _read(self) -> Reading[None]:
        scan = self._scan
        scan.mark()
        opening = yield from scan.match(START, CHANNEL, " to=")
        while True:
            ended_by = None if opening is None else (yield from self._message(opening))
            if ended_by == START:
                opening = START
            else:
                self._fail()
                # Text without a header is content.
                opening = yield from scan.until(START, CHANNEL, emit=self._out.say)
            scan.mark(len(opening))

    def _salvage(self, text: str) -> None:
        # A header that breaks off is markup; what only looks like one is content.
        if not text.startswith((START, CHANNEL)):
            super()._salvage(text)

    def _message(self, opening: str) -> Reading[str | None]:
        """Read a message, and return the marker that ended it; None if it has no header."""
        header = yield from self._scan.up_to(MESSAGE, MOST_NAME)
        if header is None:
            return None
        header = opening + header
        self._scan.unmark()
        channel, function = _CHANNEL.search(header), _RECIPIENT.search(header)
        if function and self._calls:
            return (yield from self._call(function[1]))
        if channel and channel[1] == "analysis" and self._thinks:
            return (yield from self._reasoning())
        self._separate("content")
        return (yield from self._scan.until(*ENDS, emit=self._out.say))

    def _reasoning(self) -> Reading[str]:
        self._separate("reasoning")
        self._thinking = True
        ended_by = yield from self._scan.until(*ENDS, emit=self._out.think)
        self._thinking = False
        return ended_by

    def _call(self, name: str) -> Reading[str]:
        self._out.begin_call(name)
        given = False

        def add(text: str) -> None:
            nonlocal given
            given |= bool(text)
            self._out.add_arguments(text)

        ended_by = yield from self._scan.until(*ENDS, emit=add)
        if not given:
            self._out.add_arguments("{}")
        self._out.end_call()
        return ended_by

    def _separate(self, kind: str) -> None:
        """Put a newline between two messages of one kind."""
        if kind in self._spoken and kind == "reasoning":
            self._out.think("\n")
        elif kind in self._spoken:
            self._out.say("\n")
        self._spoken += kind
