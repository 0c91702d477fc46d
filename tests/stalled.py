"""Clients that send requests and do not read the answers, on raw sockets with small buffers."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"
RECEIVE_BYTES = 4096
SEND_BYTES = 16384  # send buffer of a server, too small for a whole answer


class Mute:
    """A client that sends requests on one connection, and reads only when the test asks for it."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.socket.settimeout(60)
        self.socket.connect((address.hostname, address.port))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=address.hostname)

    def post(self, path: str, body: Any, **headers: str) -> None:
        content = json.dumps(body).encode()
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def read(self, size: int = 65536) -> bytes:
        return self.socket.recv(size)

    def rest(self) -> bytes:
        """Return everything received until the connection ends, however it ends."""
        parts = []
        try:
            while part := self.read():
                parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)

    def rest_of_answer(self) -> bytes:
        """Return the rest of a chunked answer, up to its last chunk."""
        received = b""
        while not received.endswith(LAST_CHUNK):
            part = self.read()
            assert part, "the connection ended before the answer"
            received += part
        return received

    def close(self) -> None:
        self.socket.close()


@contextmanager
def mute(url: str, path: str, body: Any, **headers: str) -> Iterator[Mute]:
    client = Mute(url)
    try:
        client.post(path, body, **headers)
        yield client
    finally:
        client.close()
