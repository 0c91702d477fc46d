"""KV transfer between simulated engines: the real `TcpTransport` with simulated sockets, selectors and threads.

KV travels in the production frames over connections of the simulated network, which can cut, reset, delay and damage
them. The KV of the simulated device consists of hashes, so any wrong KV changes the next token.
"""

from __future__ import annotations

import asyncio
import errno
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headgate.config import EngineConfig
from headgate.testing.device import FakeDevice
from headgate.testing.sim.loop import HOST, SimLoop, SimProcess
from headgate.testing.sim.network import SimTransport
from headgate.transfer import tcp
from headgate.transfer.tcp import TICK_S, Address, TcpTransport, parse_address
from headgate.transfer.transport import Event, Portion, Post, SameGpuMemory

if TYPE_CHECKING:
    from headgate.protocol.plan import Fetch
    from headgate.protocol.request import Ticket

PORT = 7000  # port of a server's first engine; it stays the same after a restart
NETWORK = "10.0.0.0/8"
MOST_AT_ONCE = 256  # most bytes that one write accepts; less than the size of several blocks
PORTION = 2  # number of blocks that are read or written together
# The stages of a transfer, in the order in which engines reach them.
STAGES = (
    "attach",
    "renewed",
    "fetch",
    "fetched",
    "released",
)


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The lease time, waiting times and disaggregation threshold of a run."""

    lease_s: float = 2.0
    wait_s: float = 1.0
    export_wait_s: float = 2.0
    disaggregate_tokens: int = 8
    ticket_timeout_s: float = 1.0

    def config(self, server: int) -> EngineConfig:
        return EngineConfig(
            kv_listen=f"10.0.0.{server + 1}:{PORT}",
            kv_peers=(NETWORK,),
            lease_s=self.lease_s,
            kv_wait_s=self.wait_s,
            export_wait_s=self.export_wait_s,
        )


def machine_at(ip: str) -> str:
    return f"server{int(ip.rpartition('.')[2]) - 1}"


class SimBlocks:
    """The KV blocks of a fake device as bytes."""

    layout = "simulated"
    same_gpu: SameGpuMemory | None = None

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.block_bytes = 8 * device.block_size

    def lend(self, blocks: Sequence[int]) -> Iterator[Portion]:
        for some in _portions(blocks):
            yield [np.array([self._device.kv[block] for block in some], dtype=np.int64).view(np.uint64)]

    def room(self, blocks: Sequence[int]) -> Iterator[Portion]:
        for some in _portions(blocks):
            filled = np.zeros((len(some), self._device.block_size), dtype=np.uint64)
            yield [filled]
            self.store(some, filled.view(np.int64).tolist())

    def store(self, blocks: Sequence[int], rows: list[list[int]]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self._device.kv[block] = row


def _portions(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    return (blocks[i : i + PORTION] for i in range(0, len(blocks), PORTION))


# ------------------------------------------------------------------------------------------------------------- sockets


class SimKvSocket(asyncio.Protocol):
    """One end of a connection, as a non-blocking socket."""

    def __init__(self, *_: Any) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._transport: SimTransport | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._arrived = bytearray()
        self._error: int | None = None
        self._full = self._ended = self._closed = False

    # -- socket methods that `TcpTransport` calls ---------------------------------------

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *options: Any) -> None:
        pass

    def getsockopt(self, *options: Any) -> int:
        return self._error or 0

    def fileno(self) -> int:
        return -1 if self._closed else id(self)

    def connect(self, address: tuple[str, int]) -> None:
        host = HOST.get()
        assert host is not None
        self._dialling = host.spawn(self._dial(host.loop, (machine_at(address[0]), address[1])))
        raise BlockingIOError

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        self._check()
        if self._full or self._transport is None:
            raise BlockingIOError
        data = b"".join(buffers)[:MOST_AT_ONCE]
        self._transport.write(data)
        return len(data)

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        if not self._arrived:
            if self._ended:
                return 0, [], 0, None
            self._check()
            raise BlockingIOError
        received = 0
        for buffer in buffers:
            part = self._arrived[: len(buffer)]
            buffer[: len(part)] = part
            del self._arrived[: len(part)]
            received += len(part)
        return received, [], 0, None

    def shutdown(self, how: int) -> None:
        self._check()
        if self._transport is not None:
            self._transport.write_eof()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
        if self._transport is not None:
            # As in TCP, closing a socket with unread data resets the connection.
            (self._transport.abort if self._arrived else self._transport.close)()

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(self._error, errno.errorcode[self._error])

    # -- called by the selector ---------------------------------------------------------

    @property
    def ready(self) -> int:
        reads = bool(self._arrived or self._ended or self._error)
        writes = bool(self._error) or (self._transport is not None and not self._full)
        return selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes

    # -- asyncio.Protocol --------------------------------------------------------------

    async def _dial(self, loop: SimLoop, address: tuple[str, int]) -> None:
        try:
            await loop.network.connect(lambda: self, address)
        except OSError as error:
            self._fail(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(SimTransport, transport)
        self._transport.carries_kv = True
        self.on_ready()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        self.on_ready()

    def eof_received(self) -> bool:
        self._ended = True
        self.on_ready()
        return True  # keeps the other direction open

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = error is None
        if isinstance(error, OSError):
            self._fail(error)
        self.on_ready()

    def _fail(self, error: OSError) -> None:
        self._error = error.errno or errno.ECONNRESET
        self.on_ready()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.on_ready()


class SimKvListener:
    """A listening socket."""

    def __init__(self, address: Address) -> None:
        host = HOST.get()
        assert host is not None
        self.on_ready: Callable[[], None] = lambda: None
        self._pending: list[SimKvSocket] = []
        self._address = address
        self._listener = host.loop.network.listen(self._connected, (machine_at(address.host), address.port))

    def _connected(self) -> SimKvSocket:
        wire = SimKvSocket()
        self._pending.append(wire)
        self.on_ready()
        return wire

    def accept(self) -> tuple[SimKvSocket, None]:
        if not self._pending:
            raise BlockingIOError
        return self._pending.pop(0), None

    def getsockname(self) -> tuple[str, int]:
        return self._address.host, self._address.port

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        self._listener.close()

    @property
    def ready(self) -> int:
        return selectors.EVENT_READ * bool(self._pending)


class SimWakeup:
    """Both ends of the socket pair with which the engine loop wakes the transport."""

    def __init__(self) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self._signalled = False

    def send(self, data: bytes) -> None:
        self._signalled = True
        self.on_ready()

    def recv(self, size: int) -> None:
        self._signalled = False

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def ready(self) -> int:
        return selectors.EVENT_READ * self._signalled


@dataclass
class SimSelector:
    """A selector that reports sockets in the order of their registration."""

    on_ready: Callable[[], None] = lambda: None
    _keys: dict[Any, selectors.SelectorKey] = field(default_factory=dict)

    def register(self, sock: Any, events: int, data: Any = None) -> None:
        self._keys[sock] = selectors.SelectorKey(sock, 0, events, data)
        sock.on_ready = self._changed
        self._changed()

    def modify(self, sock: Any, events: int, data: Any = None) -> None:
        self.register(sock, events, data)

    def unregister(self, sock: Any) -> None:
        del self._keys[sock]

    def select(self, timeout_s: float = 0.0) -> list[tuple[selectors.SelectorKey, int]]:
        return [(key, mask) for key in self._keys.values() if (mask := key.events & key.fileobj.ready)]  # type: ignore[union-attr]

    def close(self) -> None:
        self._keys.clear()

    def _changed(self) -> None:
        self.on_ready()


class TransportTurns:
    """Stands in for the transport's thread: each iteration is a callback of the engine process."""

    def __init__(self, *, target: Any, **_: Any) -> None:
        self._kv: SimKv = target.__self__
        host = HOST.get()
        assert host is not None
        self._host = host
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._kv.watch.on_ready = self._at_once
        self._at_once()

    def is_alive(self) -> bool:
        return False  # there is no thread to join

    def _at_once(self) -> None:
        self._at(0.0)

    def _at(self, delay_s: float) -> None:
        when_s = self._host.loop.time() + delay_s
        if self._next is not None:
            if self._next.when() <= when_s:
                return
            self._next.cancel()
        self._next = self._host.loop.call_at(when_s, self._turn, context=self._host.context)

    def _turn(self) -> None:
        self._next = None
        if not self._host.alive or self._kv.closed:
            return
        self._kv._turn(0.0)
        if self._kv.watch.select():
            self._at_once()
        elif self._kv.at_work:
            self._at(TICK_S)


# ----------------------------------------------------------------------------------------------------------- transport


OnStage = Callable[[str, "Ticket | None"], None]


class SimKv(TcpTransport):
    """The real transport; reports the stages that each transfer reaches."""

    def __init__(self, device: FakeDevice, config: EngineConfig, host: SimProcess, on_stage: OnStage) -> None:
        assert config.kv_listen is not None
        super().__init__(
            SimBlocks(device),
            parse_address(config.kv_listen),
            peers=tuple(map(ip_network, config.kv_peers)),
            lease_s=config.lease_s,
            wait_s=config.kv_wait_s,
            clock=host.loop.time,
        )
        self._servers = cast(Any, _Ordered())
        self._on_stage = on_stage

    @property
    def watch(self) -> SimSelector:
        return cast(SimSelector, self._selector)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def at_work(self) -> bool:
        return bool(self._servers or any(self._clients.values()) or self._detaching)

    def leaks(self) -> list[str]:
        """Return the offers and connections that are still held."""
        things = {
            "offers": len(self._offers),
            "incoming connections": len(self._servers),
            "outgoing connections": len(self._clients) + len(self._detaching),
        }
        return [f"{kept} {name}" for name, kept in things.items() if kept]

    def start(self, post: Post) -> None:
        def reporting(event: Event) -> None:
            self._on_stage(type(event).__name__.lower(), None)
            post(event)

        super().start(reporting)

    def attach(self, id: int, ticket: Ticket) -> None:
        self._on_stage("attach", ticket)
        super().attach(id, ticket)

    def fetch(self, fetch: Fetch) -> None:
        self._on_stage("fetch", fetch.ticket)
        super().fetch(fetch)


class _Ordered(dict[Any, None]):
    """A set that is iterated in insertion order."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def replaced() -> list[tuple[Any, str, Any]]:
    """Return the module attributes of `tcp` that use the operating system, with their replacements."""

    def pair() -> tuple[SimWakeup, SimWakeup]:
        wakeup = SimWakeup()
        return wakeup, wakeup

    sockets = SimpleNamespace(**{**vars(socket), "socket": SimKvSocket, "socketpair": pair})
    selecting = SimpleNamespace(**{**vars(selectors), "DefaultSelector": SimSelector})
    threads = SimpleNamespace(**{**vars(threading), "Thread": TransportTurns})
    return [
        (tcp, "socket", sockets),
        (tcp, "selectors", selecting),
        (tcp, "threading", threads),
        (tcp, "_listen", SimKvListener),
        (tcp, "_tune", lambda _: None),
    ]
