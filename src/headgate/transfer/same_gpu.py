"""KV between engines on one card: from one's memory to the other's, without a way through the host.

Leases, progress and the last word stay on the connection of `tcp.py`; only the bytes of blocks go another way. D names its
card when it attaches. If that is P's too, P shows its shelf, D opens it, and P copies what is filled into a slot for D to
copy out of:

       ATTACH ─────────────►         D's card
    ◄────────── TAKEN, AGENT         P's shelf, if it is on that card
       OPENED ─────────────►         a: 1, or 0 if it cannot be opened, and all goes over the connection
       FETCH ──────────────►
    ◄─────────── READY, READY        a: first block, b: how many; a checksum; in which slot
       TOOK ───────────────►         the first of them is free again
    ◄──────────────────── END        everything had been copied before the lease ended

What finds no slot goes over the connection as BLOCKS, so nobody ever waits for somebody else's slot. Both copies are over
when their calls return: nothing is written to a block after its fetch has ended, and nobody else need wait for that.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from headgate.protocol.message import TransferCounts
from headgate.protocol.request import Ticket
from headgate.transfer.fetching import FetchClient
from headgate.transfer.frames import Attach, BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import LeaseServer, Offer
from headgate.transfer.slots import PLACE, SlotServer
from headgate.transfer.tcp import Address, TcpTransport
from headgate.transfer.transport import BlockMemory, Event, SameGpuMemory, Shelf, ShelfReader

log = logging.getLogger(__name__)

IDLE_S = 30.0  # how long another engine's shelf is kept open for the next fetch


@dataclass(slots=True, eq=False)
class OpenShelf:
    """Another engine's shelf, opened once for all connections to it."""

    shown: bytes
    shelf: ShelfReader
    users: int = 0
    left_s: float = -inf  # by the last of them


class ShelfTable:
    """What all connections of a transport share. Belongs to its thread."""

    def __init__(self, near: SameGpuMemory) -> None:
        self.near = near
        self.sent_bytes = self.received_bytes = 0
        self._shelf: Shelf | None = None
        self._free: deque[int] = deque()
        self._doors: dict[bytes, OpenShelf] = {}

    # -- our slots ------------------------------------------------------------------

    def shelf(self) -> Shelf | None:
        if self._shelf is None and (shelf := self.near.shelf()) is not None:
            self._shelf = shelf
            self._free.extend(range(shelf.slots))
        return self._shelf

    @property
    def lent(self) -> int:
        return 0 if self._shelf is None else self._shelf.slots - len(self._free)

    def take_slot(self) -> int | None:
        return self._free.popleft() if self._free else None

    def give_slot(self, slot: int) -> None:
        self._free.append(slot)

    # -- others' --------------------------------------------------------------------

    def enter(self, shown: bytes) -> OpenShelf:
        """`leave` must follow. OSError if it cannot be opened."""
        door = self._doors.get(shown)
        if door is None:
            door = self._doors[shown] = OpenShelf(shown, self.near.open(shown))
        door.users += 1
        return door

    def leave(self, door: OpenShelf, now_s: float) -> None:
        door.users -= 1
        door.left_s = now_s

    def tidy(self, now_s: float) -> None:
        """Close what nobody has used for a while: its engine may be gone, and its memory is not while we have it."""
        for door in list(self._doors.values()):
            if not door.users and now_s - door.left_s >= IDLE_S:
                del self._doors[door.shown]

    def close(self) -> None:
        self._doors.clear()


class SameGpuTransport(TcpTransport):
    def __init__(self, memory: BlockMemory, listen: Address, **settings: Any) -> None:
        super().__init__(memory, listen, **settings)
        assert memory.near is not None
        self._table = ShelfTable(memory.near)

    def counts(self) -> TransferCounts:
        counts, table = super().counts(), self._table
        return msgspec.structs.replace(
            counts,
            received_bytes=counts.received_bytes + table.received_bytes,
            sent_bytes=counts.sent_bytes + table.sent_bytes,
        )

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._table.close()

    def _tick(self, now_s: float) -> None:
        super()._tick(now_s)
        self._table.tidy(now_s)

    def _server(self, sock: socket.socket) -> LeaseServer:
        return SameGpuServer(
            self._table, sock, self._memory, self._offers.get, self._tell, self._lease_s, self._clock
        )

    def _client(self, sock: socket.socket, id: int, ticket: Ticket) -> FetchClient:
        return SameGpuClient(self._table, sock, id, ticket, self._memory, self._wait_s, self._clock)


class SameGpuServer(SlotServer):
    def __init__(
        self,
        table: ShelfTable,
        sock: socket.socket,
        memory: BlockMemory,
        find: Callable[[int], Offer | None],
        tell: Callable[[Event], None],
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(table.give_slot, sock, memory, find, tell, lease_s, clock)
        self._table = table
        self._asked = False  # whether our shelf can be opened, and not answered yet
        self._shelf: Shelf | None = None  # by which blocks go

    @property
    def must_wait(self) -> bool:
        return self._asked or super().must_wait

    def heard(self, header: FrameHeader) -> None:
        if header.kind is FrameKind.OPENED:
            self._hear_opened(bool(header.a))
        else:
            super().heard(header)

    def _attach(self, attach: Attach) -> None:
        super()._attach(attach)
        if self.offer is None or not attach.card or attach.card != self._table.near.name:
            return
        if (shelf := self._table.shelf()) is not None:
            self._asked = True
            self.say(encode(FrameHeader(FrameKind.AGENT, length=len(shelf.shown)), shelf.shown))

    def _hear_opened(self, opened: bool) -> None:
        if not self._asked:
            raise BadFrame("opened what it was not shown")
        self._asked = False
        self._shelf = self._table.shelf() if opened else None

    def _send_blocks(self, offer: Offer, stop: int) -> None:
        shelf = self._shelf
        slot = None if shelf is None else self._table.take_slot()
        if shelf is None or slot is None:
            super()._send_blocks(offer, stop)
            return
        self._lent.append(slot)
        stop = min(offer.filled, self._end, self._next + shelf.blocks)
        digest = shelf.put(slot, offer.blocks[self._next : stop])
        self._table.sent_bytes += self.say_ready(stop, slot, digest)


class SameGpuClient(FetchClient):
    def __init__(
        self,
        table: ShelfTable,
        sock: socket.socket,
        id: int,
        ticket: Ticket,
        memory: BlockMemory,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock, id, ticket, memory, wait_s, clock)
        self._table = table
        self._shown = False
        self._door: OpenShelf | None = None

    def _attachment(self) -> Attach:
        return msgspec.structs.replace(super()._attachment(), card=self._table.near.name)

    def heard(self, header: FrameHeader) -> None:
        match header.kind:
            case FrameKind.AGENT if not self._shown:
                self._shown = True
                self._open(bytes(self._said))
            case FrameKind.READY:
                self._take(header)
            case _:
                super().heard(header)

    def _open(self, shown: bytes) -> None:
        try:
            self._door = self._table.enter(shown)
        except OSError as error:
            log.info("KV comes over the connection: the other engine's memory cannot be opened: %s", error)
        self.say(encode(FrameHeader(FrameKind.OPENED, a=int(self._door is not None))))

    def _take(self, header: FrameHeader) -> None:
        if self._door is None or header.length != PLACE.size:
            raise BadFrame("blocks that are nowhere")
        shelf, (slot,) = self._door.shelf, PLACE.unpack(self._said)
        if slot >= shelf.slots or header.b > shelf.blocks:
            raise BadFrame("a slot that is not there")
        blocks = self._next_blocks(header)
        if shelf.take(slot, blocks) != header.checksum:
            raise BadFrame("wrong checksum")
        self.heard_s = self._clock()
        self._table.received_bytes += len(blocks) * self._memory.block_bytes
        self.say(encode(FrameHeader(FrameKind.TOOK)))

    def hang_up(self) -> None:
        super().hang_up()
        if self._door is not None:
            self._table.leave(self._door, self._clock())
            self._door = None
