"""Bounds the memory of request bodies; tenants share it fairly.

A body is charged from the moment its length is known until its prompt is tokenised, or its request ends. Small bodies are
not charged: the limit of requests in flight bounds their number.
"""

from __future__ import annotations

from starlette.types import Message, Receive

from headgate.contract.errors import BodyTooLarge, QueueFull
from headgate.edge.sharing import Sharing
from headgate.shares import Shares

FREE_BYTES = 1 << 16
BODIES_AT_ONCE = 4  # of the largest size


class Bodies:
    def __init__(self, sharing: Sharing, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.sharing = sharing
        self.memory = Shares(BODIES_AT_ONCE * max_bytes)

    def charge(self, share: str) -> Charge:
        return Charge(self, share)


class Charge:
    """The memory that one request's body uses."""

    __slots__ = ("_bodies", "_share", "charged", "received")

    def __init__(self, bodies: Bodies, share: str) -> None:
        self._bodies = bodies
        self._share = share
        self.received = 0
        self.charged = 0

    def announced(self, length: int) -> None:
        """Charge a body of `length` bytes before it arrives; raises if it is too large."""
        if length > self._bodies.max_bytes:
            raise BodyTooLarge(f"the body has {length} bytes; at most {self._bodies.max_bytes} are accepted")
        self._take(length)

    def _take(self, length: int) -> None:
        more, bodies = length - self.charged, self._bodies
        if length <= FREE_BYTES or more <= 0:
            return
        bodies.sharing.takes(self._share)
        if not bodies.memory.may_take(self._share, more, several=bodies.sharing.several):
            raise QueueFull(f"large requests of {bodies.memory.taken} bytes are being read; try again later")
        bodies.memory.take(self._share, more)
        self.charged = length

    def counted(self, receive: Receive) -> Receive:
        """Wraps `receive` for a body of unknown length, which is charged as it arrives."""

        async def counted() -> Message:
            message = await receive()
            self.received += len(message.get("body", b""))
            if self.received > self._bodies.max_bytes:
                raise BodyTooLarge(f"the body has more than {self._bodies.max_bytes} bytes")
            self._take(self.received)
            return message

        return counted

    def release(self) -> None:
        """Release the memory of the body. Later calls have no effect."""
        charged, self.charged = self.charged, 0
        if charged:
            self._bodies.memory.give_back(self._share, charged)
