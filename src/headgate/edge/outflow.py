"""Clients that do not read: whether the bytes that wait for a connection leave it.

Bytes have left when the other side has acknowledged them, which it does for a client that reads, however slowly. The kernel
counts them; where it does not, the size of the transport's buffer shows it. Nothing is counted per write: a connection is
looked at once a second, and one that has nothing to send costs a single call.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Mapping
from math import inf

STALL_S = 30.0  # without progress, after which a request is ended
UNREAD_S = 2.0  # that an abort, a pause or a shutdown waits for a client that reads nothing
LEAST_S = 0.05  # that an abort waits for clients, however late the engines have answered
LOOK_S = 0.25  # how often a wait looks at clients

BYTES_ACKED = struct.Struct("=120xQ")  # in Linux's struct tcp_info


class Outflow:
    """What leaves one connection."""

    __slots__ = ("_mark", "_since_s", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._mark: int | None = None
        self._since_s = -inf  # set before it is read

    def stalled_s(self, now_s: float) -> float:
        """How long bytes have waited and none has left, as seen by those who ask; 0 if none waits."""
        before, self._mark = self._mark, self._look()
        if self._mark is None:
            return 0.0
        if before is None or self._mark > before:
            self._since_s = now_s
        return now_s - self._since_s

    def _look(self) -> int | None:
        """A number that grows when bytes leave; None if none waits."""
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
    except OSError:  # no TCP, or closed
        return None
    return int(BYTES_ACKED.unpack(info)[0]) if len(info) == BYTES_ACKED.size else None


async def await_readers(ends: Mapping[asyncio.Future[None], asyncio.Transport | None], timeout_s: float) -> None:
    """Wait for these ends, each with the connection of its client; at most UNREAD_S for a client that reads nothing."""
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
            await asyncio.wait(waiting, timeout=min(left_s, LOOK_S))
