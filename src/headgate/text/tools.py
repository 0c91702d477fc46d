"""Tool calls in the words of each model family: the grammar of a call, and reading calls back from what a model says.

Content and calls go out as soon as nothing that follows can change them. What might yet become markup waits; what only
looked like a call, and cannot be one any more, is content, whole. Once a call's name has gone out the call stands, however
its arguments go on: they are the model's own words, as they came.

Formats are taken from what chat templates teach. Markers that are special tokens vanish when text is decoded without
them, so an answer that *begins* like a call to a known tool is one, marked or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

from headgate.text.constraints import literal, schema_rule


class ToolFormat(Enum):
    """How a model family writes a call."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Hermes, Qwen and many more
    LLAMA = "llama"  # {"name": ..., "parameters": {...}}, as the whole answer
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]

    @property
    def markup(self) -> Markup:
        return _MARKUP[self]


@dataclass(frozen=True, slots=True)
class Markup:
    """What stands around the calls of a format, as it is read; and a call as it is written when one is demanded."""

    marker: str
    bare: str  # how calls begin when the marker is missing
    opening: str = ""  # what may stand between the marker and the first call, besides blanks
    separators: str = ""  # what may stand between two calls
    closing: str = ""
    arguments: str = "arguments"
    before: str = ""
    between: str = ""  # "" where one answer has one call
    after: str = ""


_MARKUP = {
    ToolFormat.HERMES: Markup(
        marker="<tool_call>",
        bare="{",
        closing="</tool_call>",
        before="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        after="\n</tool_call>",
    ),
    ToolFormat.LLAMA: Markup(marker="<|python_tag|>", bare="{", separators=";", arguments="parameters"),
    ToolFormat.MISTRAL: Markup(
        marker="[TOOL_CALLS]",
        bare="[",
        opening="[",
        separators=",",
        closing="]",
        before="[",
        between=", ",
        after="]",
    ),
}
_BLANKS = " \t\r\n"


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches its model, by its source; Hermes where it does not say."""
    if template is None or "<tool_call>" in template:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if '"parameters"' in template or "python_tag" in template:
        return ToolFormat.LLAMA
    return ToolFormat.HERMES


# ------------------------------------------------------------------------------------------------------ calls demanded


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the caller declared it; `param` names the place in the body."""

    name: str
    parameters: dict[str, Any]  # a JSON schema
    param: str


def call_rules(format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Rules of a grammar in which `calls` is one call of one of `tools`, or with `parallel` one or more."""
    markup = format.markup
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({literal(markup.between)} call)*" if parallel and markup.between else ""
    rules = [f"calls: {_maybe(markup.before)} call{more} {_maybe(markup.after)}", f"call: {one}"]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{markup.arguments}": '
        # Each schema is the root of its own document, so that its references stay its own.
        schema = schema_rule({"type": "object"} | tool.parameters, param=tool.param)
        rules += [f'call_{i}: {literal(head)} arguments_{i} "}}"', f"arguments_{i}: {schema}"]
    return "\n".join(rules) + "\n"


def _maybe(text: str) -> str:
    return literal(text) if text else ""


# ---------------------------------------------------------------------------------------------------------- calls read


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. `id` and `name` come with its first piece only; `arguments` pieces add up to JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str


def parse_calls(text: str, format: ToolFormat, *, names: Collection[str], seed: str) -> tuple[str, list[ParsedCall]]:
    """Content and calls of a complete answer: what a `ToolParser` would have said in all."""
    parser = ToolParser(format, names=names, seed=seed)
    pushed, finished = parser.push(text), parser.finish()
    deltas = pushed[1] + finished[1]
    heads = [delta for delta in deltas if delta.name is not None]
    calls = [
        ParsedCall(
            head.id or "", head.name or "", "".join(delta.arguments for delta in deltas if delta.index == head.index)
        )
        for head in heads
    ]
    return pushed[0] + finished[0], calls


class ToolParser:
    """Splits one answer into what is said and what is called, as the text comes.

    `names` are the tools that may be called; `seed` makes the ids of the calls (the request's id: a stream that is
    replayed elsewhere makes the same ones). Feed it text after stop strings were cut.
    """

    def __init__(self, format: ToolFormat, *, names: Collection[str], seed: str) -> None:
        self.calls = 0  # begun so far
        self._markup = format.markup
        self._names = frozenset(names)
        self._seed = seed
        self._text = ""  # not yet dealt with
        self._blank = ""  # white space that is content only if more content follows
        self._held = ""  # read as markup or as a call that has not begun yet; content if none ever does
        self._marked = False  # the calls we are in were announced by their marker
        self._reader: _CallReader | None = None
        self._where: Callable[[], bool] = self._at_start
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []

    @property
    def called(self) -> bool:
        """At least one call has begun: the finish reason is "tool_calls" if the answer ended by itself."""
        return self.calls > 0

    def push(self, delta: str) -> tuple[str, list[CallDelta]]:
        """What `delta` adds to the content, and to the calls. Markup never shows up in either."""
        self._text += delta
        while self._text and self._where():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What was held back because it might have become markup; call it once, where the answer ends."""
        if self._where != self._after_call:
            self._say(self._held + self._text)
        if not self.called:
            self._content.append(self._blank)
        self._text = self._held = self._blank = ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, self._content = "".join(self._content), []
        deltas, self._deltas = self._deltas, []
        return content, deltas

    # Where we are in the answer. Each takes something off `_text` and returns True, or waits for more and returns False.

    def _at_start(self) -> bool:
        """Nothing but blanks so far: calls may begin without their marker."""
        text, marker = self._text.lstrip(), self._markup.marker
        self._blank += self._text[: len(self._text) - len(text)]
        self._text = text
        marked = marker.startswith(text[: len(marker)])
        if marked and len(text) < len(marker):
            return False
        if text.startswith(self._markup.bare) and not marked:
            self._enter(marked=False)
        else:
            self._where = self._in_text
        return True

    def _in_text(self) -> bool:
        before, marker, after = self._text.partition(self._markup.marker)
        if marker:
            self._say(before)
            self._text = after
            self._enter(marked=True)
            return True
        kept = _overlap(before, self._markup.marker)
        self._say(before[: len(before) - kept])
        self._text = before[len(before) - kept :]
        return False

    def _before_call(self) -> bool:
        """Inside the markup, and no call has come yet: unless one does, this was text."""
        text = self._text
        if text[0] == "{":
            self._reader = _CallReader(names=None if self._marked else self._names)
            self._where = self._in_call
        elif text[0].isspace() or text[0] in self._markup.opening:
            self._held += text[0]
            self._text = text[1:]
        else:
            self._leave()
        return True

    def _in_call(self) -> bool:
        assert self._reader is not None
        reader, begun = self._reader, self._reader.begun
        used = reader.feed(self._text)
        self._held += "" if begun else self._text[:used]
        self._text = self._text[used:]
        if reader.begun:
            self._tell(reader, first=not begun)
        if reader.broken:
            self._leave()
        elif reader.done:
            self._where = self._after_call
        return True

    def _after_call(self) -> bool:
        """Inside the markup, after a call: what stands here is not content, unless the markup has been left."""
        text, closing = self._text.lstrip(self._markup.separators + _BLANKS), self._markup.closing
        self._text = text
        if not text or (closing.startswith(text) and text != closing):
            return False
        if text.startswith("{"):
            self._where = self._before_call
        else:
            self._text = text.removeprefix(closing)
            self._leave()
        return True

    def _enter(self, *, marked: bool) -> None:
        self._marked = marked
        self._held = self._markup.marker if marked else ""
        self._where = self._before_call

    def _leave(self) -> None:
        """Back to plain text; what was held for a call that never began is that, too."""
        held, self._held = self._held, ""
        self._reader, self._where = None, self._in_text
        # Said and not read again, or it would look like a call once more.
        self._say(held)

    def _say(self, text: str) -> None:
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        self._content.append(said)

    def _tell(self, reader: _CallReader, *, first: bool) -> None:
        arguments = reader.take()
        if first:
            self._held = self._blank = ""
            self._deltas.append(CallDelta(self.calls, arguments, self._call_id(self.calls), reader.name))
            self.calls += 1
        elif arguments:
            self._deltas.append(CallDelta(self.calls - 1, arguments))

    def _call_id(self, index: int) -> str:
        return f"call_{blake2b(f'{self._seed}/{index}'.encode(), digest_size=12).hexdigest()}"


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next(n for n in range(min(len(text), len(marker)), -1, -1) if marker.startswith(text[len(text) - n :]))


_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class _CallReader:
    """Reads one call, `{"name": ..., "arguments": {...}}`, a character at a time; with `names`, only of those tools.

    It follows strings and brackets and no more: what is inside the arguments is passed on as it comes.
    """

    def __init__(self, *, names: Collection[str] | None) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._names = names
        self._fresh: list[str] = []  # of the arguments, not yet taken
        self._given = False  # there were arguments
        self._depth = 0
        self._quoted = self._escaped = False
        self._key: str | None = None  # of the value we are in or before; None where a key is due
        self._token = ""  # the key or value being read, if it is not passed on

    @property
    def begun(self) -> bool:
        return self.name is not None and not self.broken

    def take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were used, which is all unless the call is done or broken."""
        for i, char in enumerate(text):
            self._read(char)
            if self.done or self.broken:
                return i + 1
        return len(text)

    @property
    def _passing(self) -> bool:
        """Whether what we read are arguments, to be passed on at once. In quotes, they must be unquoted first."""
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
        """A character of the call's own object: punctuation, blanks or a bare value."""
        if char == ":" and self._key is None:
            self._key, self._token = self._string(), ""
            # Any other object may be what it pleases; one that is known to be a call may say more than it needs.
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
