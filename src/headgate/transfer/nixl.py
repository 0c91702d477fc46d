"""KV by NIXL: over RDMA, shared memory or whatever else UCX finds between two engines.

Leases, progress and the last word stay on the connection of `tcp.py`; only the bytes of blocks go another way. P copies
what is filled into a slot and says READY, D reads the slot, compares the checksum and says TOOK:

    ◄────────── TAKEN, AGENT         P's agent, and where its slots are
       FETCH ──────────────►
    ◄─────────── READY, READY        a: first block, b: how many; a checksum; where in P's slots
       TOOK ───────────────►         the first of them is free again
    ◄──────────────────── END        everything had been copied before the lease ended

What finds no slot goes over the connection as BLOCKS, so nobody ever waits for somebody else's slot.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.protocol.message import TransferCounts
from headgate.protocol.request import Ticket
from headgate.transfer.fetching import FetchClient
from headgate.transfer.frames import NIXL_PROTOCOL, PROTOCOL, Attach, BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import MESSAGE_BYTES, LeaseServer, Offer
from headgate.transfer.slots import PLACE, SlotServer
from headgate.transfer.staging import Agent, Read, Remote
from headgate.transfer.tcp import TICK_S, Address, TcpTransport
from headgate.transfer.transport import BlockMemory, Event


class NixlSlots(msgspec.Struct, frozen=True, array_like=True):
    """What D must know to read P's slots."""

    metadata: bytes
    address: int
    length: int


@dataclass(frozen=True, slots=True)
class NixlReady:
    blocks: tuple[int, ...]
    digest: bytes
    address: int


class NixlTransport(TcpTransport):
    def __init__(self, memory: BlockMemory, listen: Address, **settings: Any) -> None:
        super().__init__(memory, listen, **settings)
        try:
            self._agent = Agent(max(1, MESSAGE_BYTES // memory.block_bytes) * memory.block_bytes)
        except Exception:
            self.close()
            raise

    def counts(self) -> TransferCounts:
        counts, agent = super().counts(), self._agent
        return msgspec.structs.replace(
            counts,
            received_bytes=counts.received_bytes + agent.received_bytes,
            sent_bytes=counts.sent_bytes + agent.sent_bytes,
        )

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._agent.close()

    def _turn(self, patience_s: float = TICK_S) -> None:
        sooner_s = self._agent.patience_s
        super()._turn(patience_s if sooner_s is None else sooner_s)
        self._agent.get_on()
        for client in list(self._clients.values()):
            if isinstance(client, NixlClient) and client.reading:
                self._guard(client, 0)

    def _server(self, sock: socket.socket) -> LeaseServer:
        return NixlServer(self._agent, sock, self._memory, self._offers.get, self._tell, self._lease_s, self._clock)

    def _client(self, sock: socket.socket, id: int, ticket: Ticket) -> FetchClient:
        if self._agent.stuck:
            return super()._client(sock, id, ticket)
        return NixlClient(self._agent, sock, id, ticket, self._memory, self._wait_s, self._clock)


class NixlServer(SlotServer):
    protocols = (PROTOCOL, NIXL_PROTOCOL)

    def __init__(
        self,
        agent: Agent,
        sock: socket.socket,
        memory: BlockMemory,
        find: Callable[[int], Offer | None],
        tell: Callable[[Event], None],
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(agent.out.give, sock, memory, find, tell, lease_s, clock)
        self._agent = agent
        self._beside = False  # the connection

    def _attach(self, attach: Attach) -> None:
        super()._attach(attach)
        if self.offer is not None and attach.protocol == NIXL_PROTOCOL:
            self._beside = True
            body = msgspec.msgpack.encode(NixlSlots(self._agent.metadata, *self._agent.out.region))
            self.say(encode(FrameHeader(FrameKind.AGENT, length=len(body)), body))

    def _send_blocks(self, offer: Offer, stop: int) -> None:
        slots = self._agent.out
        slot = slots.take() if self._beside else None
        if slot is None:
            super()._send_blocks(offer, stop)
            return
        self._lent.append(slot)
        digest = slots.write(slot, self._memory.lend(offer.blocks[self._next : stop]))
        self._agent.sent_bytes += self.say_ready(stop, slots.offset(slot), digest)
        self._agent.stir()


class NixlClient(FetchClient):
    protocol = NIXL_PROTOCOL

    def __init__(
        self,
        agent: Agent,
        sock: socket.socket,
        id: int,
        ticket: Ticket,
        memory: BlockMemory,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sock, id, ticket, memory, wait_s, clock)
        self._agent = agent
        self._shown: NixlSlots | None = None
        self._remote: Remote | None = None
        self._ready: deque[NixlReady] = deque()
        self._reads: deque[tuple[NixlReady, Read]] = deque()
        self._end_heard = False

    @property
    def reading(self) -> bool:
        return bool(self._ready or self._reads)

    def heard(self, header: FrameHeader) -> None:
        match header.kind:
            case FrameKind.AGENT if self._shown is None:
                self._shown = msgspec.msgpack.decode(self._said, type=NixlSlots)
            case FrameKind.READY:
                self._ready.append(self._checked(header))
            case _:
                super().heard(header)

    def _checked(self, header: FrameHeader) -> NixlReady:
        if self._shown is None or header.length != PLACE.size:
            raise BadFrame("blocks that are nowhere")
        blocks, (offset,) = self._next_blocks(header), PLACE.unpack(self._said)
        size = len(blocks) * self._memory.block_bytes
        if offset + size > self._shown.length or size > self._agent.into.slot_bytes:
            raise BadFrame("wrong size")
        return NixlReady(blocks, header.checksum, self._shown.address + offset)

    def more(self) -> None:
        while self._reads and self._agent.is_over(self._reads[0][1]):
            self._take_read(*self._reads.popleft())
        while self._ready and (read := self._begin(self._ready[0])) is not None:
            self._reads.append((self._ready.popleft(), read))
        if self._end_heard and not self.reading and not self.fetched:
            super()._hear_end()

    def _begin(self, ready: NixlReady) -> Read | None:
        if self._remote is None:
            # Not before something is ready: as long as that is so, the other side lets NIXL connect.
            assert self._shown is not None
            self._remote = self._agent.meet(self._shown.metadata)
        return self._agent.read(self._remote, ready.address, len(ready.blocks) * self._memory.block_bytes)

    def _take_read(self, ready: NixlReady, read: Read) -> None:
        self.heard_s = self._clock()
        digest = self._agent.into.read(read.slot, self._memory.room(ready.blocks))
        self._agent.put_away(read)
        if digest != ready.digest:
            raise BadFrame("wrong checksum")
        self._agent.received_bytes += len(ready.blocks) * self._memory.block_bytes
        self.say(encode(FrameHeader(FrameKind.TOOK)))

    def _hear_end(self) -> None:
        self._end_heard = True  # and `more` says DONE after the last read

    def hang_up(self) -> None:
        while self._reads:
            self._agent.give_up(self._reads.popleft()[1])
        self._ready.clear()
        if self._remote is not None:
            self._agent.leave(self._remote)
            self._remote = None
