"""Calls of DeepSeek V3, R1 and V3.1: JSON arguments between markers of full-width characters.

V3 writes `function<sep>NAME`, a fence of three backticks around the arguments, and V3.1 `NAME<sep>ARGUMENTS`.
"""

from __future__ import annotations

from headgate.text.parsers.scanner import MOST_NAME, Parser, Reading

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


class DeepSeekCalls(Parser):
    def _read(self) -> Reading[None]:
        scan = self._scan
        while True:
            marker = yield from scan.until(CALLS_BEGIN, CALL_BEGIN, emit=self._out.say)
            scan.mark(len(marker))
            if marker == CALLS_BEGIN:
                yield from scan.skip()
                if (yield from scan.match(CALL_BEGIN)) is None:
                    self._fail()
                    continue
            yield from self._calls()

    def _calls(self) -> Reading[None]:
        """Read calls, from the name of the first one to the marker after the last one."""
        scan, another = self._scan, True
        while another:
            head = yield from self._head()
            if head is None:
                self._fail()
                return
            scan.unmark()
            yield from self._arguments(*head)
            yield from scan.skip()
            scan.mark()
            following = yield from scan.match(CALL_BEGIN, CALLS_END)
            another = following == CALL_BEGIN
        scan.unmark()

    def _head(self) -> Reading[tuple[str, bool] | None]:
        """The name of a function, and whether its arguments are within a fence; None if this is no call."""
        scan = self._scan
        first = yield from scan.up_to(SEPARATOR, MOST_NAME)
        if first is None:
            return None
        yield from scan.skip()
        if (yield from scan.peek()) == "{":
            return (first.strip(), False) if first.strip() else None
        name = yield from scan.name("{\n")
        yield from scan.skip()
        fenced = (yield from scan.match("```json", "{")) == "```json"
        return (name, True) if name and fenced else None

    def _arguments(self, name: str, fenced: bool) -> Reading[None]:
        scan, out = self._scan, self._out
        out.begin_call(name)
        if fenced:
            yield from scan.skip()
            yield from scan.until("\n```" + CALL_END, "```" + CALL_END, CALL_END, emit=out.add_arguments)
        else:
            yield from scan.until(CALL_END, emit=out.add_arguments)
        out.end_call()
