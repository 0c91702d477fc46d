"""Calls written as a Python list, `[name(key=value, ...), ...]`, as the whole answer: Llama 3.2 and Llama 4.

Each argument is emitted when it is complete, because its value has to be converted from Python to JSON.
"""

from __future__ import annotations

from collections.abc import Collection

from headgate.text.parsers.scanner import EndOfText, Parser, Reading
from headgate.text.parsers.typed_values import Arguments, python_as_json

START, END = "<|python_start|>", "<|python_end|>"
_OPENING, _CLOSING = "([{", ")]}"


class PythonicCalls(Parser):
    """`names` are the tools that may be called; a list of anything else is content."""

    def __init__(self, *, names: Collection[str], seed: str) -> None:
        super().__init__(seed)
        self._names = frozenset(names)

    def _read(self) -> Reading[None]:
        scan = self._scan
        scan.mark()
        yield from scan.skip()
        yield from scan.match(START)
        yield from scan.skip()
        if (yield from scan.match("[")) is not None:
            yield from self._calls()
        self._fail()
        while True:
            self._out.say(scan.rest())
            yield from scan.more()

    def _calls(self) -> Reading[None]:
        """Read calls. Text since the mark is content when this returns."""
        scan = self._scan
        while True:
            yield from scan.skip()
            name = yield from scan.name("(,]")
            if name not in self._names or name is None or (yield from scan.match("(")) is None:
                return
            scan.unmark()
            if not (yield from self._call(name)):
                return
            yield from scan.skip()
            scan.mark()
            if (yield from scan.match(",", "]")) != ",":
                break
        scan.unmark()
        yield from scan.skip()
        yield from scan.match(END)

    def _call(self, name: str) -> Reading[bool]:
        """Read the arguments of a call; False if it breaks off, and the rest is content."""
        self._out.begin_call(name)
        scan, arguments = self._scan, Arguments(self._scan, self._out)
        while True:
            yield from scan.skip()
            if (yield from scan.match(")")) is not None:
                break
            scan.mark()
            key = yield from scan.name("=),")
            if key is None or (yield from scan.match("=")) is None:
                arguments.end()
                return False
            scan.unmark()
            arguments.key(key)
            yield from self._value()
            yield from scan.match(",")
        arguments.end()
        return True

    def _value(self) -> Reading[None]:
        """Read a value up to the comma or bracket after it."""
        reader = _ValueReader()
        while not reader.done:
            try:
                yield from self._scan.peek()
            except EndOfText:
                self._out.add_arguments(reader.text)
                raise
            self._scan.pass_to(reader.feed)
        self._out.add_arguments(python_as_json(reader.text))


class _ValueReader:
    """Finds the end of a Python value; tracks strings and brackets only."""

    def __init__(self) -> None:
        self.done = False
        self._pieces: list[str] = []
        self._depth = 0
        self._quote = ""  # the quotation mark of the open string
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str, at: int) -> int:
        for i in range(at, len(text)):
            if self._ends(text[i]):
                self.done = True
                self._pieces.append(text[at:i])
                return i
        self._pieces.append(text[at:])
        return len(text)

    def _ends(self, char: str) -> bool:
        if self._quote:
            self._read_quoted(char)
        elif char in "'\"":
            self._quote = char
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
        return self._depth < 0 or (char == "," and not self._depth and not self._quote)

    def _read_quoted(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""
