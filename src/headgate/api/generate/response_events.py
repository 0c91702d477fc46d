"""The output items of a Responses API response, and the stream events that report them.

At most one item is open. This module opens, closes and numbers items; `ResponsesFormat` supplies their content.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.contract.answers import TokenLogprob
from headgate.contract.errors import problem_of
from headgate.contract.event_json import encode
from headgate.contract.responses import (
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from headgate.errors import HeadgateError
from headgate.text.parsers.events import CallDelta


class Events:
    """The items so far; each method returns the bytes of the events it causes."""

    def __init__(self, id: str) -> None:
        self.items: list[OutputItem] = []
        self._id = id
        self._number = 0
        self._head = b""  # the constant beginning of a text delta of the open message

    # -- items ------------------------------------------------------------------

    def add_text(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """Append text; opens a message if none is open."""
        item, events = self._last_open(), b""
        if not isinstance(item, MessageItem):
            events = self.close()
            item = MessageItem(id=f"msg_{self._id}_{len(self.items)}", content=[OutputText()])
            events += self._open_message(item)
        part = item.content[0]
        part.text += text
        part.logprobs += logprobs
        return events + self._delta(text, logprobs) if text or logprobs else events

    def add_reasoning(self, text: str) -> bytes:
        """Append reasoning; opens an item for it if none is open."""
        item, events = self._last_open(), b""
        if not isinstance(item, ReasoningItem):
            events = self.close()
            item = ReasoningItem(id=f"rs_{self._id}_{len(self.items)}", content=[ReasoningText()])
            self.items.append(item)
            events += self._about_item("response.output_item.added", item=ReasoningItem(id=item.id))
            events += self._about_part("response.content_part.added", item, part=ReasoningText())
        item.content[0].text += text
        return events + self._about_part("response.reasoning_text.delta", item, delta=text)

    def add_call(self, delta: CallDelta) -> bytes:
        """Append to a function call; opens it if `delta` is its beginning."""
        item, events = self._last_open(), b""
        if delta.id is not None or not isinstance(item, CallItem):
            events = self.close()
            item = CallItem(id=f"fc_{self._id}_{len(self.items)}", call_id=delta.id or "", name=delta.name or "")
            self.items.append(item)
            events += self._about_item("response.output_item.added", item=item)
        item.arguments += delta.arguments
        if delta.arguments:
            kind = "response.function_call_arguments.delta"
            events += self._about_item(kind, item_id=item.id, delta=delta.arguments)
        return events

    def close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        match self._last_open():
            case MessageItem() as item:
                item.status = status
                return self._close_message(item)
            case ReasoningItem() as item:
                item.status = status
                return self._close_reasoning(item)
            case CallItem() as item:
                item.status = status
                kind = "response.function_call_arguments.done"
                done = self._about_item(kind, item_id=item.id, name=item.name, arguments=item.arguments)
                return done + self._about_item("response.output_item.done", item=item)
        return b""

    def _last_open(self) -> OutputItem | None:
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    def _open_message(self, item: MessageItem) -> bytes:
        self.items.append(item)
        added = self._about_item("response.output_item.added", item=MessageItem(id=item.id))
        kind = "response.output_text.delta"
        about = {"type": kind, "item_id": item.id, "output_index": len(self.items) - 1, "content_index": 0}
        self._head = b"event: " + kind.encode() + b"\ndata: " + encode(about)[:-1]
        return added + self._about_part("response.content_part.added", item, part=OutputText())

    def _close_message(self, item: MessageItem) -> bytes:
        part = item.content[0]
        done = self._about_part("response.output_text.done", item, text=part.text, logprobs=part.logprobs)
        done += self._about_part("response.content_part.done", item, part=part)
        return done + self._about_item("response.output_item.done", item=item)

    def _close_reasoning(self, item: ReasoningItem) -> bytes:
        part = item.content[0]
        done = self._about_part("response.reasoning_text.done", item, text=part.text)
        done += self._about_part("response.content_part.done", item, part=part)
        return done + self._about_item("response.output_item.done", item=item)

    # -- events -----------------------------------------------------------------

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        # Runs for nearly every token: keep it short.
        number, self._number = self._number, self._number + 1
        scores = encode(logprobs) if logprobs else b"[]"
        return self._head + b',"sequence_number":%d,"logprobs":%b,"delta":%b}\n\n' % (number, scores, encode(text))

    def about_response(self, kind: str, response: msgspec.Struct) -> bytes:
        return self._event(kind, response=response)

    def error(self, error: HeadgateError) -> bytes:
        problem = problem_of(error)
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._event("error", **fields, error=problem)

    def _about_part(self, kind: str, item: MessageItem | ReasoningItem, **fields: Any) -> bytes:
        return self._about_item(kind, item_id=item.id, content_index=0, **fields)

    def _about_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self.items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
