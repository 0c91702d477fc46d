"""Memory for the bodies of requests: bounded for all together, and shared among tenants as places are.

A body is charged from the moment its length is known until its prompt is tokens, or its request is over. Small ones are
free: their number is bounded by the places of the server.
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
    """What one request's body takes."""

    __slots__ = ("_bodies", "_share", "charged", "received")

    def __init__(self, bodies: Bodies, share: str) -> None:
        self._bodies = bodies
        self._share = share
        self.received = 0
        self.charged = 0

    def announced(self, length: int) -> None:
        """The body has `length` bytes: refuse it if that is too much, before it comes."""
        if length > self._bodies.max_bytes:
            raise BodyTooLarge(f"the body has {length} bytes; at most {self._bodies.max_bytes} are taken")
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
        """`receive` for a body of unknown length, charged as it comes."""

        async def counted() -> Message:
            message = await receive()
            self.received += len(message.get("body", b""))
            if self.received > self._bodies.max_bytes:
                raise BodyTooLarge(f"the body has more than {self._bodies.max_bytes} bytes")
            self._take(self.received)
            return message

        return counted

    def release(self) -> None:
        """The body is gone; said again, it changes nothing."""
        charged, self.charged = self.charged, 0
        if charged:
            self._bodies.memory.give_back(self._share, charged)
