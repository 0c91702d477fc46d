"""Clients of a router: keep-alive connections that send one request at a time, and the requests they send."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httptools

DEADLINE_S = 120.0
SYSTEM_PROMPTS = 8
PATH = "/v1/chat/completions"


class Failed(Exception):
    """The router gave an unexpected answer."""


class Load:
    """Requests, given one at a time to the next free connection."""

    def __init__(self, requests: Iterable[bytes], connections: int) -> None:
        self._requests = iter(requests)
        self._open = connections
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0  # of streams

    def next(self) -> bytes | None:
        request = next(self._requests, None)
        if request is None:
            self._open -= 1
            if not self._open and not self.done.done():
                self.done.set_result(None)
        return request

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(Failed(why))


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._load: Load | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._body: list[bytes] = []
        self._carry = b""  # a "data: {" may arrive in two pieces
        self.first = asyncio.Event()  # the first byte of an answer has arrived

    def start(self, load: Load) -> None:
        self._load = load
        self._send_next()

    async def ask(self, request: bytes) -> bytes:
        """Send one request; returns the body of its answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(DEADLINE_S):
            return await self._answer

    def close(self) -> None:
        self._load = None
        if self._transport is not None:
            self._transport.abort()

    def _send_next(self) -> None:
        assert self._load is not None and self._transport is not None
        request = self._load.next()
        if request is not None:
            self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail("the router closed the connection")

    def data_received(self, data: bytes) -> None:
        if not self.first.is_set():
            self.first.set()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None or self._parser.get_status_code() != 200:
            self._body.append(body)
        elif self._load is not None:
            seen = self._carry + body
            self._load.events += seen.count(b"data: {")
            self._carry = seen[-6:]

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if (status := self._parser.get_status_code()) != 200:
            self._fail(f"the router answered {status}: {body[:200]!r}")
        elif self._answer is not None:
            answer, self._answer = self._answer, None
            answer.set_result(body)
        elif self._load is not None:
            self._carry = b""
            self._send_next()

    def _fail(self, why: str) -> None:
        if self._load is not None:
            self._load.fail(why)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Failed(why))


async def connect(port: int, count: int) -> list[Connection]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


async def run_through(connections: list[Connection], requests: Iterable[bytes]) -> int:
    """Send all requests over all connections; returns the number of stream events."""
    load = Load(requests, len(connections))
    for connection in connections:
        connection.start(load)
    async with asyncio.timeout(DEADLINE_S):
        await load.done
    return load.events


@contextmanager
def closing(connections: list[Connection]) -> Iterator[list[Connection]]:
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


# ------------------------------------------------------------------------------------------------------ what they ask


def http(body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: load\r\naccept: */*\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (PATH.encode(), len(data), data)
    )


def chat(messages: list[dict[str, str]], **fields: Any) -> bytes:
    return http({"model": "mock", "messages": messages, **fields})


def words(rng: random.Random, characters: int) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(characters // 5 + 1))
    return text[:characters]


WORDS = ("water", "gate", "river", "flow", "hold", "move", "stop", "lock", "canal", "field", "stone", "rain", "mill")


def short_requests(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [chat([{"role": "user", "content": f"{seed}-{number}: {words(rng, 60)}"}]) for number in range(count)]


def long_requests(count: int, seed: int, characters: int = 16_000) -> list[bytes]:
    """Distinct conversations of two turns each, which share eight system prompts."""
    rng = random.Random(seed)
    system = [words(rng, characters // 4) for _ in range(SYSTEM_PROMPTS)]
    conversations = [
        [
            {"role": "system", "content": system[number % SYSTEM_PROMPTS]},
            {"role": "user", "content": f"{seed}-{number} {words(rng, characters * 5 // 8)}"},
        ]
        for number in range(count // 2)
    ]
    later = [
        [*turn, {"role": "assistant", "content": words(rng, 200)}, {"role": "user", "content": words(rng, 1800)}]
        for turn in conversations
    ]
    return [chat(messages) for messages in conversations + later]


def stream_request(number: int, chunks: int, pace_ms: int) -> bytes:
    message = {"role": "user", "content": f"stream {number}, please"}
    return chat([message], stream=True, max_tokens=chunks, seed=pace_ms)
