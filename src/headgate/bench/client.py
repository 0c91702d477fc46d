"""One streamed request over a bare socket, timed.

A general HTTP client spends more CPU on a streamed token than the server does, and a load generator that is the bottleneck
measures itself. This one reads HTTP/1.1 with chunks or a length, and server-sent events; nothing else.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

LONGEST_LINE = 16 * 2**20

clock = time.perf_counter


class Sample(msgspec.Struct):
    """One request, as its client saw it. Times are in seconds; `start_s` counts from the start of the run."""

    start_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = []  # between one piece of text and the next
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # short enough to be counted by


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def speaks(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event: msgspec.json.Decoder[_Event] = msgspec.json.Decoder(_Event)


class HttpFailure(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    path: str  # before that of a call
    tls: bool

    @classmethod
    def of(cls, url: str) -> Address:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80), path, tls)


@dataclass(slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while piece := await self.reader.read(65536):
                yield piece

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


@asynccontextmanager
async def call(
    address: Address, method: str, path: str, body: bytes = b"", api_key: str | None = None
) -> AsyncIterator[Answer]:
    tls = ssl.create_default_context() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=LONGEST_LINE)
    try:
        writer.write(_head(address, method, path, len(body), api_key) + body)
        yield await _read_head(reader)
    finally:
        writer.close()


def _head(address: Address, method: str, path: str, length: int, api_key: str | None) -> bytes:
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)
    }
    try:
        return Answer(int(first.split()[1]), headers, reader)
    except (IndexError, ValueError):
        raise HttpFailure(f"not HTTP: {first[:40]!r}") from None


async def ask(address: Address, path: str, body: bytes, *, api_key: str | None, timeout_s: float) -> Sample:
    """Send one streamed request and watch its answer come; what goes wrong is part of the sample."""
    sample = Sample(gaps_s=[])
    begun_s = clock()
    try:
        async with asyncio.timeout(timeout_s), call(address, "POST", path, body, api_key) as answer:
            if answer.status != 200:
                sample.error = _refusal(answer.status, await answer.body())
            else:
                await _watch(answer, sample, begun_s)
    except TimeoutError:
        sample.error = "timeout"
    except (OSError, EOFError, ValueError, HttpFailure) as error:
        sample.error = type(error).__name__
    sample.total_s = clock() - begun_s
    return sample


async def _watch(answer: Answer, sample: Sample, begun_s: float) -> None:
    last_s, pieces = None, 0
    async for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = _event.decode(data)
        if event.error is not None:
            sample.error = str(event.error.code or event.error.message)
        if event.usage is not None:
            sample.prompt_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices:
            sample.finish_reason = choice.finish_reason or sample.finish_reason
            if choice.speaks:
                now_s = clock()
                if last_s is None:
                    sample.first_token_s = now_s - begun_s
                else:
                    sample.gaps_s.append(now_s - last_s)
                last_s, pieces = now_s, pieces + 1
    else:
        sample.error = sample.error or "stream cut"
    sample.output_tokens = sample.output_tokens or pieces


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _event.decode(body).error
    except msgspec.MsgspecError:
        error = None
    return f"{status} {error.code}" if error and error.code else str(status)
