"""An HTTP client of the router over one raw socket, so that a test controls and sees every byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

from headgate.config import RouteConfig, WorkerAddress
from headgate.listening import take_port
from headgate.router.data_path.fast_path import FastPath
from headgate.router.router import Router
from headgate.router.server import serving
from tests.router.compiled import compiled_fast_path
from tests.router.mock import CHAT, Mock, text_of

PATIENCE_S = 60.0  # limit for every wait in a test


@dataclass
class Response:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]  # type: ignore[no-any-return]


class Wire:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._responses: list[Response] = []
        self._taken = 0
        self._size = 0

    @classmethod
    async def open(cls, url: str, **options: Any) -> Wire:
        host, port = url.partition("://")[2].split(":")
        return cls(*await asyncio.open_connection(host, int(port), **options))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.send(
            f"POST {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(content)}\r\n\r\n".encode() + content
        )

    async def response(self) -> Response:
        """Return the next response; it is incomplete if the connection closed before its end."""
        while len(self._responses) <= self._taken or not self._responses[self._taken].complete:
            if not await self._more():
                break
        if len(self._responses) <= self._taken:
            return Response()
        self._taken += 1
        return self._responses[self._taken - 1]

    async def some(self, size: int) -> Response:
        """Return the response once at least `size` bytes of its body have arrived."""
        while self._size < size and await self._more():
            pass
        return self._responses[-1]

    async def _more(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            data = await self._reader.read(65536)
        if not data:
            if self._responses and not self._framed:
                self._responses[-1].complete = True
            return False
        self._parser.feed_data(data)
        return True

    async def closed(self) -> bool:
        """Whether the peer closes the connection."""
        while await self._more():
            pass
        self.close()
        return True

    def on_message_begin(self) -> None:
        self._responses.append(Response())
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._responses[-1].headers.append((name.decode().lower(), value.decode("latin-1")))
        self._framed |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._responses[-1].status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._responses[-1].body += body
        self._size += len(body)

    def on_message_complete(self) -> None:
        self._responses[-1].complete = True

    def close(self) -> None:
        self.writer.transport.abort()


async def ask(url: str, path: str, body: Any, headers: Mapping[str, str] = {}, **options: Any) -> Response:
    wire = await Wire.open(url, **options)
    try:
        wire.post(path, body, headers)
        return await wire.response()
    finally:
        wire.close()


# --------------------------------------------------------------------------------------------- the content of answers


class Wrong(AssertionError):
    pass


def check(body: dict[str, Any], response: Response, path: str = CHAT) -> str | None:
    """Return None if the answer is exactly that of an undisturbed worker, or the code if it is one clear error."""
    if not response.complete:
        raise Wrong(f"the answer is not complete: {response}")
    if body.get("stream") and response.status == 200:
        return _check_stream(body, response, path)
    if response.status != 200:
        return str(response.error["code"])
    said = response.json
    for index in range(body.get("n") or 1):
        choice = said["choices"][index]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        _same(text, text_of(body, index), choice["index"], index, choice["finish_reason"], "length")
    return None


def _check_stream(body: dict[str, Any], response: Response, path: str) -> str | None:
    texts: dict[int, str] = {}
    roles: dict[int, int] = {}
    finishes: dict[int, int] = {}
    done = usage = 0
    ids, errors = set(), []
    for block in response.body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        if done or errors:
            raise Wrong(f"{lines} after the end")
        if len(lines) != 1 or not lines[0].startswith("data: "):
            raise Wrong(f"not an event: {lines}")
        if lines[0] == "data: [DONE]":
            done += 1
            continue
        event = json.loads(lines[0][6:])
        if "error" in event:
            errors.append(event["error"]["code"])
            continue
        ids.add((event["id"], event["created"]))
        usage += "usage" in event
        for choice in event["choices"]:
            index = choice["index"]
            said = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[index] = texts.get(index, "") + said
            roles[index] = roles.get(index, 0) + ("role" in choice.get("delta", ()))
            finishes[index] = finishes.get(index, 0) + (choice["finish_reason"] is not None)
    wanted = {index: text_of(body, index) for index in range(body.get("n") or 1)}
    if errors:
        for index, text in texts.items():
            _same(wanted[index][: len(text)], text)
        return str(errors[0])
    once = dict.fromkeys(wanted, 1)
    _same(texts, wanted, finishes, once, (done, usage, len(ids)), (1, 1, 1))
    if path == CHAT:
        _same(roles, once)
    return None


def _same(*pairs: Any) -> None:
    for got, wanted in zip(pairs[::2], pairs[1::2], strict=True):
        if got != wanted:
            raise Wrong(f"{got!r} instead of {wanted!r}")


# --------------------------------------------------------------------------------------------------- running a router


def quick(**settings: Any) -> RouteConfig:
    """Return a config whose timeouts tolerate a machine that stalls for seconds. Tests of a timeout set their own."""
    defaults = {
        "probe_interval_s": 0.1,
        "probe_timeout_s": 30.0,
        "silence_s": 30.0,
        "idle_timeout_s": 30.0,
        "first_byte_timeout_s": 30.0,
        "patience_s": 30.0,
        "connect_timeout_s": 30.0,
        "drain_timeout_s": 30.0,
    }
    return RouteConfig(**(defaults | settings))


@asynccontextmanager
async def routing(
    *mocks: Mock, send_bytes: int | None = None, fast_path: FastPath | None = None, **settings: Any
) -> AsyncIterator[tuple[Router, str]]:
    """Run a router in front of these workers, and yield when all are ready; on exit it must have released everything.

    `send_bytes` is the size of the kernel's send buffer per client. The default `fast_path` is the compiled one.
    """
    config = quick(workers=tuple(WorkerAddress(url=mock.url, role="mixed", key=None) for mock in mocks), **settings)
    router = Router(config, seed=1, fast_path=fast_path or compiled_fast_path())
    listener = take_port("127.0.0.1", 0)
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    async with serving(router, listener, "test") as url:
        there = [router.fleet.find(mock.url) for mock in mocks if mock._server is not None]
        await until(lambda: all(worker.state != "starting" for worker in there))
        yield router, url
        await settled(router)
        assert_nothing_left(router)


async def settled(router: Router) -> None:
    """Wait until no request is in flight."""
    await until(lambda: not router.live)


async def until(true: Any, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.005)


def assert_nothing_left(router: Router) -> None:
    assert router.live == {}
    assert (router.admission.in_flight, router.admission.waiting) == (0, 0)
    assert {worker.url: (worker.in_flight, worker.pending_tokens) for worker in router.fleet.with_leaving} == {
        worker.url: (0, 0) for worker in router.fleet.with_leaving
    }
    assert router.fleet.double_releases == 0
