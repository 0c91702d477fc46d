"""Detects clients that do not read, by checking whether the bytes buffered for a connection are being sent.

Bytes count as sent when the peer has acknowledged them, which happens as long as the client reads, however slowly.
The kernel counts acknowledged bytes; on systems where it does not, the size of the transport's buffer is used. Writes
need no extra work: each connection is checked once a second, and the check of an idle connection is a single call (two
with TLS).

A TLS transport passes encrypted bytes to another transport, whose buffer cannot be seen. That buffer holds bytes only
while the kernel also has bytes that it could not send, so with TLS these count as buffered.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

STALL_S = 30.0  # a request whose client has read nothing for this long is ended
UNREAD_S = 2.0  # how long an abort, a pause or a shutdown waits for a client that reads nothing
LEAST_S = 0.05  # the shortest time that an abort waits for clients, even if the engines answered after its deadline
POLL_S = 0.25  # how often a wait checks its clients

TLS_BUFFER_BYTES = 64 * 2**10  # the default of TCP transports; that of TLS transports is eight times as large
# The fields tcpi_bytes_acked and tcpi_notsent_bytes in Linux's struct tcp_info.
TCP_INFO = struct.Struct("=120xQ16xI")


class Outflow:
    """The progress of one connection's outgoing bytes."""

    __slots__ = ("_mark", "_since_s", "_tls", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._tls = transport.get_extra_info("sslcontext") is not None
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
        if not size and not self._tls:
            return None
        kernel = _counts(self.transport.get_extra_info("socket"))
        if not size and not (kernel and kernel.unsent):
            return None
        return -size if kernel is None else kernel.acknowledged


class _KernelCounts(NamedTuple):
    acknowledged: int  # bytes since the connection began
    unsent: int  # bytes in the kernel's buffer that were not sent yet


def _counts(connection: socket.socket | None) -> _KernelCounts | None:
    if connection is None or sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    except OSError:  # not TCP, or closed
        return None
    return _KernelCounts(*TCP_INFO.unpack(info)) if len(info) == TCP_INFO.size else None


def limit_tls_buffer(transport: asyncio.Transport) -> None:
    """Buffer no more than without TLS, so that few tokens are computed for a client that does not read."""
    if transport.get_extra_info("sslcontext") is not None:
        transport.set_write_buffer_limits(high=TLS_BUFFER_BYTES)


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
