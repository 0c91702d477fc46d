"""The HTTP client outside the fleet: one call per connection. A client may read slowly, disconnect early or not read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from headgate.testing.sim.loop import SimLoop


@dataclass(eq=False)
class ReceivedAnswer:
    """The part of an answer that has been received so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False  # the end of the message was received
    broken: str = ""  # why the answer will never be whole
    left: bool = False  # the client disconnected early
    began_s: float = 0.0
    ended_s: float = 0.0

    def json(self) -> Any:
        return msgspec.json.decode(bytes(self.body))

    @property
    def streamed(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> list[Any]:
        """The complete events of a stream; `[DONE]` is None."""
        blocks = bytes(self.body).split(b"\n\n")[:-1]
        data = [line[6:] for block in blocks for line in block.split(b"\n") if line.startswith(b"data: ")]
        return [None if line == b"[DONE]" else msgspec.json.decode(line) for line in data]


class _Reader(asyncio.Protocol):
    def __init__(self, reply: ReceivedAnswer, done: asyncio.Future[None], behaviour: ClientBehaviour) -> None:
        self._reply = reply
        self._done = done
        self._slow_s = behaviour.slow_s
        self._stalls = behaviour.stalls
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._stalls:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._reply.broken = f"not HTTP: {error}"
            self._end()
        if self._slow_s and not self._done.done():
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(self._slow_s, self.transport.resume_reading)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._reply.whole and not self._done.done():
            self._reply.broken = str(error) if error else "closed early"
        self._end()

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.body += body

    def on_message_complete(self) -> None:
        self._reply.whole = True
        self._end()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBehaviour:
    leaves_after_s: float | None = None
    slow_s: float = 0.0  # pause between two reads
    stalls: bool = False  # the client reads nothing
    patience_s: float = 600.0


async def call(
    address: tuple[str, int],
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    behaviour: ClientBehaviour | None = None,
    reply: ReceivedAnswer | None = None,
) -> ReceivedAnswer:
    """Return the answer, or the part of it that arrived. Never raises for network errors."""
    behaviour, reply = behaviour or ClientBehaviour(), reply or ReceivedAnswer()
    loop = cast(SimLoop, asyncio.get_running_loop())
    reply.began_s = loop.time()
    limit_s = behaviour.patience_s if behaviour.leaves_after_s is None else behaviour.leaves_after_s
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(limit_s):
            done: asyncio.Future[None] = loop.create_future()
            transport, _ = await loop.create_connection(lambda: _Reader(reply, done, behaviour), *address)
            transport.write(_request(address[0], method, path, body, headers or {}))
            await done
    except TimeoutError:
        reply.left = behaviour.leaves_after_s is not None
        reply.broken = "the client disconnected" if reply.left else f"not complete within {limit_s:g} s"
    except OSError as error:
        reply.broken = f"no connection: {error}"
    finally:
        if transport is not None:
            transport.abort()
        reply.ended_s = loop.time()
    return reply


def _request(host: str, method: str, path: str, body: Any, headers: dict[str, str]) -> bytes:
    content = b"" if body is None else msgspec.json.encode(body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n{lines}\r\n"
    return head.encode() + content
