"""Reads the bodies of generation requests: bounded while they arrive, and without delaying other requests."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request

from headgate.api.state import api_of
from headgate.contract.decoding import T, decode
from headgate.edge.reading import LARGE_BYTES
from headgate.errors import ContextTooLong

BYTES_PER_CHAR = 12  # at most: two escaped halves of a surrogate pair
AFTER_TEXT = b",:]}"  # one of these follows the quote that ends a string
VALUES_PER_TOKEN = 8  # values that a body may have per token of context
MORE_VALUES = 1 << 16  # additional values


async def read_body(request: Request, kind: type[T], most_tokens: int = 0) -> T:
    """The decoded body. No string in it may have more tokens than the context or `most_tokens`, whichever is larger."""
    body = await _received(request, most_tokens)
    if len(body) > LARGE_BYTES:
        await asyncio.sleep(0)  # other tasks that became ready run first
        _check_values(body, api_of(request).engines.info.max_context)
        await asyncio.sleep(0)
    return decode(body, kind)


async def _received(request: Request, most_tokens: int) -> bytearray:
    """The body. It is refused while it arrives if it has a string that cannot fit the context."""
    body, api, quote = bytearray(), api_of(request), -1
    async for chunk in request.stream():  # unlike `body()`, it keeps no copy
        body += chunk
        quote = max(quote, body.rfind(b'"', len(body) - len(chunk)))
        if len(body) > LARGE_BYTES and api.tokenizer is not None:
            most = max(most_tokens, api.engines.info.max_context)
            api.tokenizer.check_length(_text_bytes(body, quote) // BYTES_PER_CHAR, most)
    return body


def _text_bytes(body: bytearray, quote: int) -> int:
    """The length of an unfinished string at the end of `body`, whose last quote is given; 0 if that may be its end."""
    following = body[quote + 1 : quote + 65].strip()
    return 0 if quote < 0 or following[:1] in AFTER_TEXT else len(body) - quote - 1


def _check_values(body: bytearray, context: int) -> None:
    """Refuse a body with more values than a prompt of `context` tokens can have: decoding them would block the event loop.

    Commas bound the number of values; those inside strings do not count.
    """
    most = VALUES_PER_TOKEN * context + MORE_VALUES
    if body.count(b",") <= most:
        return
    fields = [bytes(raw) for raw in decode(body, dict[str, msgspec.Raw]).values()]
    values = body.count(b",") - sum(raw.count(b",") for raw in fields if raw[:1] == b'"')
    if values > most:
        raise ContextTooLong(
            f"the body has more than {most} values; this model takes {context} tokens", param="prompt"
        )
