"""Tool calls in the words of each model family: how they are written, and how they are read back. (signatures first)"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum


class ToolFormat(Enum):
    """How a model family writes a call."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. `id` and `name` come with its first piece only; `arguments` pieces add up to JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches its model, by its source; Hermes where it does not say."""
    raise NotImplementedError


class ToolParser:
    """Splits one answer into what is said and what is called, as the text comes.

    `names` are the tools that may be called; `seed` makes the ids of the calls (the request's id: a stream that is
    replayed elsewhere makes the same ones). Feed it text after stop strings were cut.
    """

    called: bool  # at least one call has begun: finish_reason is "tool_calls" if the answer ended by itself

    def __init__(self, format: ToolFormat, *, names: Collection[str], seed: str) -> None:
        raise NotImplementedError

    def push(self, delta: str) -> tuple[str, list[CallDelta]]:
        """What `delta` adds to the content, and to the calls. Markup never shows up in either."""
        raise NotImplementedError

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What was held back because it might have become markup; call it once, where the answer ends."""
        raise NotImplementedError


def parse_calls(text: str, format: ToolFormat, *, names: Collection[str], seed: str) -> tuple[str, list[Call]]:
    """Content and calls of a complete answer: what a `ToolParser` would have said in all."""
    raise NotImplementedError
