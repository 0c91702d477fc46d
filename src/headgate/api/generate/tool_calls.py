"""Writes tool calls in the form of the chat API; `headgate.text.tools` parses them from the model's text."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from headgate.contract.answers import CalledFunction, CallPiece, MessageCall
from headgate.contract.schema import Object
from headgate.text.tools import CallDelta, ToolFormat, ToolParser


class Parsers:
    """One parser per choice; none if there is no tool to call."""

    def __init__(
        self, tools: Sequence[Object] | None, choice: str | Object | None, format: ToolFormat, *, seed: str
    ) -> None:
        self._tools = tools if tools and choice != "none" else ()
        self._format = format
        self._seed = seed
        self._parsers: dict[int, ToolParser] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def get(self, index: int) -> ToolParser | None:
        if self._tools and index not in self._parsers:
            names = [_name(tool) for tool in self._tools]
            self._parsers[index] = ToolParser(self._format, names=names, seed=f"{self._seed}-{index}")
        return self._parsers.get(index)


def _name(tool: Object) -> str:
    function = tool.get("function", tool)  # nested in the chat API, flat in the responses API
    return str(function.get("name", ""))


def read_calls(parser: ToolParser, text: str, *, final: bool) -> tuple[str, list[CallDelta]]:
    """The content and the calls that `text` adds."""
    content, calls = parser.push(text)
    if final:
        rest, more = parser.finish()
        content, calls = content + rest, [*calls, *more]
    return content, calls


def call_pieces(deltas: Sequence[CallDelta]) -> list[CallPiece]:
    return [
        CallPiece(
            index=delta.index,
            id=delta.id or UNSET,
            type="function" if delta.id else UNSET,
            function=CalledFunction(name=delta.name or UNSET, arguments=delta.arguments),
        )
        for delta in deltas
    ]


def message_calls(deltas: Sequence[CallDelta]) -> list[MessageCall]:
    """The complete calls, from all deltas of an answer."""
    calls: dict[int, MessageCall] = {}
    for delta in deltas:
        if delta.index not in calls:
            calls[delta.index] = MessageCall(id=delta.id or "", function=CalledFunction(name=delta.name or ""))
        calls[delta.index].function.arguments += delta.arguments
    return list(calls.values())
