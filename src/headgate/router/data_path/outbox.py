"""Requests and answers that are written in one turn of the event loop go out at its end, one write after another.

Whoever reads them, on another core, is then woken once and stays awake. A write now and another one a little later would
wake it each time, and waking is what a write costs most.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

log = logging.getLogger(__name__)


class Outbox:
    __slots__ = ("writes",)

    MOST: Final = 64  # connections that are made to wait for it: a turn may be long
    LARGE: Final = 32 * 2**10  # bytes that go out at once: their writer should hear now if the reader is too slow

    def __init__(self) -> None:
        self.writes: dict[asyncio.WriteTransport, bytes] = {}

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        writes = self.writes
        if transport in writes:
            data = writes.pop(transport) + data
        if len(data) >= self.LARGE:
            return None if transport.is_closing() else transport.write(data)
        if not writes:
            asyncio.get_running_loop().call_soon(self.flush)
        elif len(writes) >= self.MOST:
            self.flush()
        writes[transport] = data
        return None

    def flush(self) -> None:
        """Now, because somebody is about to close his connection, or because the turn is over."""
        writes = list(self.writes.items())
        self.writes.clear()
        for transport, data in writes:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:
                log.exception("a connection takes no more, and nobody has said so")
                transport.abort()  # which tells its owner; the others shall not suffer
