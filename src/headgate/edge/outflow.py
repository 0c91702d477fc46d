"""Detects clients that do not read, by checking whether the bytes buffered for a connection are being sent.

Bytes count as sent when the peer has acknowledged them, which happens as long as the client reads, however slowly.
The kernel counts acknowledged bytes; on systems where it does not, the size of the transport's buffer is used. Writes
need no extra work: each connection is checked once a second, and the check of an idle connection is a single call.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Mapping
from math import inf

STALL_S = 30.0  # a request whose client has read nothing for this long is ended
UNREAD_S = 2.0  # how long an abort, a pause or a shutdown waits for a client that reads nothing
LEAST_S = 0.05  # the shortest time that an abort waits for clients, even if the engines answered after its deadline
POLL_S = 0.25  # how often a wait checks its clients

BYTES_ACKED = struct.Struct("=120xQ")  # the field tcpi_bytes_acked in Linux's struct tcp_info


class Outflow:
    """The progress of one connection's outgoing bytes."""

    __slots__ = ("_mark", "_since_s", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._mark: int | None = None
        self._since_s = -inf  # time of the last progress; always set before it is read

    def stalled_s(self, now_s: float) -> float:
        """Return for how long buffered bytes have made no progress; 0 if no bytes are buffered.

        Progress is measured between calls of this method.
        """
        before, self._mark = self._mark, self._progress()
        if self._mark is None:
            return 0.0
        if before is None or self._mark > before:
            self._since_s = now_s
        return now_s - self._since_s

    def _progress(self) -> int | None:
        """A number that grows when bytes are sent; None if no bytes are buffered."""
        size = self.transport.get_write_buffer_size()
        if not size:
            return None
        acknowledged = _acknowledged(self.transport.get_extra_info("socket"))
        return -size if acknowledged is None else acknowledged


def _acknowledged(connection: socket.socket | None) -> int | None:
    if connection is None or sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED.size)
    except OSError:  # not TCP, or closed
        return None
    return int(BYTES_ACKED.unpack(info)[0]) if len(info) == BYTES_ACKED.size else None


async def await_readers(ends: Mapping[asyncio.Future[None], asyncio.Transport | None], timeout_s: float) -> None:
    """Wait until these requests have ended, each given with its client's connection; at most `timeout_s`.

    For a client that reads nothing, the wait is at most UNREAD_S.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    waiting = {end: None if transport is None else Outflow(transport) for end, transport in ends.items()}
    while waiting and (left_s := deadline_s - (now_s := clock())) > 0:
        waiting = {
            end: outflow
            for end, outflow in waiting.items()
            if not end.done() and (outflow is None or outflow.stalled_s(now_s) < UNREAD_S)
        }
        if waiting:
            await asyncio.wait(waiting, timeout=min(left_s, POLL_S))
