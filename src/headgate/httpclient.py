"""A minimal HTTP/1.1 client: one call per connection, chunked or with a length, and the lines of an event stream.

The load generator uses it so as not to be the bottleneck: a general HTTP client spends more CPU time on a streamed
token than the server does. The control client uses it so as not to depend on a library.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

from headgate.config import SYSTEM_CAS, TlsFiles
from headgate.tls import client_context

LONGEST_LINE = 16 * 2**20


class HttpFailure(Exception):
    pass


@dataclass(frozen=True, slots=True)
class HttpAddress:
    host: str
    port: int
    path: str  # prefix of the path of every call
    tls: bool
    files: TlsFiles = SYSTEM_CAS

    @classmethod
    def of(cls, url: str, files: TlsFiles = SYSTEM_CAS) -> HttpAddress:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80), path, tls, files)

    @property
    def context(self) -> ssl.SSLContext | None:
        return _context(self.files) if self.tls else None


_context = lru_cache(8)(client_context)  # reading the system's CAs takes longer than a call


def blocking_connection(address: HttpAddress, timeout_s: float) -> HTTPConnection:
    """Return a connection of the standard library, for callers that do not run an event loop."""
    context = address.context
    if context is None:
        return HTTPConnection(address.host, address.port, timeout=timeout_s)
    return HTTPSConnection(address.host, address.port, timeout=timeout_s, context=context)


@dataclass(slots=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces, as they arrive."""
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
    address: HttpAddress,
    method: str,
    path: str,
    body: bytes = b"",
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[HttpResponse]:
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=address.context, limit=LONGEST_LINE
    )
    try:
        writer.write(_head(address, method, path, len(body), api_key, headers or {}) + body)
        yield await _read_head(reader)
    finally:
        writer.close()


def _head(
    address: HttpAddress, method: str, path: str, length: int, api_key: str | None, headers: Mapping[str, str]
) -> bytes:
    lines = [
        f"{method} {address.path}{path} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> HttpResponse:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)
    }
    try:
        return HttpResponse(int(first.split()[1]), headers, reader)
    except (IndexError, ValueError):
        raise HttpFailure(f"not HTTP: {first[:40]!r}") from None
