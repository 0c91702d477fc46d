"""Calls that are JSON objects with a name and arguments, between the markers of a model family.

Content and calls are emitted as soon as no later text can change them. Text that may still become markup is held
back. Text that looked like a call and turns out not to be one is emitted as content, in full. Once a call's name has
been emitted, the call is final, and its arguments are emitted unchanged, exactly as the model writes them.

The formats are those of the models' chat templates. Models sometimes leave out the marker, so an answer that *begins*
like a call to a known tool is a call, with or without a marker.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from headgate.text.parsers.scanner import Parser, Reading


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup of a format: what a parser accepts around calls, and what a grammar enforces there.

    The parser uses the fields up to `closing`, a grammar those from `arguments` on.
    """

    marker: str
    bare: str  # how calls begin without the marker
    opening: str = ""  # allowed between the marker and the first call, besides blanks
    separators: str = ""  # allowed between two calls
    closing: str = ""
    arguments: str = "arguments"  # the key of the arguments
    before: str = ""  # the text before the first call
    between: str = ""  # the text between two calls; if it is empty, a grammar allows one call
    after: str = ""  # the text after the last call


HERMES = Markup(  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    marker="<tool_call>",
    bare="{",
    closing="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
)
LLAMA = Markup(  # {"name": ..., "parameters": {...}}, as the whole answer
    marker="<|python_tag|>", bare="{", separators=";", arguments="parameters"
)
MISTRAL = Markup(  # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    marker="[TOOL_CALLS]",
    bare="[",
    opening="[",
    separators=",",
    closing="]",
    before="[",
    between=", ",
    after="]",
)
GRANITE = Markup(  # <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    marker="<|tool_call|>",
    bare="[",
    opening="[",
    separators=",",
    closing="]",
    before="[",
    between=", ",
    after="]",
)
_BLANKS = " \t\r\n"


class JsonCalls(Parser):
    """`names` are the tools that may be called without a marker."""

    def __init__(self, markup: Markup, *, names: Collection[str], seed: str) -> None:
        super().__init__(seed)
        self._markup = markup
        self._names = frozenset(names)

    def _read(self) -> Reading[None]:
        scan, marker = self._scan, self._markup.marker
        scan.mark()
        blank = yield from scan.skip()
        if (yield from scan.match(marker)) is not None:
            self._out.say(blank)
            yield from self._calls(marked=True)
        elif (yield from scan.peek()) == self._markup.bare:
            yield from self._calls(marked=False)
        else:
            self._fail()
        while True:
            yield from scan.until(marker, emit=self._out.say)
            yield from self._calls(marked=True)

    def _calls(self, *, marked: bool) -> Reading[None]:
        """Read calls up to the end of their markup. If no call follows, what was read is content."""
        scan = self._scan
        if marked:
            scan.mark(len(self._markup.marker))
        while (char := (yield from scan.peek())) in _BLANKS or char in self._markup.opening:
            yield from scan.pop()
        if char != "{":
            self._fail()
            return
        while char == "{":
            if not (yield from self._call(None if marked else self._names)):
                self._fail()
                return
            yield from scan.skip(_BLANKS + self._markup.separators)
            scan.mark()
            char = yield from scan.peek()
        scan.unmark()
        if self._markup.closing:
            yield from scan.match(self._markup.closing)

    def _call(self, names: Collection[str] | None) -> Reading[bool]:
        reader, begun = _CallReader(names=names), False
        while not (reader.done or reader.broken):
            yield from self._scan.peek()
            self._scan.pass_to(reader.feed)
            if reader.begun:
                self._emit(reader, first=not begun)
                begun = True
        self._out.end_call()
        return reader.done

    def _emit(self, reader: _CallReader, *, first: bool) -> None:
        if first:
            self._scan.unmark()
            self._out.begin_call(reader.name or "", reader.take())
        else:
            self._out.add_arguments(reader.take())


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class _CallReader:
    """Reads one call, `{"name": ..., "arguments": {...}}`, character by character.

    With `names`, only calls of those tools are accepted. The reader tracks only strings and brackets; the arguments
    are passed on unchanged.
    """

    def __init__(self, *, names: Collection[str] | None) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._names = names
        self._fresh: list[str] = []  # pieces of the arguments that were not taken yet
        self._given = False  # whether the call has arguments
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: str | None = None  # the key of the current or next value; None where a key is expected
        self._token = ""  # the key or value being read, if it is not passed on

    @property
    def begun(self) -> bool:
        return self.name is not None and not self.broken

    def take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns where reading stopped: where the call ended or proved malformed, or the end."""
        for i in range(at, len(text)):
            self._read(text[i])
            if self.done or self.broken:
                return i + 1
        return len(text)

    @property
    def _passing(self) -> bool:
        """Whether the current text is arguments that are passed on at once. Quoted ones must be unquoted first."""
        return self._key in _ARGUMENTS and self._depth > 1

    def _read(self, char: str) -> None:
        if self._quoted:
            self._read_quoted(char)
        elif char == '"':
            self._quoted = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._keep(char)
        elif char in "}]":
            self._close(char)
        elif self._depth > 1:
            self._keep(char)
        else:
            self._read_between(char)

    def _read_quoted(self, char: str) -> None:
        self._keep(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False

    def _read_between(self, char: str) -> None:
        """Read a character of the call's outermost object: punctuation, a blank, or part of an unquoted value."""
        if char == ":" and self._key is None:
            self._key, self._token = self._string(), ""
            # Until a known name is read, an unknown key shows that this is not a call; after it, any key is allowed.
            unlike = self._names is not None and self.name is None and self._key not in _KEYS
            self.broken |= self._key is None or unlike
        elif char == ",":
            self._end_value()
        elif not char.isspace():
            self._keep(char)

    def _close(self, char: str) -> None:
        if self._depth > 1:
            self._keep(char)
            self._depth -= 1
            return
        self._end_value()
        self.done = not self.broken and char == "}" and self.name is not None
        self.broken |= not self.done
        if self.done and not self._given:
            self._fresh.append("{}")

    def _keep(self, char: str) -> None:
        if self._passing:
            self._given = True
            self._fresh.append(char)
        else:
            self._token += char

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = self._string()
            self.broken |= self.name is None or (self._names is not None and self.name not in self._names)
        elif self._key in _ARGUMENTS and self._token not in ("", "null"):
            self._given = True
            self._fresh.append(self._string() or self._token)
        self._key, self._token = None, ""

    def _string(self) -> str | None:
        try:
            value = json.loads(self._token)
        except ValueError:
            return None
        return value if isinstance(value, str) else None
