"""The side that needs the KV: one connection to the engine that has it, for one sequence."""

from __future__ import annotations

import socket
from collections.abc import Callable
from math import inf
from selectors import EVENT_WRITE

import msgspec

from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
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
from headgate.transfer.link import Body, Link, PeerGone
from headgate.transfer.transport import BlockMemory


class Dropped(Exception):
    """The other engine will not send it, and says why."""


class FetchClient(Link):
    """Holds what a ticket names: attached from the start, fetching once it is told where to."""

    protocol = PROTOCOL

    def __init__(
        self,
        sock: socket.socket,
        id: int,
        ticket: Ticket,
        memory: BlockMemory,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock)
        self.events = EVENT_WRITE  # as soon as it is connected
        self.id = id
        self.fetch: Fetch | None = None
        self.connected = False
        self.fetched = False
        self.began_s = self.heard_s = clock()  # the fetch; the last thing that got us on
        self._ticket, self._memory, self._wait_s, self._clock = ticket, memory, wait_s, clock
        self._beat_s, self._next_beat_s = 0.0, inf
        self.attached = False
        self._said = bytearray()
        self._told = 0  # blocks that were announced

    def connect(self) -> None:
        """The socket can be written for the first time: either we are through or we never will be."""
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerGone(f"no connection ({error})")
        self.connected = True
        body = msgspec.msgpack.encode(self._attachment())
        self.say(encode(FrameHeader(FrameKind.ATTACH, length=len(body)), body))
        self._ask()

    def _attachment(self) -> Attach:
        ticket = self._ticket
        return Attach(self.protocol, ticket.lease, ticket.generation, ticket.version, self._memory.layout)

    def begin(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.began_s = self.heard_s = self._clock()
        self._ask()

    def _ask(self) -> None:
        if self.fetch is not None and self.connected:
            self.say(encode(FrameHeader(FrameKind.FETCH, self.fetch.skip, len(self.fetch.blocks))))

    def body_for(self, header: FrameHeader) -> Body:
        if header.kind is FrameKind.BLOCKS:
            yield from self._room_for(self._next_blocks(header))
            return
        self._said = bytearray(header.length)
        if header.length:
            yield [memoryview(self._said)]

    def _room_for(self, blocks: tuple[int, ...]) -> Body:
        checksum, told = Checksum(), bytearray(CHECKSUM_BYTES)
        for portion in self._memory.room(blocks):
            yield pieces(portion)
            checksum.add(portion)
        yield [memoryview(told)]
        if told != checksum.digest():
            raise BadFrame("wrong checksum")

    def _next_blocks(self, header: FrameHeader) -> tuple[int, ...]:
        """Where the blocks go that this frame tells of."""
        fetch = self.fetch
        if fetch is None or header.a != fetch.skip + self._told or not header.b:
            raise BadFrame("blocks that were not asked for")
        if header.b > len(fetch.blocks) - self._told:
            raise BadFrame("more blocks than were asked for")
        start, self._told = self._told, self._told + header.b
        return fetch.blocks[start : self._told]

    def heard(self, header: FrameHeader) -> None:
        self.heard_s = self._clock()
        match header.kind:
            case FrameKind.TAKEN:
                self.attached = True
                self._beat_s = header.a / 3000
                self._next_beat_s = self.heard_s + self._beat_s
            case FrameKind.BLOCKS:
                pass  # they are where they belong
            case FrameKind.END:
                if self.fetch is None or self._told != len(self.fetch.blocks):
                    raise BadFrame("an end before the last block")
                self._hear_end()
            case FrameKind.DROP:
                raise Dropped(self._said.decode(errors="replace"))
            case _:
                raise BadFrame(f"{header.kind.name} from the engine that serves")

    def _hear_end(self) -> None:
        self.fetched = True
        self.say(encode(FrameHeader(FrameKind.DONE)))

    def hang_up(self) -> None:
        """The connection is over."""

    def tick(self, now_s: float) -> None:
        """Say that we are alive, and notice when the other side is not."""
        waiting = self.fetch is not None or not self.attached
        if waiting and now_s - self.heard_s >= self._wait_s:
            raise PeerGone("timeout")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_s
            self.say(encode(FrameHeader(FrameKind.BEAT)))
