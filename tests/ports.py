"""Ports of which nobody else is given one by the system while their owner is not there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

FIRST, MANY = 10_000, 200  # ports of a process that runs tests; far below those that the system gives away
_NEXT = count()


def own_port() -> int:
    """For somebody who comes to this address later, or again and again."""
    for _ in range(MANY):
        port = FIRST + os.getpid() % 100 * MANY + next(_NEXT) % MANY
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"all ports from {FIRST + os.getpid() % 100 * MANY} on are taken")
