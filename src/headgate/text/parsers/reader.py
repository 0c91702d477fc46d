"""Reads answers of one model: chooses the parsers that a request needs and runs them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headgate.text.parsers.events import Content, Event, merged
from headgate.text.parsers.families import (
    HARMONY,
    HERMES_FAMILY,
    ReasoningFamily,
    ToolFamily,
    reasoning_family,
    tool_family,
)
from headgate.text.parsers.harmony import Harmony
from headgate.text.parsers.json_calls import JsonCalls, Markup
from headgate.text.parsers.scanner import Parser
from headgate.text.parsers.thinking import Thinking
from headgate.text.parsers.typed_values import Declared

Part = Literal["reasoning", "tool_call"]


class AnswerReader:
    """Divides one answer into reasoning, content and calls; the content of one parser is the text of the next one."""

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self._parsers = parsers

    def feed(self, text: str) -> list[Event]:
        return self._through(self._parsers[0].feed(text), 1)

    def finish(self) -> list[Event]:
        """The events of the text that was held back. Call this once, at the end of the answer."""
        events: list[Event] = []
        for i, parser in enumerate(self._parsers, 1):
            events += self._through(parser.finish(), i)
        return merged(events)

    def _through(self, events: list[Event], start: int) -> list[Event]:
        """Pass content through the parsers from `start` on."""
        for parser in self._parsers[start:]:
            passed: list[Event] = []
            for event in events:
                passed += parser.feed(event.text) if isinstance(event, Content) else [event]
            events = passed
        return events

    @property
    def called(self) -> bool:
        """Whether a call has begun. The finish reason is then "tool_calls", if the answer ended by itself."""
        return any(parser.called for parser in self._parsers)

    @property
    def part(self) -> Part | None:
        """The part of the answer in which the text ends, other than content."""
        if any(parser.in_reasoning for parser in self._parsers):
            return "reasoning"
        return "tool_call" if any(parser.in_call for parser in self._parsers) else None


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The parsers of a model."""

    reasoning: ReasoningFamily | None = None
    tools: ToolFamily | None = HERMES_FAMILY

    @classmethod
    def choose(cls, reasoning: str, tools: str, template: str | None) -> AnswerParsers:
        return cls(reasoning_family(reasoning, template), tool_family(tools, template))

    @property
    def markup(self) -> Markup:
        """How calls are written that a grammar enforces."""
        return HERMES_FAMILY.markup if self.tools is None else self.tools.markup

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parsers need even if they are special tokens."""
        families = (self.reasoning, self.tools)
        return frozenset(marker for family in families if family is not None for marker in family.markers)

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to `prompt` begins with reasoning, without a mark at its start."""
        tags = None if self.reasoning is None else self.reasoning.tags
        return tags is not None and tags.opened_by(prompt, continued)

    def reader(self, declared: Declared, *, seed: str, constrained: bool, opened: bool) -> AnswerReader | None:
        """The reader of an answer; None if it is passed on as it is.

        `declared` has the tools that may be called. A grammar (`constrained`) applies from the first token: there is no
        reasoning, and calls are JSON. `opened`: the answer begins with reasoning.
        """
        if constrained:
            parsers: list[Parser] = (
                [JsonCalls(self.markup, names=declared, seed=seed)] if self.tools and declared else []
            )
        else:
            parsers = [*self._reasoning(declared, seed, opened), *self._calls(declared, seed)]
        return AnswerReader(parsers) if parsers else None

    def _reasoning(self, declared: Declared, seed: str, opened: bool) -> list[Parser]:
        if self.reasoning is None:
            return []
        if self.reasoning.tags is not None:
            return [Thinking(self.reasoning.tags, opened=opened)]
        calls = self.tools is not None and self.tools.name == HARMONY and bool(declared)
        return [Harmony(thinks=True, calls=calls, seed=seed)]

    def _calls(self, declared: Declared, seed: str) -> list[Parser]:
        family = self.tools
        if family is None or not (declared or family.name == HARMONY):
            return []
        if family.name == HARMONY and self.reasoning is not None and self.reasoning.name == HARMONY:
            return []  # one parser reads both
        return [family.make(declared, seed)]
