"""Behaviour specific to engines on one GPU. Behaviour common to all transports is in `test_tcp.py`.

The GPU is `OneGpu`: memory of this process that the other side opens by its handle. The copies are real.
"""

from __future__ import annotations

import random
import socket
import threading

import msgspec
import pytest
import torch

from headgate.config import EngineConfig
from headgate.device import same_gpu
from headgate.device.kv_blocks import HostBlocks
from headgate.device.same_gpu import SameGpuCache, SharedSlots, same_gpu_cache
from headgate.engine.build import open_transport
from headgate.transfer import same_gpu as transfer_same_gpu
from headgate.transfer.frames import PROTOCOL, Attach, FrameHeader, FrameKind
from headgate.transfer.same_gpu import SameGpuTransport, ShelfTable
from headgate.transfer.slots import AHEAD
from headgate.transfer.tcp import TcpTransport, parse_address
from tests.transfer.peers import GENERATION, VERSION, Peer, counted, peers, same
from tests.transfer.test_tcp import BLOCK_BYTES, OURS, SOME, checksum, hung_up, until


def table(peer: Peer) -> ShelfTable:
    return peer.transport._table  # type: ignore[attr-defined, no-any-return]


def cache(peer: Peer) -> SameGpuCache:
    return table(peer).memory  # type: ignore[return-value]


@pytest.fixture
def one_block_a_slot(monkeypatch) -> None:
    monkeypatch.setattr(same_gpu, "SLOT_BYTES", 1)


def test_blocks_bypass_the_connection_and_are_counted_as_transferred():
    with peers(kind="same_gpu") as (p, d), counted(p.transport.address) as (address, came):
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS) and p.released(1)
        assert sum(came) < BLOCK_BYTES
        assert d.transport.counts().received_bytes > len(SOME) * BLOCK_BYTES
        assert p.transport.counts().sent_bytes > len(SOME) * BLOCK_BYTES
        until(lambda: not table(p).lent)


def test_another_engines_shelf_is_opened_once_and_closed_after_idle_time(gpu, monkeypatch):
    with peers(kind="same_gpu") as (p, d):
        assert not gpu.shared, "nothing is allocated before the first fetch"
        for id in range(1, 6):
            p.offer(id, SOME)
            d.fetch(id, p.ticket(id), OURS)
            assert d.fetched(id)
        assert len(gpu.shared) == gpu.opened == 1
        monkeypatch.setattr(transfer_same_gpu, "IDLE_S", 0.05)
        until(lambda: not table(d)._open_shelves)
        p.offer(9, SOME)
        d.fetch(9, p.ticket(9), OURS)
        assert d.fetched(9) and gpu.opened == 2


def test_blocks_without_a_free_slot_go_over_the_connection():
    with peers(kind="same_gpu") as (p, d), counted(p.transport.address) as (address, came):
        table(p).shelf()
        while table(p).take_slot() is not None:
            pass
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS) and sum(came) > len(SOME) * BLOCK_BYTES


def cannot_be_opened(p: Peer, d: Peer) -> None:
    def fail(shared, device):  # type: ignore[no-untyped-def]
        raise RuntimeError("CUDA error: invalid resource handle")

    same_gpu.ipc.open_storage = fail  # until the `gpu` fixture restores the original


def is_on_another_gpu(p: Peer, d: Peer) -> None:
    cache(d).gpu_id = "GPU-2"


def is_on_no_gpu(p: Peer, d: Peer) -> None:
    cache(p).gpu_id = cache(d).gpu_id = ""


def describes_slots_on_another_gpu(p: Peer, d: Peer) -> None:
    shelf = cache(p).shelf()
    assert shelf is not None
    shelf.descriptor = msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(shelf.descriptor, type=SharedSlots), gpu_id="GPU-2")
    )


def has_no_room(p: Peer, d: Peer) -> None:
    def fail(storage):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("CUDA out of memory")

    same_gpu.ipc.export_storage = fail


@pytest.mark.parametrize(
    "engine", [cannot_be_opened, is_on_another_gpu, is_on_no_gpu, describes_slots_on_another_gpu, has_no_room]
)
def test_kv_of_an_engine_on_another_gpu_comes_over_the_connection(engine, gpu):
    with peers(kind="same_gpu") as (p, d), counted(p.transport.address) as (address, came):
        engine(p, d)
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS) and sum(came) > len(SOME) * BLOCK_BYTES
        assert not d.failures() and p.released(1)
        if engine in (is_on_another_gpu, is_on_no_gpu):
            assert not gpu.shared, "nothing is allocated for a peer that cannot read it"


@pytest.mark.parametrize("kinds", [("same_gpu", "tcp"), ("tcp", "same_gpu")])
def test_engines_of_both_kinds_fetch_from_each_other(kinds):
    p, d = (Peer(kind=kind) for kind in kinds)
    try:
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS) and p.released(1)
    finally:
        p.transport.close()
        d.transport.close()


def test_one_connection_never_uses_more_slots_than_its_share(one_block_a_slot):
    with peers(kind="same_gpu") as (p, d):
        take, taken = table(p).take_slot, []

        def noted() -> int | None:
            slot = take()
            taken.append(table(p).lent)
            return slot

        table(p).take_slot = noted  # type: ignore[method-assign]
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS)
        assert len(taken) == len(SOME) and max(taken) <= AHEAD


def after_each_copy(p, do):  # type: ignore[no-untyped-def]
    """Run `do` on each slot that P has copied blocks into, before D is notified; returns P's shelf."""
    shelf = cache(p).shelf()
    assert shelf is not None
    put = shelf.put

    def put_and_do(slot, blocks):  # type: ignore[no-untyped-def]
        digest = put(slot, blocks)
        do(slot)
        return digest

    shelf.put = put_and_do  # type: ignore[method-assign]
    return shelf


def test_39_a_slot_that_changes_before_it_is_read_is_detected():
    with peers(kind="same_gpu") as (p, d):
        shelf = after_each_copy(p, lambda slot: shelf._memory[slot, 3, 2, 100].bitwise_xor_(1))
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert not d.fetched(1) and d.failures() == {"corrupt": 1} and p.released(1) is False
        until(lambda: not table(p).lent)


def test_37_blocks_withdrawn_during_a_copy_are_not_delivered_as_kv():
    with peers(kind="same_gpu") as (p, d):
        after_each_copy(p, lambda _: p.transport.withdraw(1))  # as the loop's thread would
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert not d.fetched(1) and d.failures() == {"withdrawn": 1}
        until(lambda: not table(p).lent)


def test_32_38_nothing_is_written_to_blocks_after_their_fetch_has_ended():
    """A started copy is completed first, so blocks can be reused as soon as the end of the fetch is reported."""
    begun, go_on = threading.Event(), threading.Event()
    with peers(kind="same_gpu") as (p, d):
        take = cache(d).take

        def slow(blocks, slot):  # type: ignore[no-untyped-def]
            begun.set()
            assert go_on.wait(30)
            return take(blocks, slot)

        cache(d).take = slow  # type: ignore[method-assign]
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert begun.wait(30)
        d.transport.leave(1)
        go_on.set()
        ended = d.fetched(1)
        after = [part for i in OURS for part in d.block(i)]
        assert p.released(1) is ended
        p.offer(2, SOME)
        cache(d).take = take  # type: ignore[method-assign]
        d.fetch(2, p.ticket(2), (30, 31, 32, 36, 37, 38, 25, 26))
        assert d.fetched(2)
        now = [part for i in OURS for part in d.block(i)]
        assert all(torch.equal(a, b) for a, b in zip(after, now, strict=True))


# -- invalid peers -------------------------------------------------------------------------


def agent(gpu, slots: int = 4, blocks: int = 8, size: int | None = None) -> bytes:
    """The frame of an engine that offers a shelf."""
    storage = gpu.export_storage(torch.UntypedStorage(slots * blocks * BLOCK_BYTES if size is None else size))
    body = msgspec.msgpack.encode(SharedSlots("GPU-1", storage, slots, blocks))
    return FrameHeader(FrameKind.AGENT, length=len(body)).encode() + body


def ready(slot: int = 0, count: int = 8, size: int = 8) -> bytes:
    return FrameHeader(FrameKind.READY, 0, count, size).encode() + slot.to_bytes(8, "little")[:size]


LIES = {
    "no shelf": lambda _: ready(),
    "wrong bytes": lambda gpu: agent(gpu) + ready(),
    "no such slot": lambda gpu: agent(gpu) + ready(slot=4),
    "no such slot, far": lambda gpu: agent(gpu) + ready(slot=2**63),
    "too many blocks": lambda gpu: agent(gpu, blocks=4) + ready(),
    "half a number": lambda gpu: agent(gpu) + ready(size=4),
    "two shelves": lambda gpu: agent(gpu) * 2,
    "rubbish": lambda _: FrameHeader(FrameKind.AGENT, length=8).encode() + b"\xff" * 8 + ready(),
    "another size": lambda gpu: agent(gpu, size=64) + ready(),
    "no slots": lambda gpu: agent(gpu, slots=0, size=0) + ready(),
    "fewer than none": lambda gpu: agent(gpu, slots=-1, blocks=-1, size=BLOCK_BYTES) + ready(),
}


@pytest.mark.parametrize("lie", LIES)
def test_39_an_invalid_slot_description_is_rejected(lie, gpu):
    with socket.create_server(("127.0.0.1", 0)) as server, peers(kind="same_gpu") as (p, d):
        d.fetch(1, p.ticket(1, f"127.0.0.1:{server.getsockname()[1]}"), OURS)
        sock, _ = server.accept()
        sock.sendall(FrameHeader(FrameKind.TAKEN, a=30_000).encode() + LIES[lie](gpu))
        assert not d.fetched(1) and d.failures() == {"corrupt": 1}
        assert not any(opened.users for opened in table(d)._open_shelves.values())
        sock.close()


def connected(p: Peer) -> socket.socket:
    address = parse_address(p.transport.address)
    return socket.create_connection((address.host, address.port), timeout=60)


def read_to_the_end(sock: socket.socket) -> bytes:
    data = b""
    while some := sock.recv(4096):
        data += some
    return data


@pytest.mark.parametrize("kind", [FrameKind.OPENED, FrameKind.TOOK])
def test_54_a_peer_that_sends_an_unexpected_reply_is_disconnected(kind):
    with peers(kind="same_gpu") as (p, _), connected(p) as stranger:
        stranger.sendall(FrameHeader(kind, 1).encode())
        assert hung_up(stranger)


def test_37_slots_that_a_peer_never_reads_are_released_when_it_disconnects(one_block_a_slot):
    with peers(kind="same_gpu") as (p, d):
        p.offer(1, SOME)
        body = msgspec.msgpack.encode(Attach(PROTOCOL, 1, GENERATION, VERSION, "test", gpu_id="GPU-1"))
        with connected(p) as other:
            other.sendall(FrameHeader(FrameKind.ATTACH, length=len(body)).encode() + body)
            other.sendall(FrameHeader(FrameKind.OPENED, 1).encode() + FrameHeader(FrameKind.FETCH, 0, 8).encode())
            until(lambda: table(p).lent == AHEAD)
            p.offer(2, SOME)
            d.fetch(2, p.ticket(2), OURS)
            assert d.fetched(2) and same(p, SOME, d, OURS), "no other client waits for it"
            p.transport.withdraw(1)
            assert b"withdrawn" in read_to_the_end(other), "32: reported at once"
        until(lambda: not table(p).lent)


# -- the GPU itself ---------------------------------------------------------------------


def test_blocks_put_and_taken_equal_those_of_the_host_and_their_checksums_match():
    rng = random.Random(5)
    tensors = [torch.randn(20, 2, 16, 8).bfloat16() for _ in range(6)]
    theirs, ours = same_gpu_cache(tensors), same_gpu_cache(empty := [torch.zeros_like(tensor) for tensor in tensors])
    assert theirs is not None and ours is not None
    shelf = theirs.shelf()
    assert shelf is not None
    opened = ours.open(shelf.descriptor)
    assert (opened.slots, opened.blocks) == (shelf.slots, shelf.blocks) and shelf.blocks >= 4
    for slot in range(shelf.slots):
        count = rng.randrange(1, 5)
        source, target = (tuple(rng.sample(range(20), count)) for _ in range(2))
        before = [tensor.clone() for tensor in empty]
        right = checksum(HostBlocks(tensors, "same").lend(source))
        assert shelf.put(slot, source) == right == opened.take(slot, target)
        rest = [i for i in range(20) if i not in target]
        for tensor, stored, old in zip(tensors, empty, before, strict=True):
            assert torch.equal(stored[list(target)], tensor[list(source)]) and torch.equal(stored[rest], old[rest])


def test_a_cache_whose_layers_differ_has_no_shelf():
    assert same_gpu_cache([torch.zeros(4, 8), torch.zeros(4, 16)]) is None
    assert same_gpu_cache([torch.zeros(4, 3), torch.zeros(4, 3)]) is None


@pytest.mark.parametrize(("name", "kind"), [("auto", SameGpuTransport), ("tcp", TcpTransport)])
def test_engines_on_a_gpu_use_it_unless_configured_otherwise(name, kind):
    memory = HostBlocks(tensors := [torch.zeros(4, 8)], "test")
    memory.same_gpu = same_gpu_cache(tensors)
    transport = open_transport(EngineConfig(kv_transport=name), memory)
    assert type(transport) is kind
    transport.close()


def test_engines_without_a_gpu_use_the_connection():
    transport = open_transport(EngineConfig(), HostBlocks([torch.zeros(4, 8)], "test"))
    assert type(transport) is TcpTransport
    transport.close()
