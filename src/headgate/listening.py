"""Shared by all processes that listen on a port: binding the port, and handling the signals that stop the process."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable

from headgate.errors import HeadgateError


class PortTaken(HeadgateError):
    pass


def take_port(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that connections are refused while the model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise HeadgateError(f"{host!r} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(error, host, port) from None
    return listener


def cannot_listen(error: OSError, host: str, port: int) -> HeadgateError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"port {port} on {host} is taken; choose another with --port, or stop the process using it")
    if error.errno == errno.EACCES:
        return HeadgateError(f"this user may not use port {port}; choose one above 1023 with --port")
    return HeadgateError(f"cannot listen on {host}, port {port}: {error.strerror}")


class StopSignals:
    """Handles SIGINT and SIGTERM. While `on_stop` is not set, the first signal cancels the task that created this."""

    def __init__(self) -> None:
        self.seen = 0
        self.on_stop: Callable[[], None] | None = None  # called for every signal
        self._first = asyncio.Event()
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    async def first(self) -> None:
        await self._first.wait()

    def _on_signal(self) -> None:
        self.seen += 1
        self._first.set()
        if self.on_stop is not None:
            self.on_stop()
        elif self._task is not None and self.seen == 1:
            self._task.cancel()


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # compared with, not bound  # nosec B104
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # nosec B104
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
