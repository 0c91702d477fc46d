"""The side that needs the KV: one connection to the engine that has it, for one sequence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from math import inf
from selectors import EVENT_WRITE

import msgspec

from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
from headgate.transfer.frames import PROTOCOL, Attach, BadFrame, Header, Kind, checksum, encode, pieces
from headgate.transfer.link import Hung, Link
from headgate.transfer.transport import BlockMemory, Parts


class Dropped(Exception):
    """The other engine will not send it, and says why."""


class Client(Link):
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
        self._attached = False
        self._body = bytearray()
        self._blocks: tuple[int, ...] = ()
        self._parts: Parts = []
        self._told = self._done = 0  # blocks that were announced, and those that are here

    def connect(self) -> None:
        """The socket can be written for the first time: either we are through or we never will be."""
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise Hung(f"no connection ({error})")
        self.connected = True
        ticket = self._ticket
        attach = Attach(self.protocol, ticket.lease, ticket.generation, ticket.version, self._memory.layout)
        body = msgspec.msgpack.encode(attach)
        self.say(encode(Header(Kind.ATTACH, length=len(body)), body))
        self._ask()

    def begin(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.began_s = self.heard_s = self._clock()
        self._ask()

    def _ask(self) -> None:
        if self.fetch is not None and self.connected:
            self.say(encode(Header(Kind.FETCH, self.fetch.skip, len(self.fetch.blocks))))

    def body_for(self, header: Header) -> Iterable[memoryview]:
        if header.kind is not Kind.BLOCKS:
            self._body = bytearray(header.length)
            return (memoryview(self._body),) if header.length else ()
        if header.length != header.b * self._memory.block_bytes:
            raise BadFrame("wrong size")
        self._blocks = self._next_blocks(header)
        self._parts = self._memory.room(self._blocks)
        return pieces(self._parts)

    def _next_blocks(self, header: Header) -> tuple[int, ...]:
        """Where the blocks go that this frame tells of."""
        fetch = self.fetch
        if fetch is None or header.a != fetch.skip + self._told or not header.b:
            raise BadFrame("blocks that were not asked for")
        if header.b > len(fetch.blocks) - self._told:
            raise BadFrame("more blocks than were asked for")
        start, self._told = self._told, self._told + header.b
        return fetch.blocks[start : self._told]

    def heard(self, header: Header) -> None:
        self.heard_s = self._clock()
        match header.kind:
            case Kind.TAKEN:
                self._attached = True
                self._beat_s = header.a / 3000
                self._next_beat_s = self.heard_s + self._beat_s
            case Kind.BLOCKS:
                parts, self._parts = self._parts, []
                self._take(self._blocks, parts, header.checksum)
            case Kind.END:
                if self.fetch is None or self._told != len(self.fetch.blocks):
                    raise BadFrame("an end before the last block")
                self._hear_end()
            case Kind.DROP:
                raise Dropped(self._body.decode(errors="replace"))
            case _:
                raise BadFrame(f"{header.kind.name} from the engine that serves")

    def _take(self, blocks: tuple[int, ...], parts: Parts, digest: bytes) -> None:
        if checksum(parts) != digest:
            raise BadFrame("wrong checksum")
        self._memory.store(blocks, parts)
        self._done += len(blocks)

    def _hear_end(self) -> None:
        self.fetched = True
        self.say(encode(Header(Kind.DONE)))

    def hang_up(self) -> None:
        """The connection is over."""

    def tick(self, now_s: float) -> None:
        """Say that we are alive, and notice when the other side is not."""
        waiting = self.fetch is not None or not self._attached
        if waiting and now_s - self.heard_s >= self._wait_s:
            raise Hung("timeout")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_s
            self.say(encode(Header(Kind.BEAT)))
