"""Ports that are nobody else's while their owner is away: neither the system nor other tests give them to anybody."""

from __future__ import annotations

import socket
from functools import cache
from itertools import count

FIRST, BLOCKS, MANY = 10_000, 100, 200  # far below what the system gives away
_NEXT = count()


def own_port() -> int:
    """For somebody who comes to this address later, or again and again."""
    first = _block().getsockname()[1] + 1
    for _ in range(MANY - 1):
        port = first + next(_NEXT) % (MANY - 1)
        if (probe := _bound(port, again=True)) is not None:
            probe.close()
            return port
    raise OSError(f"all ports from {first} on are taken")


@cache
def _block() -> socket.socket:
    """Keeps its port, and with it those that follow, for this process."""
    for number in range(BLOCKS):
        if (guard := _bound(FIRST + number * MANY, again=False)) is not None:
            return guard
    raise OSError("there are too many tests on this machine")


def _bound(port: int, *, again: bool) -> socket.socket | None:
    """`again`: also where connections of a former owner have not quite ended."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        return None
    return found
