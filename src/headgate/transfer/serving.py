"""The serving side: the KV that other engines may fetch, and one connection from an engine that fetches it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headgate.transfer.frames import (
    CHECKSUM_BYTES,
    PROTOCOL,
    Attach,
    BadFrame,
    Checksum,
    FrameHeader,
    FrameKind,
    encode,
    pieces,
)
from headgate.transfer.link import Body, Link
from headgate.transfer.transport import BlockMemory, Event, Released, Renewed

MESSAGE_BYTES = 8 * 2**20  # size of one BLOCKS frame: large enough that its fixed cost is small


@dataclass(slots=True)
class Offer:
    """KV that may be fetched. Written by the step loop, read by the transport's thread."""

    lease: int
    generation: int
    version: int
    blocks: tuple[int, ...]
    filled: int = 0
    withdrawn: bool = False
    taken: bool = False  # a client is attached to it


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The settings that all serving connections of a transport share."""

    memory: BlockMemory
    find: Callable[[int], Offer | None]
    post: Callable[[Event], None]
    lease_s: float
    clock: Callable[[], float]


class LeaseServer(Link):
    """Serves one connection. A lease can be used by a single connection and ends with it."""

    protocols: tuple[int, ...] = (PROTOCOL,)

    def __init__(self, sock: socket.socket, shared: ServingSettings) -> None:
        super().__init__(sock)
        self.offer: Offer | None = None
        self.since_s = shared.clock()
        self._memory, self._clock = shared.memory, shared.clock
        self._find, self._post_event, self._lease_s = shared.find, shared.post, shared.lease_s
        self._payload = bytearray()
        self._sending: Body = iter(())
        self._next, self._end, self._fetching = 0, 0, False
        self._at_once = max(1, MESSAGE_BYTES // shared.memory.block_bytes)

    def body_for(self, header: FrameHeader) -> Body:
        if header.kind is FrameKind.ATTACH and header.length:
            self._payload = bytearray(header.length)
            yield [memoryview(self._payload)]

    def received(self, header: FrameHeader) -> None:
        if self.closing:
            return  # the peer sent this before our last frame reached it
        match header.kind:
            case FrameKind.ATTACH:
                self._attach(msgspec.msgpack.decode(self._payload, type=Attach))
            case FrameKind.FETCH:
                self._fetch(header.a, header.b)
            case FrameKind.BEAT:
                self._renew()
            case FrameKind.DONE:
                self._done()
            case _:
                raise BadFrame(f"{header.kind.name} from the engine that fetches")

    def _attach(self, attach: Attach) -> None:
        offer = self._find(attach.lease)
        if self.offer is not None:
            raise BadFrame("attached twice")
        # Without the right lease id and generation, a peer learns nothing about the lease.
        if offer is None or offer.generation != attach.generation or offer.withdrawn or offer.taken:
            self._drop("unknown lease")
        elif attach.protocol not in self.protocols:
            self._drop("another protocol")
        elif attach.layout != self._memory.layout:
            self._drop("another layout")
        elif attach.version != offer.version:
            self._drop("another version")
        else:
            offer.taken = True
            self.offer = offer
            self._renew()
            self.queue(encode(FrameHeader(FrameKind.TAKEN, a=int(self._lease_s * 1000))))

    def _fetch(self, skip: int, count: int) -> None:
        offer = self._owned()
        if self._fetching or not count or skip + count > len(offer.blocks):
            raise BadFrame("a fetch of blocks that do not exist")
        self._next, self._end, self._fetching = skip, skip + count, True
        self._renew()

    def _renew(self) -> None:
        offer = self._owned()
        self._post_event(Renewed(offer.lease, offer.generation, self._clock() + self._lease_s))

    def _done(self) -> None:
        offer = self._owned()
        self._post_event(Released(offer.lease, offer.generation, fetched=True))
        self.offer = None
        self._close_soon()

    def _owned(self) -> Offer:
        if self.offer is None:
            raise BadFrame("not attached")
        return self.offer

    def _drop(self, reason: str) -> None:
        text = reason.encode()
        self.queue(encode(FrameHeader(FrameKind.DROP, length=len(text)), text))
        self._close_soon()

    def _close_soon(self) -> None:
        """Send no more frames and let the peer close first: closing with unread data could discard our last frame."""
        self.closing, self.since_s = True, self._clock()

    def more(self) -> None:
        if (portion := next(self._sending, None)) is not None:
            self.queue(portion)
            return
        offer = self.offer
        if offer is None or self.closing:
            return
        if offer.withdrawn:
            self._drop("withdrawn")
        elif self._fetching and self._next < min(offer.filled, self._end):
            self._send_blocks(offer, min(offer.filled, self._end, self._next + self._at_once))
        elif self._fetching and self._next == self._end:
            # All blocks have been read, and they are still leased now, so the data sent is correct.
            self._fetching = False
            self.queue(encode(FrameHeader(FrameKind.END)))

    def _send_blocks(self, offer: Offer, stop: int) -> None:
        blocks = offer.blocks[self._next : stop]
        length = len(blocks) * self._memory.block_bytes + CHECKSUM_BYTES
        self._sending = self._body_of(blocks)
        # Read data before the header is sent: once announced, a body must follow, even if sleep releases the cache.
        first = next(self._sending)
        self.queue([*encode(FrameHeader(FrameKind.BLOCKS, self._next, len(blocks), length)), *first])
        self._next = stop

    def _body_of(self, blocks: tuple[int, ...]) -> Body:
        checksum = Checksum()
        for portion in self._memory.lend(blocks):
            checksum.add(portion)
            yield pieces(portion)
        yield [memoryview(checksum.digest())]

    def release(self) -> None:
        """End the lease. Called when the connection has ended; its peer cannot attach again."""
        if self.offer is not None:
            self._post_event(Released(self.offer.lease, self.offer.generation, fetched=False))
            self.offer = None
