"""Many clients of a live server in one event loop; each reads a stream and records the events that it receives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headgate.httpclient import HttpAddress, call

COMPLETIONS = "/v1/completions"


@dataclass
class Received:
    """What one client received."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # one per token
    text: str = ""
    ends: list[tuple[str, str]] = field(default_factory=list)  # finish reasons and causes; there must be one
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    comments: int = 0
    done: bool = False  # [DONE] was received
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> tuple[str, str]:
        assert len(self.ends) == 1, self
        return self.ends[0]

    def add(self, event: dict[str, Any]) -> None:
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.tokens += choice.get("completion_token_ids", ())
            for span in choice.get("weight_versions", ()):
                self.versions += [span["version"]] * span["tokens"]
            if choice["finish_reason"]:
                self.ends.append((choice["finish_reason"], choice["cause"]))
        if self.tokens:
            self.begun.set()


def asking(tokens: int = 8, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_weight_versions": True,
        **more,
    }


async def stream(
    url: str, body: dict[str, Any], received: Received, path: str = COMPLETIONS, key: str | None = None
) -> Received:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with call(HttpAddress.of(url), "POST", path, json.dumps(body).encode(), key) as answer:
        received.status, received.headers = answer.status, dict(answer.headers)
        if answer.status != 200:
            received.error = json.loads(await answer.body())["error"]
            received.begun.set()
            return received
        async for line in answer.lines():
            received.comments += line.startswith(b":")
            if line == b"data: [DONE]":
                received.done = True
            elif line.startswith(b"data: "):
                received.add(json.loads(line.removeprefix(b"data: ")))
    received.begun.set()
    return received


@asynccontextmanager
async def streaming(url: str, bodies: list[dict[str, Any]], **options: Any) -> AsyncIterator[list[Received]]:
    """Start streams, yield them while they are in progress, and read them completely when the context exits."""
    received = [Received() for _ in bodies]
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        for body, each in zip(bodies, received, strict=True):
            tasks.create_task(stream(url, body, each, **options))
        yield received


async def begun(received: list[Received], count: int | None = None) -> None:
    """Wait until this many streams have their first token."""
    wanted = len(received) if count is None else count
    await until(lambda: sum(each.begun.is_set() for each in received) >= wanted)


async def until(true: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            value = true()
            if value if isinstance(value, bool) else await value:
                return
            await asyncio.sleep(0.005)


class Missed(Exception):
    """The state under test had passed before the test reached it, because its process was not scheduled."""


def unless_missed(main: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Run a test that must observe work in progress. If the work was already done, repeat the test with more work."""
    for longer in (1, 3, 8):
        try:
            asyncio.run(main(longer))
            return
        except* Missed:
            pass
    raise AssertionError("it came too late every time")


@dataclass
class Told:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def result(self) -> Any:
        return self.body["result"]


async def send(url: str, method: str, path: str, body: Any = None, key: str | None = None) -> Told:
    data = b"" if body is None else json.dumps(body).encode()
    async with asyncio.timeout(100), call(HttpAddress.of(url), method, path, data, key) as answer:
        raw = await answer.body()
        try:
            read = json.loads(raw) if raw else None
        except ValueError:
            read = raw.decode()
        return Told(answer.status, dict(answer.headers), read)


async def post(url: str, path: str, body: Any = None, key: str | None = None) -> Told:
    return await send(url, "POST", path, body, key)


async def get(url: str, path: str, key: str | None = None) -> Told:
    return await send(url, "GET", path, None, key)
