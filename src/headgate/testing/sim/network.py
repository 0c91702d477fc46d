"""The simulated network: ordered connections that delay, split, hold back and lose bytes as the seed determines.

A connection is a pair of `SimTransport`s. Bytes arrive in order, after a delay, in pieces of any size. A cut between
two machines is silent: bytes in transit arrive when the cut ends, unless the connection has been closed by then. A
process that ends resets its connections; if its machine is also isolated, its peers are not notified.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, pairwise
from typing import Any, cast

from headgate.edge.outflow import TCP_INFO
from headgate.testing.sim.loop import HOST, DelayedPipe, SimLoop, SimProcess

FIN = b""
RESET = None


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """Delays and splitting of writes, for a whole run."""

    delay_s: float = 0.0003
    jitter_s: float = 0.0002
    splits: float = 0.1  # share of writes that arrive in pieces
    high_water: int = 65536


@dataclass(slots=True)
class KvDamage:
    """Damage to KV in transit: for each kind of damage, the share of pieces that have it."""

    corrupted: float = 0.0  # one byte of the piece is changed
    cut_short: float = 0.0  # half of the piece arrives, and the connection ends


class SimSocket:
    """The part of a listening socket that servers use."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        pass


class SimConnection:
    """The part of a connected socket that servers use: its addresses, and how many bytes the peer has read."""

    def __init__(self, names: tuple[Any, Any]) -> None:
        self._names = names
        self.taken = 0

    def getsockname(self) -> Any:
        return self._names[0]

    def getpeername(self) -> Any:
        return self._names[1]

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return TCP_INFO.pack(self.taken, 0)


@dataclass(eq=False)
class NetworkListener:
    """A listening address of the simulated network, as `create_server` returns it."""

    network: SimNetwork
    address: tuple[str, int]
    factory: Callable[[], asyncio.BaseProtocol]
    host: SimProcess
    context: Context

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    async def wait_closed(self) -> None:
        pass


class SimTransport(asyncio.Transport):
    def __init__(
        self, network: SimNetwork, number: int, host: SimProcess, context: Context, names: tuple[Any, Any]
    ) -> None:
        self._socket = SimConnection(names)
        super().__init__({"sockname": names[0], "peername": names[1], "socket": self._socket})
        self.network = network
        self.number = number
        self.host = host
        self.context = context
        self.peer: SimTransport
        self.protocol: asyncio.Protocol | None = None
        self.lost = False
        self.carries_kv = False
        self._pipe = DelayedPipe(network.loop, self._arrive, context)  # from the peer to this end
        self._waiting: deque[bytes | None] = deque()  # pieces that have arrived, but are not delivered yet
        self._unread = 0  # bytes written by this end that the peer has not read
        self._full = False
        self._moved_s = 0.0  # while full: when the peer last read something, or when it became full
        self._closing = False
        self._reading = True
        self._high = network.conditions.high_water

    # -- asyncio.Transport --------------------------------------------------------------

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.Protocol, protocol)

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self.network.loop.call_soon(self.take, context=self.context)

    def get_write_buffer_size(self) -> int:
        return self._unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self.network.conditions.high_water if high is None else high

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self.lost or not data:
            return
        for piece in self.network.cut_up(bytes(data)):
            if self.carries_kv and self.network.damage is not None:
                piece, whole = self.network.damaged(piece)
                if not whole:
                    self.peer.receive(piece)
                    self.close()
                    return
            self._unread += len(piece)
            self.peer.receive(piece)
        if self._unread > self._high and not self._full:
            self._full, self._moved_s = True, self._working_s()
            assert self.protocol is not None
            self.protocol.pause_writing()

    def write_eof(self) -> None:
        """Half-close: send FIN and keep reading."""
        if not self._closing and not self.lost:
            self.peer.receive(FIN)

    def close(self) -> None:
        if not self._closing and not self.lost:
            self._closing = True
            self.peer.receive(FIN)
            self.network.loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        if not self.lost:
            self._closing = True
            self.peer.receive(RESET)
            self.network.loop.call_soon(self._lose, None, context=self.context)

    # -- called by the network --------------------------------------------------------------

    def receive(self, piece: bytes | None) -> None:
        self._pipe.send(piece, self.network.delay_s(self.host, self.peer.host))

    def _arrive(self, piece: bytes | None) -> None:
        self._waiting.append(piece)
        self.take()

    def take(self) -> None:
        """Deliver the bytes that have arrived, unless the connection is cut or reading is paused."""
        while self._waiting and not self.lost and self.protocol is not None:
            if self.network.are_cut(self.host, self.peer.host):
                return
            if self._waiting[0] is not RESET and not self._reading and not self._closing:
                return
            self._deliver(self._waiting.popleft())

    def _deliver(self, piece: bytes | None) -> None:
        self.network.seen(self.number, piece)
        if piece is RESET:
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        elif piece == FIN:
            assert self.protocol is not None
            if not self._closing and not self.protocol.eof_received():
                self.close()
        elif not self._closing:
            self.peer.taken(len(piece))
            self._hand_over(piece)

    def _hand_over(self, piece: bytes) -> None:
        assert self.protocol is not None
        try:
            self.protocol.data_received(piece)
        except Exception as error:
            context = {"message": f"{self.protocol!r} failed", "exception": error, "protocol": self.protocol}
            self.network.loop.call_exception_handler(context)
            self.abort()

    def taken(self, size: int) -> None:
        self._unread -= size
        self._socket.taken += size
        self._moved_s = self._working_s()
        if self._full and self._unread <= self._high // 4:
            self._full = False
            self.network.loop.call_soon(self._drained, context=self.context)

    def _working_s(self) -> float:
        """A clock that does not advance while this end's process is stopped."""
        return self.network.loop.time() - self.host.stopped_s

    @property
    def stuck_s(self) -> float:
        """How long the write buffer has been full without the peer reading anything."""
        return self._working_s() - self._moved_s if self._full else 0.0

    def _drained(self) -> None:
        if not self.lost and not self._full and self.protocol is not None:
            self.protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.vanish()
        if self.protocol is not None:
            self.protocol.connection_lost(error)

    def vanish(self) -> None:
        """Close without notifying the protocol, whose process is gone."""
        self.lost = self._closing = True
        self._waiting.clear()
        self.network.transports.pop(self, None)

    def reset(self) -> None:
        """Reset the connection at both ends. Bytes in transit are lost."""
        for end in (self, self.peer):
            end._waiting.clear()
            if not end.lost:
                self.network.loop.call_soon(end._lose, ConnectionResetError(104, "reset"), context=end.context)


class SimNetwork:
    def __init__(self, loop: SimLoop, rng: random.Random, conditions: NetworkConditions) -> None:
        self.loop = loop
        self.conditions = conditions
        self.listeners: dict[tuple[str, int], NetworkListener] = {}
        self.transports: dict[SimTransport, None] = {}
        self.hash = blake2b(digest_size=16)  # covers every byte that arrived, and its arrival time
        self._random = rng
        self._numbers = count(1)
        self._cuts: dict[frozenset[str], None] = {}
        self._isolated: dict[str, None] = {}  # machines that vanished without resetting their connections
        self._healed = asyncio.Event()
        self._slow: dict[frozenset[str], float] = {}
        self.damage: KvDamage | None = None
        self.damage_counts: Counter[str] = Counter()  # kind of damage to KV -> how often it happened
        self.splits = 0

    # -- delays and damage ----------------------------------------------------------------

    def delay_s(self, one: SimProcess | None = None, other: SimProcess | None = None) -> float:
        delay_s = self.conditions.delay_s + self._random.random() * self.conditions.jitter_s
        if self._slow and one is not None and other is not None:
            delay_s += self._slow.get(frozenset((machine(one), machine(other))), 0.0) * self._random.random()
        return delay_s

    def damaged(self, piece: bytes) -> tuple[bytes, bool]:
        """Return the piece as it arrives, and whether the connection continues after it."""
        assert self.damage is not None
        if self._random.random() < self.damage.cut_short:
            self.damage_counts["KV cut short"] += 1
            return piece[: len(piece) // 2], False
        if self._random.random() < self.damage.corrupted:
            self.damage_counts["KV corrupted"] += 1
            place = self._random.randrange(len(piece))
            wrong = piece[place] ^ self._random.randrange(1, 256)
            return piece[:place] + bytes([wrong]) + piece[place + 1 :], True
        return piece, True

    def cut_up(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or self._random.random() >= self.conditions.splits:
            return [data]
        self.splits += 1
        places = sorted(
            {0, len(data), *(self._random.randrange(len(data)) for _ in range(self._random.randint(1, 3)))}
        )
        return [data[start:stop] for start, stop in pairwise(places)]

    def seen(self, number: int, piece: bytes | None) -> None:
        self.hash.update(b"%d %r " % (number, round(self.loop.time() * 1e7)))
        self.hash.update(b"reset" if piece is None else piece)

    # -- cuts -----------------------------------------------------------------------------

    def are_cut(self, one: SimProcess, other: SimProcess) -> bool:
        if not self._cuts and not self._isolated:
            return False
        a, b = machine(one), machine(other)
        return frozenset((a, b)) in self._cuts or a in self._isolated or b in self._isolated

    def cut(self, one: str, other: str) -> None:
        self._cuts[frozenset((one, other))] = None

    def slow_down(self, one: str, other: str, most_s: float) -> None:
        """Delay bytes between two machines by up to `most_s` more; 0 restores the normal delay."""
        self._slow[frozenset((one, other))] = most_s
        if not most_s:
            del self._slow[frozenset((one, other))]

    def isolate(self, name: str) -> None:
        self._isolated[name] = None

    def mend(self, one: str, other: str) -> None:
        self._cuts.pop(frozenset((one, other)), None)
        self._deliver_held()

    def rejoin(self, name: str) -> None:
        self._isolated.pop(name, None)
        self._deliver_held()

    def heal(self) -> None:
        """End all cuts, isolation, extra delays and damage."""
        self._cuts.clear()
        self._isolated.clear()
        self._slow.clear()
        self.damage = None
        self._deliver_held()

    def _deliver_held(self) -> None:
        """Deliver the bytes that a cut has held back."""
        for transport in list(self.transports):
            self.loop.call_soon(transport.take, context=transport.context)
        healed, self._healed = self._healed, asyncio.Event()
        healed.set()

    # -- connections ------------------------------------------------------------------------

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], address: tuple[str, int]) -> NetworkListener:
        host = HOST.get()
        assert host is not None and address not in self.listeners
        listener = NetworkListener(self, address, factory, host, copy_context())
        host.on_end.append(listener.close)
        self.listeners[address] = listener
        return listener

    async def connect(self, factory: Callable[[], asyncio.BaseProtocol], address: tuple[str, int]) -> SimTransport:
        host = HOST.get()
        assert host is not None
        await asyncio.sleep(self.delay_s())
        while self._unreachable(host, address):
            await self._healed.wait()
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = self._pair(host, listener)
        ours.protocol = cast(asyncio.Protocol, factory())
        ours.protocol.connection_made(ours)
        # If the listening process is stopped, it accepts the connection when it resumes.
        self.loop.call_soon(self._accept, listener, theirs, context=theirs.context)
        return ours

    def _unreachable(self, host: SimProcess, address: tuple[str, int]) -> bool:
        return address[0] in self._isolated or frozenset((machine(host), address[0])) in self._cuts

    def _pair(self, host: SimProcess, listener: NetworkListener) -> tuple[SimTransport, SimTransport]:
        number = next(self._numbers)
        here, there = (machine(host), 40000 + number), listener.address
        ours = SimTransport(self, 2 * number, host, copy_context(), (here, there))
        theirs = SimTransport(self, 2 * number + 1, listener.host, listener.context.copy(), (there, here))
        ours.peer, theirs.peer = theirs, ours
        for transport in (ours, theirs):
            self.transports[transport] = None
        return ours, theirs

    def _accept(self, listener: NetworkListener, transport: SimTransport) -> None:
        if transport.lost or not listener.host.alive:
            return
        transport.protocol = cast(asyncio.Protocol, listener.factory())
        transport.protocol.connection_made(transport)
        transport.take()

    def host_ended(self, host: SimProcess) -> None:
        """Reset the connections of a process that ended. Peers of an isolated machine see the reset when it rejoins."""
        for transport in [each for each in self.transports if each.host is host]:
            transport.vanish()
            transport.peer.receive(RESET)


def machine(host: SimProcess) -> str:
    return host.name.partition("/")[0]
