"""Reasoning between two tags at the start of an answer: `<think>...</think>` in most families.

A template may write the opening tag at the end of the prompt (`opened`); the answer then begins with reasoning. Newlines
around reasoning are markup. Some families write the answer between tags of its own, which are removed.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.text.parsers.events import Content, Event
from headgate.text.parsers.scanner import Parser, Reading

_NEWLINES = "\r\n"


@dataclass(frozen=True, slots=True)
class Tags:
    opening: str = "<think>"
    closing: str = "</think>"
    answer_opening: str = ""
    answer_closing: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing, self.answer_opening, self.answer_closing)))

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer begins with reasoning: the prompt ends in it, or in the message that is `continued`."""
        in_message = continued.rfind(self.opening) > continued.rfind(self.closing)
        return in_message or prompt.rstrip().endswith(self.opening)


class Thinking(Parser):
    """Divides an answer into reasoning and content, which another parser may divide further."""

    def __init__(self, tags: Tags, *, opened: bool) -> None:
        super().__init__()
        self._tags = tags
        self._opened = opened
        self._thinking = opened
        self._through = False  # everything that follows is content
        self._held = ""  # newlines that are reasoning only if more reasoning follows

    @property
    def in_reasoning(self) -> bool:
        return self._thinking

    def feed(self, text: str) -> list[Event]:
        # Nearly every token is passed on here: keep it short.
        if self._through:
            return [Content(text)] if text else []
        return super().feed(text)

    def finish(self) -> list[Event]:
        return [] if self._through else super().finish()

    def _salvage(self, text: str) -> None:
        if self._thinking:
            self._out.think(self._held + text)
        else:
            self._pass(text)

    def _read(self) -> Reading[None]:
        scan = self._scan
        scan.mark()
        yield from scan.skip()
        if (yield from scan.match(self._tags.opening)) is not None or self._opened:
            scan.unmark()
            yield from self._reasoning()
        else:
            self._pass(scan.take_marked())
        if self._tags.answer_opening:
            yield from self._answer()
        self._pass(scan.rest())
        self._through = True
        yield

    def _reasoning(self) -> Reading[None]:
        self._thinking = True
        yield from self._scan.skip(_NEWLINES)
        yield from self._scan.until(self._tags.closing, emit=self._think)
        self._thinking = False
        yield from self._scan.skip(_NEWLINES)

    def _answer(self) -> Reading[None]:
        """Read an answer between tags, if there is one."""
        scan, tags = self._scan, self._tags
        scan.mark()
        if (yield from scan.match(tags.answer_opening)) is None:
            scan.unmark()
            return
        scan.unmark()
        yield from scan.skip(_NEWLINES)
        yield from scan.until("\n" + tags.answer_closing, tags.answer_closing, emit=self._pass)
        yield from scan.skip(_NEWLINES)

    def _think(self, text: str) -> None:
        text = self._held + text
        thought = text.rstrip(_NEWLINES)
        self._held = text[len(thought) :]
        self._out.think(thought)

    def _pass(self, text: str) -> None:
        self._out.pass_on(text)
