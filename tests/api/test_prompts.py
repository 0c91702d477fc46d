"""Prompts are tokenised on the event loop if they are short, and in a thread if any part of them is long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from headgate.api.generate.prompts import chat_prompt, text_prompt, text_prompts
from headgate.api.state import LONG_TEXT, Api
from headgate.contract.schema import ChatRequest, Message
from headgate.edge.sharing import Sharing
from headgate.errors import ContextTooLong, RequestError
from headgate.text.template import ChatTemplate
from headgate.text.tokenizer import PIECE_CHARS, Tokenizer
from tests.text.conftest import byte_fallback, byte_level, word_piece

USER = {"role": "user", "content": "hi"}
LONG = "a" * 10_000
CONTEXT = 8192


class WhereFrom(Tokenizer):
    """A tokenizer that records the thread that calls it."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.thread = threading.current_thread()
        return super().encode(text, add_special=add_special)


def made_on_the_loop(**body: Any) -> bool:
    asked = msgspec.convert({"messages": [USER]} | body, ChatRequest)
    tokenizer = WhereFrom(byte_level().backend)
    none = cast(Any, SimpleNamespace(info=SimpleNamespace(max_context=CONTEXT), sharing=Sharing()))
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    api = Api(engines=none, ledger=none, model_name="m", created=0, tokenizer=tokenizer, template=template)
    asyncio.run(chat_prompt(api, asked.messages, tools=asked.tools, variables=asked.chat_template_kwargs))
    api.pool.shutdown()
    return tokenizer.thread is threading.current_thread()


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def test_a_short_prompt_is_tokenised_on_the_event_loop() -> None:
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
def test_a_prompt_with_a_long_part_is_tokenised_in_a_thread(body: dict[str, Any]) -> None:
    assert not made_on_the_loop(**body)


def test_a_refusal_in_a_thread_reaches_the_caller() -> None:
    none = cast(Any, SimpleNamespace(info=SimpleNamespace(max_context=CONTEXT), sharing=Sharing()))
    tokenizer, template = byte_level(), ChatTemplate("")
    api = Api(engines=none, ledger=none, model_name="m", created=0, tokenizer=tokenizer, template=template)
    with pytest.raises(RequestError) as raised:
        asyncio.run(chat_prompt(api, [Message(role="user", content=LONG), Message(role="user")]))
    assert raised.value.param == "messages[1].content"
    api.pool.shutdown()


# ------------------------------------------------------------------------- what a prompt may cost (guarantee 64)


class Counting(Tokenizer):
    """A tokenizer that counts the characters that it encodes."""

    encoded = 0

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        self.encoded += len(text)
        return super().encode(text, add_special=add_special)


def counting_api(tokenizer: Tokenizer | None = None) -> tuple[Api, Counting]:
    counting = Counting((tokenizer or byte_level()).backend)
    host = cast(Any, SimpleNamespace(info=SimpleNamespace(max_context=CONTEXT), sharing=Sharing()))
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return Api(engines=host, ledger=host, model_name="m", created=0, tokenizer=counting, template=template), counting


def test_64_a_text_that_cannot_fit_is_refused_before_any_of_it_is_tokenised() -> None:
    api, tokenizer = counting_api()
    assert tokenizer.longest is not None
    text = "a" * (CONTEXT * tokenizer.longest + 1)
    with pytest.raises(ContextTooLong, match="prompt has at least 8193 tokens; this model takes 8192"):
        asyncio.run(text_prompt(api, text))
    with pytest.raises(ContextTooLong, match="at least 8193 tokens"):
        asyncio.run(chat_prompt(api, [Message(role="user", content=text)]))
    assert tokenizer.encoded == 0
    api.pool.shutdown()


def test_64_a_text_that_could_fit_by_its_length_alone_is_counted_in_pieces() -> None:
    api, tokenizer = counting_api()
    assert tokenizer.longest is not None
    text = "q7" * (CONTEXT * tokenizer.longest // 2)  # no token has more than one of these characters
    with pytest.raises(ContextTooLong, match="at least 65472 tokens"):
        asyncio.run(text_prompt(api, text))
    assert tokenizer.encoded == PIECE_CHARS < len(text)
    api.pool.shutdown()


@pytest.mark.parametrize("make", [byte_fallback, word_piece], ids=["byte_fallback", "word_piece"])
def test_64_a_tokenizer_that_drops_text_is_given_a_bounded_part_of_it(make: Callable[[], Tokenizer]) -> None:
    api, tokenizer = counting_api(make())
    with pytest.raises(ContextTooLong):
        asyncio.run(text_prompt(api, "q7 " * 10_000_000))
    assert tokenizer.encoded == 0
    spaces = asyncio.run(text_prompt(api, "a" + " " * 200_000 + "b")) if make is word_piece else None
    assert spaces is None or len(spaces.token_ids) < 10  # it can fit, and does
    api.pool.shutdown()


def test_64_token_ids_are_refused_by_their_number() -> None:
    api, _ = counting_api()
    with pytest.raises(ContextTooLong, match="at least 8193 tokens; this model takes 8192"):
        asyncio.run(text_prompt(api, [1] * (CONTEXT + 1)))
    api.pool.shutdown()


@pytest.mark.parametrize("prompts", [["q7 " * 100] * 64, [[1] * 100] * 64], ids=["texts", "ids"])
def test_64_many_short_prompts_of_one_request_do_not_block_the_event_loop(prompts: list[Any]) -> None:
    async def main() -> None:
        api, _ = counting_api()
        reading = asyncio.ensure_future(text_prompts(api, prompts, echo=True))
        await asyncio.sleep(0)
        assert api.turns.in_flight == 1 and not reading.done()  # in a thread
        assert len(await reading) == 64
        assert len(await text_prompts(api, prompts[:2])) == 2 and api.turns.waited == 0
        api.pool.shutdown()

    asyncio.run(main())


def test_63_threads_for_texts_are_shared_among_tenants() -> None:
    """One tenant's texts use one of two threads, so another tenant's text is tokenised at once."""

    async def main() -> None:
        api, _ = counting_api()
        api.ledger.sharing.several = True
        go = threading.Event()
        crowd = [asyncio.ensure_future(api.off_loop("greedy", LONG_TEXT, go.wait)) for _ in range(5)]
        try:
            async with asyncio.timeout(30):
                assert await api.off_loop("polite", LONG_TEXT, lambda: 1) == 1
            assert not any(task.done() for task in crowd)
        finally:
            go.set()
        await asyncio.gather(*crowd)
        assert (api.turns.in_flight, api.turns.waiting) == (0, 0)
        api.pool.shutdown()

    asyncio.run(main())


def test_63_a_thread_keeps_its_place_when_its_caller_is_cancelled() -> None:
    async def main() -> None:
        api, _ = counting_api()
        go = threading.Event()
        leaving = asyncio.ensure_future(api.off_loop("a", LONG_TEXT, go.wait))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert api.turns.in_flight == 1
        go.set()
        async with asyncio.timeout(30):
            await api.off_loop("a", LONG_TEXT, lambda: None)
            while api.turns.in_flight:
                await asyncio.sleep(0)
        api.pool.shutdown()

    asyncio.run(main())
