"""Collects the bytes that are written in one turn of the event loop, and writes them at the end of the turn.

The receiving process is then woken once instead of once per write; waking it is most of the cost of a write.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

log = logging.getLogger(__name__)


class Outbox:
    __slots__ = ("writes",)

    MOST: Final = 64  # most connections whose writes are delayed, because a turn may be long
    LARGE: Final = 32 * 2**10  # larger writes are sent at once, so that a full buffer is noticed

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
        """Write now, because a connection is about to close or the turn is over."""
        writes = list(self.writes.items())
        self.writes.clear()
        for transport, data in writes:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:
                log.exception("cannot write to a connection")
                transport.abort()  # notifies the owner of this connection; others are unaffected
