"""KV transfer by NIXL: over RDMA, shared memory or any other connection that UCX finds between two engines.

Leases, progress and the final confirmation stay on the connection of `tcp.py`; only block data takes another path. P
copies filled blocks into a slot and sends READY; D reads the slot, compares the checksum and sends TOOK:

    ◄────────── TAKEN, AGENT         P's agent, and where its slots are
       FETCH ──────────────►
    ◄─────────── READY, READY        a: first block, b: how many; a checksum; the offset in P's slots
       TOOK ───────────────►         the slot of the first READY is free again
    ◄──────────────────── END        everything had been copied before the lease ended

If no slot is free, blocks are sent over the connection as BLOCKS, so no connection ever waits for a slot that another
connection uses.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.protocol.message import TransferCounts
from headgate.protocol.request import Ticket
from headgate.transfer.fetching import FetchClient, FetchSettings
from headgate.transfer.frames import NIXL_PROTOCOL, PROTOCOL, Attach, BadFrame, FrameHeader, FrameKind, encode
from headgate.transfer.serving import MESSAGE_BYTES, LeaseServer, Offer, ServingSettings
from headgate.transfer.slots import PLACE, SlotServer
from headgate.transfer.staging import Agent, Read, Remote
from headgate.transfer.tcp import TICK_S, Address, TcpTransport
from headgate.transfer.transport import BlockMemory


class NixlSlots(msgspec.Struct, frozen=True, array_like=True):
    """The description of P's slots that D needs to read them."""

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

    def _turn(self, poll_timeout_s: float = TICK_S) -> None:
        agent_timeout_s = self._agent.poll_timeout_s
        super()._turn(poll_timeout_s if agent_timeout_s is None else agent_timeout_s)
        self._agent.make_progress()
        for client in list(self._clients.values()):
            if isinstance(client, NixlClient) and client.reading:
                self._guard(client, 0)

    def _server(self, sock: socket.socket) -> LeaseServer:
        return NixlServer(self._agent, sock, self._serving)

    def _client(self, sock: socket.socket, id: int, ticket: Ticket) -> FetchClient:
        if self._agent.stuck:
            return super()._client(sock, id, ticket)
        return NixlClient(self._agent, sock, id, ticket, self._fetching)


class NixlServer(SlotServer):
    protocols = (PROTOCOL, NIXL_PROTOCOL)

    def __init__(self, agent: Agent, sock: socket.socket, shared: ServingSettings) -> None:
        super().__init__(agent.out.give, sock, shared)
        self._agent = agent
        self._uses_slots = False  # whether D can read our slots

    def _attach(self, attach: Attach) -> None:
        super()._attach(attach)
        if self.offer is not None and attach.protocol == NIXL_PROTOCOL:
            self._uses_slots = True
            body = msgspec.msgpack.encode(NixlSlots(self._agent.metadata, *self._agent.out.region))
            self.queue(encode(FrameHeader(FrameKind.AGENT, length=len(body)), body))

    def _send_blocks(self, offer: Offer, stop: int) -> None:
        slots = self._agent.out
        slot = slots.take() if self._uses_slots else None
        if slot is None:
            super()._send_blocks(offer, stop)
            return
        self._lent.append(slot)
        digest = slots.write(slot, self._memory.lend(offer.blocks[self._next : stop]))
        self._agent.sent_bytes += self.queue_ready(stop, slots.offset(slot), digest)
        self._agent.note_activity()


class NixlClient(FetchClient):
    protocol = NIXL_PROTOCOL

    def __init__(self, agent: Agent, sock: socket.socket, id: int, ticket: Ticket, shared: FetchSettings) -> None:
        super().__init__(sock, id, ticket, shared)
        self._agent = agent
        self._peer_slots: NixlSlots | None = None
        self._remote: Remote | None = None
        self._ready: deque[NixlReady] = deque()
        self._reads: deque[tuple[NixlReady, Read]] = deque()
        self._end_received = False

    @property
    def reading(self) -> bool:
        return bool(self._ready or self._reads)

    def received(self, header: FrameHeader) -> None:
        match header.kind:
            case FrameKind.AGENT if self._peer_slots is None:
                self._peer_slots = msgspec.msgpack.decode(self._payload, type=NixlSlots)
            case FrameKind.READY:
                self._ready.append(self._checked(header))
            case _:
                super().received(header)

    def _checked(self, header: FrameHeader) -> NixlReady:
        if self._peer_slots is None or header.length != PLACE.size:
            raise BadFrame("blocks without a location")
        blocks, (offset,) = self._next_blocks(header), PLACE.unpack(self._payload)
        size = len(blocks) * self._memory.block_bytes
        if offset + size > self._peer_slots.length or size > self._agent.into.slot_bytes:
            raise BadFrame("wrong size")
        return NixlReady(blocks, header.checksum, self._peer_slots.address + offset)

    def more(self) -> None:
        while self._reads and self._agent.is_over(self._reads[0][1]):
            self._take_read(*self._reads.popleft())
        while self._ready and (read := self._begin(self._ready[0])) is not None:
            self._reads.append((self._ready.popleft(), read))
        if self._end_received and not self.reading and not self.fetched:
            super()._on_end()

    def _begin(self, ready: NixlReady) -> Read | None:
        if self._remote is None:
            # Not before a block is ready: only then does P poll NIXL, without which no connection can be made.
            assert self._peer_slots is not None
            self._remote = self._agent.add_remote(self._peer_slots.metadata)
        return self._agent.read(self._remote, ready.address, len(ready.blocks) * self._memory.block_bytes)

    def _take_read(self, ready: NixlReady, read: Read) -> None:
        self.last_progress_s = self._clock()
        digest = self._agent.into.read(read.slot, self._memory.room(ready.blocks))
        self._agent.finish(read)
        if digest != ready.digest:
            raise BadFrame("wrong checksum")
        self._agent.received_bytes += len(ready.blocks) * self._memory.block_bytes
        self.queue(encode(FrameHeader(FrameKind.TOOK)))

    def _on_end(self) -> None:
        self._end_received = True  # `more` sends DONE after the last read

    def release(self) -> None:
        while self._reads:
            self._agent.abandon(self._reads.popleft()[1])
        self._ready.clear()
        if self._remote is not None:
            self._agent.leave(self._remote)
            self._remote = None
