"""Bodies as clients send them."""

from __future__ import annotations

import msgspec

from headgate.api.generate.prompts import plain_message
from headgate.contract.decoding import decode
from headgate.contract.schema import ChatRequest


def test_a_message_that_a_client_has_parsed_can_be_sent_back():
    """As `client.chat.completions.parse()` of OpenAI's library returns it."""
    said = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}, "refusal": None, "tool_calls": None}
    body = decode(msgspec.json.encode({"messages": [said]}), ChatRequest)
    assert plain_message(body.messages[0], "messages[0]") == {"role": "assistant", "content": '{"a": 1}'}
