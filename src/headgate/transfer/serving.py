"""The side that has the KV: what is on offer, and one connection of somebody who fetches it."""

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

MESSAGE_BYTES = 8 * 2**20  # of one BLOCKS frame: so many blocks that what is done once per piece costs little


@dataclass(slots=True)
class Offer:
    """KV that may be fetched. Written by the engine's loop, read by the transport's thread."""

    lease: int
    generation: int
    version: int
    blocks: tuple[int, ...]
    filled: int = 0
    withdrawn: bool = False
    taken: bool = False  # somebody is attached to it


class LeaseServer(Link):
    """Serves one connection. A lease is good for one: when that ends, so does the lease."""

    protocols: tuple[int, ...] = (PROTOCOL,)

    def __init__(
        self,
        sock: socket.socket,
        memory: BlockMemory,
        find: Callable[[int], Offer | None],
        tell: Callable[[Event], None],
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock)
        self.offer: Offer | None = None
        self.since_s = clock()
        self._memory, self._find, self._tell, self._lease_s, self._clock = memory, find, tell, lease_s, clock
        self._said = bytearray()
        self._sending: Body = iter(())
        self._next, self._end, self._fetching = 0, 0, False
        self._at_once = max(1, MESSAGE_BYTES // memory.block_bytes)

    def body_for(self, header: FrameHeader) -> Body:
        if header.kind is FrameKind.ATTACH and header.length:
            self._said = bytearray(header.length)
            yield [memoryview(self._said)]

    def heard(self, header: FrameHeader) -> None:
        if self.closing:
            return  # said before our last word was heard
        match header.kind:
            case FrameKind.ATTACH:
                self._attach(msgspec.msgpack.decode(self._said, type=Attach))
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
        # Who does not know all of it learns no more than that.
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
            self.say(encode(FrameHeader(FrameKind.TAKEN, a=int(self._lease_s * 1000))))

    def _fetch(self, skip: int, count: int) -> None:
        offer = self._owned()
        if self._fetching or not count or skip + count > len(offer.blocks):
            raise BadFrame("a fetch of blocks that are not there")
        self._next, self._end, self._fetching = skip, skip + count, True
        self._renew()

    def _renew(self) -> None:
        offer = self._owned()
        self._tell(Renewed(offer.lease, offer.generation, self._clock() + self._lease_s))

    def _done(self) -> None:
        offer = self._owned()
        self._tell(Released(offer.lease, offer.generation, fetched=True))
        self.offer = None
        self._close_soon()

    def _owned(self) -> Offer:
        if self.offer is None:
            raise BadFrame("not attached")
        return self.offer

    def _drop(self, reason: str) -> None:
        text = reason.encode()
        self.say(encode(FrameHeader(FrameKind.DROP, length=len(text)), text))
        self._close_soon()

    def _close_soon(self) -> None:
        """Say no more, but let the other side hang up first: what it has still sent would wipe out our last word."""
        self.closing, self.since_s = True, self._clock()

    def more(self) -> None:
        if (portion := next(self._sending, None)) is not None:
            self.say(portion)
            return
        offer = self.offer
        if offer is None or self.closing:
            return
        if offer.withdrawn:
            self._drop("withdrawn")
        elif self._fetching and self._next < min(offer.filled, self._end):
            self._send_blocks(offer, min(offer.filled, self._end, self._next + self._at_once))
        elif self._fetching and self._next == self._end:
            # Everything has been read, and the blocks were still ours after that: what was sent is what it should be.
            self._fetching = False
            self.say(encode(FrameHeader(FrameKind.END)))

    def _send_blocks(self, offer: Offer, stop: int) -> None:
        blocks = offer.blocks[self._next : stop]
        length = len(blocks) * self._memory.block_bytes + CHECKSUM_BYTES
        self._sending = self._body_of(blocks)
        # Read before it is announced: an announced body must follow, even if a cache that sleeps has no memory by then.
        first = next(self._sending)
        self.say([*encode(FrameHeader(FrameKind.BLOCKS, self._next, len(blocks), length)), *first])
        self._next = stop

    def _body_of(self, blocks: tuple[int, ...]) -> Body:
        checksum = Checksum()
        for portion in self._memory.lend(blocks):
            checksum.add(portion)
            yield pieces(portion)
        yield [memoryview(checksum.digest())]

    def hang_up(self) -> None:
        """The connection is over; whoever was attached will not come again."""
        if self.offer is not None:
            self._tell(Released(self.offer.lease, self.offer.generation, fetched=False))
            self.offer = None
