"""Calls whose parameters have tags of their own: those of Qwen3-Coder and of GLM-4.5."""

from __future__ import annotations

from collections.abc import Collection

from headgate.text.parsers.scanner import Parser, Reading
from headgate.text.parsers.typed_values import Arguments, Declared, property_schema

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class TaggedCalls(Parser):
    """`declared` has the schemas of the tools, which decide whether a value is a string."""

    def __init__(self, declared: Declared, *, seed: str) -> None:
        super().__init__(seed)
        self._declared = declared
        self._names: Collection[str] = declared.keys()


class QwenCoderCalls(TaggedCalls):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`

    Without `<tool_call>`, only calls of declared tools are calls.
    """

    def _read(self) -> Reading[None]:
        scan = self._scan
        while True:
            marker = yield from scan.until(OPENING, "<function=", emit=self._out.say)
            scan.mark(len(marker))
            if marker == OPENING:
                yield from scan.skip()
                if (yield from scan.match("<function=")) is None:
                    self._fail()
                    continue
            name = yield from self._tag()
            if name is None or (marker != OPENING and name not in self._names):
                self._fail()
                continue
            scan.unmark()
            yield from self._call(name)
            yield from scan.skip()
            yield from scan.match(CLOSING)

    def _tag(self) -> Reading[str | None]:
        """The rest of a tag, which begins with a name."""
        name = yield from self._scan.name("<>\n")
        return name if (yield from self._scan.match(">")) is not None else None

    def _call(self, name: str) -> Reading[None]:
        self._out.begin_call(name)
        scan, arguments = self._scan, Arguments(self._scan, self._out)
        while True:
            scan.unmark()
            yield from scan.skip()
            scan.mark()
            if (yield from scan.match("<parameter=", "</function>")) != "<parameter=":
                break
            key = yield from self._tag()
            if key is None:
                arguments.end()
                self._fail()
                return
            arguments.key(key)
            scan.unmark()
            yield from scan.match("\n")
            yield from arguments.value(property_schema(self._declared, name, key), "\n</parameter>", "</parameter>")
        scan.unmark()
        arguments.end()


class GlmCalls(TaggedCalls):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`"""

    def _read(self) -> Reading[None]:
        scan = self._scan
        while True:
            yield from scan.until(OPENING, emit=self._out.say)
            scan.mark(len(OPENING))
            yield from scan.skip()
            name = yield from scan.name("<\n")
            if name is None:
                self._fail()
                continue
            yield from scan.skip()
            following = yield from scan.match("<arg_key>", CLOSING)
            if following is None:
                self._fail()
                continue
            scan.unmark()
            yield from self._call(name, following)

    def _call(self, name: str, following: str | None) -> Reading[None]:
        self._out.begin_call(name)
        scan, arguments = self._scan, Arguments(self._scan, self._out)
        while following == "<arg_key>":
            scan.mark(len(following))
            key = yield from scan.name("<")
            closed = (yield from scan.match("</arg_key>")) is not None
            yield from scan.skip()
            if not closed or key is None or (yield from scan.match("<arg_value>")) is None:
                arguments.end()
                self._fail()
                return
            scan.unmark()
            arguments.key(key)
            yield from arguments.value(property_schema(self._declared, name, key), "</arg_value>")
            yield from scan.skip()
            following = yield from scan.match("<arg_key>", CLOSING)
        arguments.end()
