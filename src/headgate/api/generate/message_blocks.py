"""The content blocks of a message, and the stream events that report them.

At most one block is open. This module opens, closes and numbers blocks; `MessagesFormat` supplies their content.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from headgate.contract.event_json import encode
from headgate.contract.messages import Content, TextContent, ThinkingContent, ToolUse, event
from headgate.contract.schema import Object
from headgate.text.parsers.events import CallDelta, Event, Reasoning
from headgate.text.parsers.events import Content as ContentText

INPUT = msgspec.json.Decoder(Object)


class Blocks:
    """The blocks so far; each method returns the bytes of the events it causes."""

    def __init__(self) -> None:
        self.content: list[Content] = []
        self._open: Content | None = None
        self._head = b""  # the constant beginning of a text delta of the open block
        self._arguments: list[str] = []  # of the open call

    def add(self, part: Event) -> bytes:
        match part:
            case ContentText(text):
                return self.add_text(text)
            case Reasoning(text):
                return self._add_thinking(text)
            case CallDelta():
                return self._add_call(part)

    def add_text(self, text: str) -> bytes:
        # Runs for nearly every token: keep it short.
        block, events = self._open, b""
        if not isinstance(block, TextContent):
            events = self._begin(block := TextContent())
            delta = {"type": "content_block_delta", "index": len(self.content) - 1}
            self._head = b"event: content_block_delta\ndata: " + encode(delta)[:-1]
        block.text += text
        return events + self._head + b',"delta":{"type":"text_delta","text":' + encode(text) + b"}}\n\n"

    def _add_thinking(self, text: str) -> bytes:
        block, events = self._open, b""
        if not isinstance(block, ThinkingContent):
            events = self._begin(block := ThinkingContent())
        block.thinking += text
        return events + self._delta(type="thinking_delta", thinking=text)

    def _add_call(self, delta: CallDelta) -> bytes:
        events = b""
        if delta.id is not None or not isinstance(self._open, ToolUse):
            events = self._begin(ToolUse(id=delta.id or "", name=delta.name or ""))
        if not delta.arguments:
            return events
        self._arguments.append(delta.arguments)
        return events + self._delta(type="input_json_delta", partial_json=delta.arguments)

    def close(self) -> bytes:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return b""
        if isinstance(block, ToolUse):
            _set_input(block, "".join(self._arguments))
            self._arguments = []
        return event("content_block_stop", index=len(self.content) - 1)

    def _begin(self, block: Content) -> bytes:
        closed = self.close()
        self.content.append(block)
        self._open = block
        return closed + event("content_block_start", index=len(self.content) - 1, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=len(self.content) - 1, delta=delta)


def _set_input(call: ToolUse, arguments: str) -> None:
    try:
        call.input = INPUT.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):  # the model wrote something else, or the end of the answer cut it
        call.input, call.partial_json = {}, arguments
    else:
        call.partial_json = UNSET
