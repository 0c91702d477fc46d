"""One connection: sends and receives frames without blocking."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from selectors import EVENT_READ

from headgate.transfer.frames import HEADER_BYTES, BadFrame, Cursor, FrameHeader, decode_header

Body = Iterator[list[memoryview]]  # the next portion is requested when the last has been sent or filled

MOST_BYTES_PER_TURN = 8 * 2**20  # per connection, so that other connections get their turn


class PeerGone(Exception):
    """The peer has closed the connection or does not respond."""


class Link:
    """A connection. Subclasses define where a body is stored (`body_for`) and how to react to frames (`received`)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.events = EVENT_READ  # what the selector waits for
        self.closing = False  # if true, no further data will be queued
        self._out = Cursor()
        self._head = bytearray(HEADER_BYTES)
        self._header: FrameHeader | None = None
        self._body: Body = iter(())
        self._left = 0  # remaining bytes of the body
        self._into = Cursor([memoryview(self._head)])

    def body_for(self, header: FrameHeader) -> Body:
        raise NotImplementedError

    def received(self, header: FrameHeader) -> None:
        raise NotImplementedError

    def more(self) -> None:
        """Queue more data to send, if there is any. Called when all queued data has been sent."""

    def queue(self, buffers: Iterable[memoryview]) -> None:
        self._out.add(buffers)

    @property
    def wants_to_send(self) -> bool:
        return bool(self._out)

    def send(self) -> int:
        """Send queued data without blocking; returns the number of bytes sent."""
        sent = 0
        while self._has_more() and sent < MOST_BYTES_PER_TURN:
            try:
                count = self.sock.sendmsg(self._out.front())
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(_why(error)) from error
            self._out.advance(count)
            sent += count
        return sent

    def _has_more(self) -> bool:
        if not self._out:
            self.more()
        return bool(self._out)

    def receive(self) -> int:
        """Receive data without blocking; returns the number of bytes received."""
        came = 0
        while came < MOST_BYTES_PER_TURN:
            try:
                count = self.sock.recvmsg_into(self._into.front())[0]
            except BlockingIOError:
                break
            except OSError as error:
                raise PeerGone(_why(error)) from error
            if not count:
                raise PeerGone("closed")
            came += count
            self._into.advance(count)
            if not self._into:
                self._step()
        return came

    def _step(self) -> None:
        """Handle the buffer that was just filled: a header, or a portion of the body."""
        if self._header is None:
            self._header = decode_header(self._head)
            self._body, self._left = self.body_for(self._header), self._header.length
        portion = next(self._body, None)
        self._left -= sum(map(len, portion or ()))
        if self._left < 0 or (portion is None and self._left):
            raise BadFrame(f"{self._header.kind.name} has the wrong length: {self._header.length} bytes")
        if portion is not None:
            self._into = Cursor(portion)
            return
        header, self._header = self._header, None
        self._into = Cursor([memoryview(self._head)])
        self.received(header)


def _why(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error").lower()
