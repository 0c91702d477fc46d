"""Request bodies that clients send."""

from __future__ import annotations

import msgspec

from headgate.api.generate.prompts import plain_message
from headgate.contract.decoding import decode
from headgate.contract.schema import ChatRequest


def test_an_assistant_message_can_be_sent_back_as_the_client_parsed_it():
    """The form that `client.chat.completions.parse()` of OpenAI's library returns."""
    said = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}, "refusal": None, "tool_calls": None}
    body = decode(msgspec.json.encode({"messages": [said]}), ChatRequest)
    assert plain_message(body.messages[0], "messages[0]") == {"role": "assistant", "content": '{"a": 1}'}
