"""A TCP proxy between the router and one server, which can delay, hold back, cut or reset connections.

There is one proxy per server. The router knows only the proxy's address, so the server may restart at another
address. Every fault is a field that is read when bytes arrive; setting it back ends the fault.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: the peer receives RST instead of FIN
PIECE = 65536


class ProxiedConnection:
    """One connection from the router, and its counterpart to the server."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.cut_next = False

    def reset(self) -> None:
        for writer in (self.near, self.far):
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with suppress(OSError, ValueError):  # the connection is already closing
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class FaultProxy:
    """An async context manager. `url` is the address for the router, `target` the address of the server."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.url = ""
        self.delay_s = 0.0
        self.links: set[ProxiedConnection] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refuses = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closing a connection takes one more iteration of the event loop

    # -- faults -------------------------------------------------------------------------

    def stall(self) -> None:
        """Hold back all bytes in both directions. New connections are accepted and stay silent."""
        self._flowing.clear()

    def partition(self) -> None:
        """Hold back all bytes and refuse new connections."""
        self._refuses = True
        self._flowing.clear()

    def restore(self) -> None:
        """End all faults. Connections from before a partition are reset, as if the path had lost their state."""
        partitioned, self._refuses, self.delay_s = self._refuses, False, 0.0
        if partitioned:
            self.reset()
        self._flowing.set()

    def reset(self) -> int:
        """Reset every connection; returns how many there were."""
        links = tuple(self.links)
        for link in links:
            link.reset()
        return len(links)

    def cut_next_answers(self) -> int:
        """On each connection, pass on half of the next bytes from the server and then close the connection."""
        for link in self.links:
            link.cut_next = True
        return len(self.links)

    # -- bytes --------------------------------------------------------------------------

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses or self.target is None:
            ProxiedConnection(writer, writer).reset()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            # A listening socket cannot refuse a connection; a reset is the closest equivalent.
            ProxiedConnection(writer, writer).reset()
            return
        link = ProxiedConnection(writer, far_writer)
        self.links.add(link)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(link, reader, far_writer, answers=False))
                both.create_task(self._pass(link, far_reader, writer, answers=True))
        except* (OSError, EOFError, RuntimeError):  # uvloop raises RuntimeError for a closed connection
            link.reset()
        finally:
            self.links.discard(link)
            writer.close()
            far_writer.close()

    async def _pass(
        self, link: ProxiedConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while piece := await reader.read(PIECE):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            if answers and link.cut_next:
                writer.write(piece[: len(piece) // 2])
                writer.close()  # a reset would discard bytes that were not read yet
                link.far.transport.abort()
                return
            writer.write(piece)
            await writer.drain()
        await self._flowing.wait()
        if writer.can_write_eof():
            with suppress(OSError):
                writer.write_eof()
