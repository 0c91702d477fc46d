"""Reserved ports: neither the kernel nor other tests assign them while their owner does not listen."""

from __future__ import annotations

import socket
from functools import cache
from itertools import count

FIRST, BLOCKS, MANY = 10_000, 100, 200  # far below the kernel's ephemeral ports
_NEXT = count()


def own_port() -> int:
    """Return a port for a process that binds it later, or repeatedly."""
    first = _block().getsockname()[1] + 1
    for _ in range(MANY - 1):
        port = first + next(_NEXT) % (MANY - 1)
        if (probe := _bound(port, again=True)) is not None:
            probe.close()
            return port
    raise OSError(f"all ports from {first} on are taken")


@cache
def _block() -> socket.socket:
    """Reserve a block of ports for this process by binding the first one."""
    for number in range(BLOCKS):
        if (guard := _bound(FIRST + number * MANY, again=False)) is not None:
            return guard
    raise OSError("there are too many tests on this machine")


def _bound(port: int, *, again: bool) -> socket.socket | None:
    """Bind a port; None if it is taken. With `again`, connections in TIME_WAIT do not prevent it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        return None
    return found
