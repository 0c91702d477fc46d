"""The parts of an answer in the form of the chat API: reasoning, content and tool calls.

`headgate.text.parsers` finds them in the model's text. A reader depends on nothing but that text and the request, so a
choice that another server continues has the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.api.state import Api
from headgate.contract.answers import CalledFunction, CallPiece, MessageCall
from headgate.contract.schema import ChatRequest, Object
from headgate.text.detokenizer import Detokenizer
from headgate.text.parsers.events import CallDelta, Content, Event, Reasoning, merged
from headgate.text.parsers.reader import AnswerReader
from headgate.text.parsers.typed_values import Schema


@dataclass(slots=True)
class Parts:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Parts:
        parts = cls()
        for event in events:
            match event:
                case Reasoning(text):
                    parts.reasoning += text
                case Content(text):
                    parts.content += text
                case CallDelta():
                    parts.calls.append(event)
        return parts

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Readers:
    """One reader per choice; none if answers are passed on as they are."""

    def __init__(self, api: Api, body: ChatRequest, *, seed: str) -> None:
        self._api = api
        self._tools = declared_tools(body)
        self._seed = seed
        self._readers: dict[int, AnswerReader | None] = {}

    def get(self, job: ChoiceJob) -> AnswerReader | None:
        if job.index not in self._readers:
            self._readers[job.index] = self._new(job)
        return self._readers[job.index]

    def _new(self, job: ChoiceJob) -> AnswerReader | None:
        reader = self._api.parsers.reader(
            self._tools,
            seed=f"{self._seed}-{job.index}",
            constrained=job.request.sampling.grammar is not None,
            opened=job.opened,
        )
        if reader is not None and job.delivered_chars:
            reader.feed(self._delivered(job))
        return reader

    def _delivered(self, job: ChoiceJob) -> str:
        """The text that the client has of the ids that it sent."""
        tokenizer, request = self._api.required_tokenizer, job.request
        text = Detokenizer(tokenizer, prompt_ids=request.prompt, skip_special=job.skip_special, kept=job.kept).push(
            request.generated
        )
        return text[: job.delivered_chars]


def declared_tools(body: ChatRequest) -> dict[str, Schema]:
    """The schemas of the tools that may be called, by name."""
    if body.tool_choice == "none":
        return {}
    return dict(map(_declared, body.tools or ()))


def _declared(tool: Object) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return str(function.get("name", "")), parameters if isinstance(parameters, Mapping) else {}


def read(reader: AnswerReader, piece: Piece) -> list[Event]:
    """What `piece` adds to the answer."""
    events = reader.feed(piece.text)
    return events if piece.finish is None else merged([*events, *reader.finish()])


def cut_part(reader: AnswerReader | None, piece: Piece) -> str | None:
    """The part of an answer that its end cut; None if the model ended the answer itself."""
    if reader is None or piece.finish is None or piece.finish.reason == "stop":
        return None
    return reader.part


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
