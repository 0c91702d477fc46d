"""What stands between the router and one server: bytes pass, until somebody has them come late, not at all, or in half.

One object per server, whose address the router knows; the server behind it may die and come back. All trouble is a field
that is read when bytes come, so that mending is to set it back.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)  # linger for no time: the other side hears a reset instead of an end
PIECE = 65536


class ProxiedConnection:
    """One connection of the router's, and ours to the server for it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.cut_next = False

    def reset(self) -> None:
        for writer in (self.near, self.far):
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with suppress(OSError, ValueError):  # it is being closed
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class FaultProxy:
    """Use as `async with`; `url` is what the router is told, `target` where the server listens."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.url = ""
        self.delay_s = 0.0
        self.links: set[ProxiedConnection] = set()
        self._flows = asyncio.Event()
        self._flows.set()
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
        await asyncio.sleep(0)  # connections that were closed are so a turn later

    # -- trouble ------------------------------------------------------------------------

    def stall(self) -> None:
        """Bytes stay where they are, in both directions; connections are taken, and hear nothing."""
        self._flows.clear()

    def partition(self) -> None:
        """What is open falls silent, and nobody can connect."""
        self._refuses = True
        self._flows.clear()

    def restore(self) -> None:
        """All flows again; connections that a partition has held are gone, as on a path that forgot them."""
        forgotten, self._refuses, self.delay_s = self._refuses, False, 0.0
        if forgotten:
            self.reset()
        self._flows.set()

    def reset(self) -> int:
        """Every connection, now; how many there were."""
        links = tuple(self.links)
        for link in links:
            link.reset()
        return len(links)

    def cut_next_answers(self) -> int:
        """Of what the server says next on each connection, half passes, and then it ends."""
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
            ProxiedConnection(
                writer, writer
            ).reset()  # as close to a refused connection as someone who listens can get
            return
        link = ProxiedConnection(writer, far_writer)
        self.links.add(link)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(link, reader, far_writer, answers=False))
                both.create_task(self._pass(link, far_reader, writer, answers=True))
        except* (OSError, EOFError, RuntimeError):  # the last one is uvloop's word for a connection that is closed
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
            await self._flows.wait()
            if answers and link.cut_next:
                writer.write(piece[: len(piece) // 2])
                writer.close()  # and no reset, which would take along what was not read yet
                link.far.transport.abort()
                return
            writer.write(piece)
            await writer.drain()
        await self._flows.wait()
        if writer.can_write_eof():
            with suppress(OSError):
                writer.write_eof()
