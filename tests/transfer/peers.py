"""Transports over caches in this process, and a proxy between them that damages data."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_network
from queue import SimpleQueue
from typing import Any

import torch

from headgate.device.kv_blocks import HostBlocks
from headgate.device.same_gpu import same_gpu_cache
from headgate.protocol.command import SharedStorage
from headgate.protocol.plan import Fetch
from headgate.protocol.request import Ticket
from headgate.transfer.same_gpu import SameGpuTransport
from headgate.transfer.tcp import TcpTransport, parse_address
from headgate.transfer.transport import Fetched, Released

DEADLINE_S = 60.0
BLOCKS, PART_BYTES, PARTS = 40, 4096, 6
GENERATION, VERSION = 77, 3
TRANSPORTS = ["tcp", "nixl"] if find_spec("nixl") else ["tcp"]  # those available here, between engines
KINDS = [*TRANSPORTS, "same_gpu"]  # without engines: see `OneGpu`


@dataclass(eq=False)
class Peer:
    """One engine's transport, with its own cache and the events that it has posted."""

    kind: str = "tcp"
    wait_s: float = 30.0
    lease_s: float = 30.0
    layout: str = "test"
    fill: int | None = None  # None: at random
    peers: tuple[str, ...] = ("127.0.0.0/8",)
    events: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        shape = (BLOCKS, PART_BYTES)
        if self.fill is None:
            self.tensors = [torch.randint(255, shape, dtype=torch.uint8) for _ in range(PARTS)]
        else:
            self.tensors = [torch.full(shape, self.fill, dtype=torch.uint8) for _ in range(PARTS)]
        memory = HostBlocks(self.tensors, self.layout)
        if self.kind == "same_gpu":
            memory.same_gpu = same_gpu_cache(self.tensors)
        self.transport = transport_kind(self.kind)(
            memory,
            parse_address("127.0.0.1:0"),
            peers=tuple(map(ip_network, self.peers)),
            lease_s=self.lease_s,
            wait_s=self.wait_s,
        )
        self.transport.start(self.events.put)

    def ticket(self, lease: int, address: str | None = None, /, **changes: Any) -> Ticket:
        from msgspec.structs import replace

        ticket = Ticket(address or self.transport.address, lease, GENERATION, 0, VERSION, b"")
        return replace(ticket, **changes)

    def offer(self, lease: int, blocks: tuple[int, ...], filled: int | None = None) -> None:
        self.transport.offer(lease, GENERATION, VERSION, blocks)
        self.transport.fill(lease, len(blocks) if filled is None else filled)

    def fetch(self, id: int, ticket: Ticket, blocks: tuple[int, ...], skip: int = 0) -> None:
        self.transport.attach(id, ticket)
        self.transport.fetch(Fetch(id, ticket, skip, blocks))

    def next(self, kind: type[Any], timeout_s: float = DEADLINE_S) -> Any:
        """The next event of this kind; others are skipped."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(deadline_s - time.monotonic(), 0.001))
            if isinstance(event, kind):
                return event

    def fetched(self, id: int) -> bool:
        event = self.next(Fetched)
        assert event.id == id
        return bool(event.ok)

    def released(self, lease: int) -> bool:
        event = self.next(Released)
        assert (event.lease, event.generation) == (lease, GENERATION)
        return bool(event.fetched)

    def block(self, index: int) -> list[torch.Tensor]:
        return [tensor[index].clone() for tensor in self.tensors]

    def failures(self) -> dict[str, int]:
        return self.transport.counts().failures


class OneGpu:
    """Replaces the device in `headgate.device.weights.ipc`: all caches of this process are on one GPU."""

    def __init__(self) -> None:
        self.shared: dict[bytes, torch.UntypedStorage] = {}
        self.opened = 0

    def gpu_of(self, device: torch.device) -> str:
        return "GPU-1"

    def export_storage(self, storage: torch.UntypedStorage) -> SharedStorage:
        handle = len(self.shared).to_bytes(8, "little")
        self.shared[handle] = storage
        return SharedStorage(0, handle, storage.nbytes(), 0, b"counter", 0, b"event", False)

    def open_storage(self, shared: SharedStorage, device: int) -> torch.UntypedStorage:
        if shared.handle not in self.shared:
            raise RuntimeError("CUDA error: invalid resource handle")
        self.opened += 1
        return self.shared[shared.handle]


def transport_kind(name: str) -> type[TcpTransport]:
    if name == "tcp":
        return TcpTransport
    if name == "same_gpu":
        return SameGpuTransport
    from headgate.transfer.nixl import NixlTransport

    return NixlTransport


@contextmanager
def peers(**settings: Any) -> Iterator[tuple[Peer, Peer]]:
    """Yield P, whose cache is full of KV, and D, whose cache is empty."""
    p, d = Peer(**settings), Peer(fill=0, **settings)
    try:
        yield p, d
    finally:
        p.transport.close()
        d.transport.close()


def same(p: Peer, theirs: tuple[int, ...], d: Peer, ours: tuple[int, ...]) -> bool:
    pairs = zip(theirs, ours, strict=True)
    return all(torch.equal(a, b) for i, j in pairs for a, b in zip(p.block(i), d.block(j), strict=True))


# Takes bytes and their offset in the stream; returns the bytes to pass on, or None to break the connection.
Mangle = Callable[[bytes, int], bytes | None]


@contextmanager
def proxy(target: str, mangle: Mangle) -> Iterator[str]:
    """An address that leads to `target`; its replies pass through `mangle`."""
    server = socket.create_server(("127.0.0.1", 0))
    address = parse_address(target)
    open_sockets = [server]

    def forward(source: socket.socket, sink: socket.socket, change: Mangle) -> None:
        offset = 0
        try:
            while data := source.recv(65536):
                passed = change(data, offset)
                offset += len(data)
                if passed is None:
                    break
                sink.sendall(passed)
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        try:
            while True:
                near, _ = server.accept()
                far = socket.create_connection((address.host, address.port))
                open_sockets.extend((near, far))
                for way in ((near, far, lambda data, _: data), (far, near, mangle)):
                    threading.Thread(target=forward, args=way, daemon=True).start()
        except OSError:
            pass

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        for sock in open_sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def counted(target: str) -> Iterator[tuple[str, list[int]]]:
    """A proxy address for `target`, and the byte counts of its replies."""
    came: list[int] = []

    def count(data: bytes, offset: int) -> bytes:
        came.append(len(data))
        return data

    with proxy(target, count) as address:
        yield address, came
