"""The fetching side: one connection to the engine that has the KV, for one sequence."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
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
    """The other engine refuses to send the KV; the message is its reason."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """The settings that all fetching connections of a transport share."""

    memory: BlockMemory
    wait_s: float  # longest time without progress
    clock: Callable[[], float]


class FetchClient(Link):
    """Attaches to the lease of a ticket at once, and fetches its KV when `begin` names the blocks to fill."""

    protocol = PROTOCOL

    def __init__(self, sock: socket.socket, id: int, ticket: Ticket, shared: FetchSettings) -> None:
        super().__init__(sock)
        self.events = EVENT_WRITE  # the socket becomes writable when the connection is established
        self.id = id
        self.fetch: Fetch | None = None
        self.connected = False
        self.fetched = False
        self.began_s = self.last_progress_s = shared.clock()  # start of the fetch, and its last progress
        self._ticket = ticket
        self._memory, self._wait_s, self._clock = shared.memory, shared.wait_s, shared.clock
        self._beat_s, self._next_beat_s = 0.0, inf
        self.attached = False
        self._payload = bytearray()
        self._announced = 0  # number of blocks that BLOCKS or READY frames have announced

    def connect(self) -> None:
        """Complete the connection, when the socket first becomes writable; raises PeerGone if it has failed."""
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerGone(f"no connection ({error})")
        self.connected = True
        body = msgspec.msgpack.encode(self._attachment())
        self.queue(encode(FrameHeader(FrameKind.ATTACH, length=len(body)), body))
        self._ask()

    def _attachment(self) -> Attach:
        ticket = self._ticket
        return Attach(self.protocol, ticket.lease, ticket.generation, ticket.version, self._memory.layout)

    def begin(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.began_s = self.last_progress_s = self._clock()
        self._ask()

    def _ask(self) -> None:
        if self.fetch is not None and self.connected:
            self.queue(encode(FrameHeader(FrameKind.FETCH, self.fetch.skip, len(self.fetch.blocks))))

    def body_for(self, header: FrameHeader) -> Body:
        if header.kind is FrameKind.BLOCKS:
            yield from self._room_for(self._next_blocks(header))
            return
        self._payload = bytearray(header.length)
        if header.length:
            yield [memoryview(self._payload)]

    def _room_for(self, blocks: tuple[int, ...]) -> Body:
        checksum, received = Checksum(), bytearray(CHECKSUM_BYTES)
        for portion in self._memory.room(blocks):
            yield pieces(portion)
            checksum.add(portion)
        yield [memoryview(received)]
        if received != checksum.digest():
            raise BadFrame("wrong checksum")

    def _next_blocks(self, header: FrameHeader) -> tuple[int, ...]:
        """Return the blocks of our cache into which the content of this frame is written."""
        fetch = self.fetch
        if fetch is None or header.a != fetch.skip + self._announced or not header.b:
            raise BadFrame("blocks that were not requested")
        if header.b > len(fetch.blocks) - self._announced:
            raise BadFrame("more blocks than were requested")
        start, self._announced = self._announced, self._announced + header.b
        return fetch.blocks[start : self._announced]

    def received(self, header: FrameHeader) -> None:
        self.last_progress_s = self._clock()
        match header.kind:
            case FrameKind.TAKEN:
                self.attached = True
                self._beat_s = header.a / 3000
                self._next_beat_s = self.last_progress_s + self._beat_s
            case FrameKind.BLOCKS:
                pass  # the body has already been written to its blocks
            case FrameKind.END:
                if self.fetch is None or self._announced != len(self.fetch.blocks):
                    raise BadFrame("an end before the last block")
                self._on_end()
            case FrameKind.DROP:
                raise Dropped(self._payload.decode(errors="replace"))
            case _:
                raise BadFrame(f"{header.kind.name} from the engine that serves")

    def _on_end(self) -> None:
        self.fetched = True
        self.queue(encode(FrameHeader(FrameKind.DONE)))

    def release(self) -> None:
        """Called once, after the connection has closed. Transports that hold memory of the peer override it."""

    def tick(self, now_s: float) -> None:
        """Send heartbeats, and detect a peer that has stopped responding."""
        waiting = self.fetch is not None or not self.attached
        if waiting and now_s - self.last_progress_s >= self._wait_s:
            raise PeerGone("timeout")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_s
            self.queue(encode(FrameHeader(FrameKind.BEAT)))
