"""Tool calls in the format of each model family: the grammar of a call, and a parser for calls in answers.

Content and calls are emitted as soon as no later text can change them. Text that may still become markup is held
back. Text that looked like a call and turns out not to be one is emitted as content, in full. Once a call's name has
been emitted, the call is final, and its arguments are emitted unchanged, exactly as the model writes them.

The formats are those of the models' chat templates. Markers that are special tokens are missing if text is decoded
without special tokens, so an answer that *begins* like a call to a known tool is a call, with or without a marker.
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
    """The markup of a format: what the parser expects around calls, and the parts of a call for the grammar."""

    marker: str
    bare: str  # how calls begin without the marker
    opening: str = ""  # allowed between the marker and the first call, besides blanks
    separators: str = ""  # allowed between two calls
    closing: str = ""
    arguments: str = "arguments"
    before: str = ""
    between: str = ""  # the text between two calls; "" if an answer can have only one call
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
# The most calls that a grammar allows: a weak model that always begins another call would otherwise never end.
MOST_CALLS = 16


def format_of(template: str | None) -> ToolFormat:
    """Return the format that a chat template uses, detected from its source; Hermes by default."""
    if template is None or "<tool_call>" in template:
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if '"parameters"' in template or "python_tag" in template:
        return ToolFormat.LLAMA
    return ToolFormat.HERMES


# ------------------------------------------------------------------------------------ grammars that demand calls


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as declared by the caller; `param` is its location in the request body, for errors."""

    name: str
    parameters: dict[str, Any]  # a JSON schema
    param: str


def call_rules(format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return grammar rules in which `calls` is one call of one of `tools`, or up to `MOST_CALLS` with `parallel`."""
    markup = format.markup
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({literal(markup.between)} call){{0,{MOST_CALLS - 1}}}" if parallel and markup.between else ""
    rules = [f"calls: {_maybe(markup.before)} call{more} {_maybe(markup.after)}", f"call: {one}"]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{markup.arguments}": '
        # Each schema is the root of its own document, so that references stay within it.
        schema = schema_rule({"type": "object"} | tool.parameters, param=tool.param)
        rules += [f'call_{i}: {literal(head)} arguments_{i} "}}"', f"arguments_{i}: {schema}"]
    return "\n".join(rules) + "\n"


def _maybe(text: str) -> str:
    return literal(text) if text else ""


# -------------------------------------------------------------------------------------------------- parsing calls


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. Only the first piece has `id` and `name`; the `arguments` pieces add up to JSON text."""

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
    """Return the content and calls of a complete answer, as a `ToolParser` would emit them."""
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
    """Splits one answer into content and tool calls, as the text arrives.

    `names` are the tools that may be called. `seed` determines the ids of the calls: it is the request's id, so that
    a replayed stream has the same ids. The parser's input is the text without stop strings.
    """

    def __init__(self, format: ToolFormat, *, names: Collection[str], seed: str) -> None:
        self.calls = 0  # number of calls begun so far
        self._markup = format.markup
        self._names = frozenset(names)
        self._seed = seed
        self._text = ""  # not yet processed
        self._blank = ""  # white space that is content only if more content follows
        self._held = ""  # text read as markup or as the start of a call; it is content if no call begins
        self._marked = False  # the current calls were preceded by their marker
        self._reader: _CallReader | None = None
        self._where: Callable[[], bool] = self._at_start
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []

    @property
    def called(self) -> bool:
        """Whether a call has begun. The finish reason is then "tool_calls", if the answer ended by itself."""
        return self.calls > 0

    def push(self, delta: str) -> tuple[str, list[CallDelta]]:
        """Return the content and call pieces that `delta` adds. Neither contains markup."""
        self._text += delta
        while self._text and self._where():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """Return the text that was held back as possible markup. Call this once, at the end of the answer."""
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

    # The states of the parser. Each method consumes some of `_text` and returns True, or returns False to wait for
    # more.

    def _at_start(self) -> bool:
        """State: only blanks so far. Calls may begin without their marker."""
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
        """State: inside the markup, before the first call. If no call follows, this is content."""
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
        """State: inside the markup, after a call. This is not content, unless the markup has ended."""
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
        """Return to content. Text that was held for a call that never began is content, too."""
        held, self._held = self._held, ""
        self._reader, self._where = None, self._in_text
        # The text is not parsed again, because it would look like a call once more.
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
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    return next(n for n in range(min(len(text), len(marker)), -1, -1) if marker.startswith(text[len(text) - n :]))


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

    def feed(self, text: str) -> int:
        """Read more text. Returns how many characters were used: all, unless the call ended or proved malformed."""
        for i, char in enumerate(text):
            self._read(char)
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
