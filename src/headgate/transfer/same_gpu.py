"""KV transfer between engines on one GPU: copied within device memory, not through the host.

Leases, progress and the final confirmation stay on the connection of `tcp.py`; only block data takes another path. D
names its GPU when it attaches. If P is on the same GPU, P describes its *shelf*, a set of slots in device memory. D
opens the shelf; P copies filled blocks into a slot, and D copies them out:

       ATTACH ─────────────►         D's GPU
    ◄────────── TAKEN, AGENT         P's shelf, if P is on that GPU
       OPENED ─────────────►         a: 1; or 0 if D cannot open it, and all blocks go over the connection
       FETCH ──────────────►
    ◄─────────── READY, READY        a: first block, b: how many; a checksum; the slot
       TOOK ───────────────►         the slot of the first READY is free again
    ◄──────────────────── END        everything had been copied before the lease ended

If no slot is free, blocks are sent over the connection as BLOCKS, so no connection ever waits for a slot that another
connection uses. Both copies are complete when their calls return: nothing is written to a block after its fetch has
ended.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from headgate.protocol.message import TransferCounts
from headgate.protocol.request import Ticket
from headgate.transfer.fetching import FetchClient, FetchSettings
from headgate.transfer.frames import Attach, BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import LeaseServer, Offer, ServingSettings
from headgate.transfer.slots import PLACE, SlotServer
from headgate.transfer.tcp import Address, TcpTransport
from headgate.transfer.transport import BlockMemory, SameGpuMemory, Shelf, ShelfReader

log = logging.getLogger(__name__)

IDLE_S = 30.0  # how long an unused shelf of another engine stays open for the next fetch


@dataclass(slots=True, eq=False)
class OpenShelf:
    """The shelf of another engine, opened once for all connections to that engine."""

    descriptor: bytes
    shelf: ShelfReader
    users: int = 0
    left_s: float = -inf  # when the last connection that used it ended


class ShelfTable:
    """Our shelf, and the shelves of other engines that are open. Used only by the transport's thread."""

    def __init__(self, memory: SameGpuMemory) -> None:
        self.memory = memory
        self.sent_bytes = self.received_bytes = 0
        self._shelf: Shelf | None = None
        self._free: deque[int] = deque()
        self._open_shelves: dict[bytes, OpenShelf] = {}

    # -- our slots ------------------------------------------------------------------

    def shelf(self) -> Shelf | None:
        if self._shelf is None and (shelf := self.memory.shelf()) is not None:
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

    # -- other engines' slots -------------------------------------------------------

    def enter(self, descriptor: bytes) -> OpenShelf:
        """Open a shelf, or share an open one. Pair each call with `leave`. Raises OSError if it cannot be opened."""
        opened = self._open_shelves.get(descriptor)
        if opened is None:
            opened = self._open_shelves[descriptor] = OpenShelf(descriptor, self.memory.open(descriptor))
        opened.users += 1
        return opened

    def leave(self, opened: OpenShelf, now_s: float) -> None:
        opened.users -= 1
        opened.left_s = now_s

    def tidy(self, now_s: float) -> None:
        """Close shelves that are unused for `IDLE_S`: the engine may be gone, but an open shelf keeps its memory."""
        for opened in list(self._open_shelves.values()):
            if not opened.users and now_s - opened.left_s >= IDLE_S:
                del self._open_shelves[opened.descriptor]

    def close(self) -> None:
        self._open_shelves.clear()


class SameGpuTransport(TcpTransport):
    def __init__(self, memory: BlockMemory, listen: Address, **settings: Any) -> None:
        super().__init__(memory, listen, **settings)
        assert memory.same_gpu is not None
        self._table = ShelfTable(memory.same_gpu)

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
        return SameGpuServer(self._table, sock, self._serving)

    def _client(self, sock: socket.socket, id: int, ticket: Ticket) -> FetchClient:
        return SameGpuClient(self._table, sock, id, ticket, self._fetching)


class SameGpuServer(SlotServer):
    def __init__(self, table: ShelfTable, sock: socket.socket, shared: ServingSettings) -> None:
        super().__init__(table.give_slot, sock, shared)
        self._table = table
        self._awaiting_opened = False  # D has not yet answered whether it can open our shelf
        self._shelf: Shelf | None = None  # our shelf, if D can read it

    @property
    def must_wait(self) -> bool:
        return self._awaiting_opened or super().must_wait

    def received(self, header: FrameHeader) -> None:
        if header.kind is FrameKind.OPENED:
            self._on_opened(bool(header.a))
        else:
            super().received(header)

    def _attach(self, attach: Attach) -> None:
        super()._attach(attach)
        if self.offer is None or not attach.gpu_id or attach.gpu_id != self._table.memory.gpu_id:
            return
        if (shelf := self._table.shelf()) is not None:
            self._awaiting_opened = True
            self.queue(encode(FrameHeader(FrameKind.AGENT, length=len(shelf.descriptor)), shelf.descriptor))

    def _on_opened(self, opened: bool) -> None:
        if not self._awaiting_opened:
            raise BadFrame("OPENED for a shelf that was not offered")
        self._awaiting_opened = False
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
        self._table.sent_bytes += self.queue_ready(stop, slot, digest)


class SameGpuClient(FetchClient):
    def __init__(
        self, table: ShelfTable, sock: socket.socket, id: int, ticket: Ticket, shared: FetchSettings
    ) -> None:
        super().__init__(sock, id, ticket, shared)
        self._table = table
        self._descriptor_received = False
        self._open_shelf: OpenShelf | None = None

    def _attachment(self) -> Attach:
        return msgspec.structs.replace(super()._attachment(), gpu_id=self._table.memory.gpu_id)

    def received(self, header: FrameHeader) -> None:
        match header.kind:
            case FrameKind.AGENT if not self._descriptor_received:
                self._descriptor_received = True
                self._open(bytes(self._payload))
            case FrameKind.READY:
                self._take(header)
            case _:
                super().received(header)

    def _open(self, descriptor: bytes) -> None:
        try:
            self._open_shelf = self._table.enter(descriptor)
        except OSError as error:
            log.info("fetching KV over the connection, because the other engine's memory cannot be opened: %s", error)
        self.queue(encode(FrameHeader(FrameKind.OPENED, a=int(self._open_shelf is not None))))

    def _take(self, header: FrameHeader) -> None:
        if self._open_shelf is None or header.length != PLACE.size:
            raise BadFrame("blocks without a location")
        shelf, (slot,) = self._open_shelf.shelf, PLACE.unpack(self._payload)
        if slot >= shelf.slots or header.b > shelf.blocks:
            raise BadFrame("a slot that does not exist")
        blocks = self._next_blocks(header)
        if shelf.take(slot, blocks) != header.checksum:
            raise BadFrame("wrong checksum")
        self.last_progress_s = self._clock()
        self._table.received_bytes += len(blocks) * self._memory.block_bytes
        self.queue(encode(FrameHeader(FrameKind.TOOK)))

    def release(self) -> None:
        super().release()
        if self._open_shelf is not None:
            self._table.leave(self._open_shelf, self._clock())
            self._open_shelf = None
