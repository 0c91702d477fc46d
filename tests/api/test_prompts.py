"""Where prompts are made: on the event loop if they are short, in a thread if anything about them is long."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headgate.api.prompts import chat_prompt
from headgate.api.schema import ChatRequest, Message
from headgate.api.state import Api
from headgate.errors import RequestError
from headgate.text.template import ChatTemplate
from headgate.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level

USER = {"role": "user", "content": "hi"}
LONG = "a" * 10_000


class WhereFrom(Tokenizer):
    """Notes the thread that it is asked from."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.thread = threading.current_thread()
        return super().encode(text, add_special=add_special)


def made_on_the_loop(**body: Any) -> bool:
    asked = msgspec.convert({"messages": [USER]} | body, ChatRequest)
    tokenizer = WhereFrom(byte_level().backend)
    none = cast(Any, SimpleNamespace())
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    api = Api(engines=none, ledger=none, model_name="m", created=0, tokenizer=tokenizer, template=template)
    asyncio.run(chat_prompt(api, asked.messages, tools=asked.tools, variables=asked.chat_template_kwargs))
    api.pool.shutdown()
    return tokenizer.thread is threading.current_thread()


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def test_a_short_prompt_is_made_on_the_loop() -> None:
    assert made_on_the_loop(tools=[{"type": "function"}], chat_template_kwargs={"thinking": False})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER | {"content": LONG}]},
        {"messages": [USER | {"content": [{"type": "text", "text": LONG}]}]},
        {"messages": [USER | {"content": ""}] * 2000},
        {"messages": [USER | {"reasoning_content": LONG}]},
        {"messages": [calling(LONG)]},
        {"tools": [{"type": "function", "function": {"description": LONG}}]},
        {"tools": [{}] * 5000},
        {"chat_template_kwargs": {"style": [[]] * 5000}},
    ],
    ids=["text", "part", "messages", "reasoning", "arguments", "tool", "tools", "variables"],
)
def test_a_prompt_with_anything_long_is_made_in_a_thread(body: dict[str, Any]) -> None:
    assert not made_on_the_loop(**body)


def test_a_message_that_is_refused_in_a_thread_is_refused_to_the_caller() -> None:
    none = cast(Any, SimpleNamespace())
    tokenizer, template = byte_level(), ChatTemplate("")
    api = Api(engines=none, ledger=none, model_name="m", created=0, tokenizer=tokenizer, template=template)
    with pytest.raises(RequestError) as raised:
        asyncio.run(chat_prompt(api, [Message(role="user", content=LONG), Message(role="user")]))
    assert raised.value.param == "messages[1].content"
    api.pool.shutdown()
