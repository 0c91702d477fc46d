"""Transports without engines: bytes, leases and everything that can fail on a connection."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from queue import Empty

import msgspec
import pytest
import torch

from headgate.device import kv_blocks as blocks
from headgate.protocol.plan import Fetch
from headgate.transfer import link, serving, tcp
from headgate.transfer.frames import CHECKSUM_BYTES, HEADER_BYTES, PROTOCOL, Attach, Checksum, FrameHeader, FrameKind
from headgate.transfer.serving import LeaseServer, Offer, ServingSettings
from headgate.transfer.tcp import parse_address
from headgate.transfer.transport import Fetched, Portion, Released, Renewed
from tests.transfer.peers import GENERATION, KINDS, PART_BYTES, PARTS, VERSION, Peer, peers, proxy, same

SOME = (5, 6, 7, 20, 3, 39, 0, 1)
OURS = (9, 2, 1, 0, 33, 34, 35, 8)
BLOCK_BYTES = PART_BYTES * PARTS
CHECKSUM_AT = 2 * HEADER_BYTES + len(SOME) * BLOCK_BYTES


def blocks_bytes(count: int) -> int:
    """The body size of a frame with `count` blocks."""
    return count * BLOCK_BYTES + CHECKSUM_BYTES


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("portion_bytes", [1, 8 * PART_BYTES, blocks.PORTION_BYTES])
def test_blocks_arrive_at_their_destination_and_nothing_else_changes(kind, portion_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "PORTION_BYTES", portion_bytes)
    rng = random.Random(1)
    with peers(kind=kind) as (p, d):
        for id in range(1, 21):
            count = rng.randrange(1, 12)
            theirs, ours = (tuple(rng.sample(range(40), count)) for _ in range(2))
            skip = rng.randrange(count)
            before = {i: d.block(i) for i in range(40)}
            p.offer(id, theirs)
            d.fetch(id, p.ticket(id), ours[skip:], skip)
            assert d.fetched(id) and p.released(id)
            assert same(p, theirs[skip:], d, ours[skip:])
            rest = set(range(40)) - set(ours[skip:])
            assert all((a == b).all() for i in rest for a, b in zip(before[i], d.block(i), strict=True))
        counts = d.transport.counts()
        assert counts.received_bytes > 20 * BLOCK_BYTES and counts.fetch_s > 0 and not counts.failures


def test_parts_of_a_block_may_differ_in_size():
    tensors = [torch.randint(255, (20, 8 * size), dtype=torch.uint8) for size in (3, 1, 4, 1, 5)]
    empty = [torch.zeros_like(tensor) for tensor in tensors]
    theirs, ours = (7, 3, 11), (0, 15, 4)
    lent = blocks.HostBlocks(tensors, "same").lend(theirs)
    for portion, place in zip(lent, blocks.HostBlocks(empty, "same").room(ours), strict=True):
        for words, room in zip(portion, place, strict=True):
            room[:] = words
    assert all((a[list(theirs)] == b[list(ours)]).all() for a, b in zip(tensors, empty, strict=True))


def test_blocks_travel_as_they_are_filled_and_not_before(kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME, filled=0)
        d.fetch(1, p.ticket(1), OURS)
        for filled in (1, 2, 5):
            p.transport.fill(1, filled)
            until(lambda: same(p, SOME[:filled], d, OURS[:filled]))  # noqa: B023 (called at once)
            assert not any(tensor.any() for i in OURS[filled:] for tensor in d.block(i))
        with pytest.raises(Empty):
            d.next(Fetched, 0.05)
        p.transport.fill(1, len(SOME))
        assert d.fetched(1) and same(p, SOME, d, OURS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lease": 2}, "unknown lease"),
        ({"generation": 78}, "unknown lease"),
        ({"version": 4}, "another version"),
        ({"engine": "127.0.0.1:1"}, "no connection"),
        ({"engine": "10.1.2.3:80"}, "unreachable"),
        ({"engine": "example.org:80"}, "unreachable"),
        ({"engine": "nonsense"}, "unreachable"),
    ],
)
def test_37_39_a_mismatched_ticket_fails_at_once_with_a_reason(change, why, kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, **change), OURS)
        assert not d.fetched(1)
        (cause,) = d.failures()
        assert cause.startswith(why)
        d.fetch(2, p.ticket(1), OURS)
        assert d.fetched(2), "the lease is still valid for a correct ticket"


def test_39_another_layout_is_refused_by_name(kind):
    p, d = Peer(kind=kind), Peer(kind=kind, layout="another")
    p.offer(1, SOME)
    d.fetch(1, p.ticket(1), OURS)
    assert not d.fetched(1) and d.failures() == {"another layout": 1}
    p.transport.close()
    d.transport.close()


def test_a_lease_is_good_for_one_connection(kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME)
        d.transport.attach(1, p.ticket(1))
        p.next(Renewed)
        d.fetch(2, p.ticket(1), OURS)
        assert not d.fetched(2) and d.failures() == {"unknown lease": 1}
        d.transport.leave(1)
        assert p.released(1) is False


def test_32_a_withdrawn_offer_is_reported_at_once(kind):
    with peers(kind=kind, wait_s=60) as (p, d):
        p.offer(1, SOME, filled=3)
        d.fetch(1, p.ticket(1), OURS)
        until(lambda: same(p, SOME[:3], d, OURS[:3]))
        began_s = time.monotonic()
        p.transport.withdraw(1)
        assert not d.fetched(1) and time.monotonic() - began_s < 40
        assert d.failures() == {"withdrawn": 1}


def test_blocks_withdrawn_during_a_read_are_not_delivered_as_kv():
    """Blocks may be reused the moment `withdraw` has returned, even in the middle of a send."""
    gate, passed = threading.Event(), threading.Event()

    def hold_the_last_byte(data: bytes, offset: int) -> bytes:
        if offset + len(data) >= 4 * BLOCK_BYTES:
            passed.set()
            gate.wait(60)
        return data

    with peers() as (p, d), proxy(p.transport.address, hold_the_last_byte) as address:
        lend = p.transport._memory.lend

        def slow_lend(blocks):  # type: ignore[no-untyped-def]
            yield from lend(blocks)
            if len(SOME) - 1 in map(SOME.index, blocks):
                p.transport.withdraw(1)  # as the loop's thread would, between the read and the final frame

        p.transport._memory.lend = slow_lend  # type: ignore[method-assign]
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert passed.wait(60)
        gate.set()
        assert not d.fetched(1) and d.failures() == {"withdrawn": 1}


def test_withdrawn_blocks_are_not_read_even_if_the_socket_is_full():
    """A sleeping engine has released this memory, and reading it on a GPU would end the process."""
    memory = blocks.HostBlocks([torch.zeros(40, PART_BYTES, dtype=torch.uint8) for _ in range(PARTS)], "test")
    offer, lend = Offer(1, GENERATION, VERSION, SOME, filled=len(SOME)), memory.lend
    read_late: list[bool] = []

    def noted(some):  # type: ignore[no-untyped-def]
        read_late.append(offer.withdrawn)
        return lend(some)

    memory.lend = noted  # type: ignore[method-assign]
    near, far = socket.socketpair()
    with near, far:
        server = LeaseServer(near, ServingSettings(memory, {1: offer}.get, lambda _: None, 30.0, time.monotonic))
        server._attach(Attach(PROTOCOL, 1, GENERATION, VERSION, "test"))
        server.received(FrameHeader(FrameKind.FETCH, 0, len(SOME)))
        server.more()  # its data stays queued, as on a connection that accepts no more
        offer.withdrawn = True
        for _ in range(100):
            server.more()
    assert server.closing and read_late == [False]


def test_memory_can_be_released_when_transfers_have_settled(kind):
    """Peers that are fetching are disconnected, however much is left to read, and compute the prompt themselves."""
    with peers(kind=kind, wait_s=60) as (p, d):
        p.offer(1, SOME, filled=3)
        d.fetch(1, p.ticket(1), OURS)
        until(lambda: same(p, SOME[:3], d, OURS[:3]))
        p.transport.withdraw(1)
        p.transport.settle().result(60)
        assert not p.transport._servers
        assert not d.fetched(1) and p.released(1) is False


def test_leaving_a_fetch_is_reported_once_and_to_the_peer_at_once(kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME, filled=2)
        d.fetch(1, p.ticket(1), OURS)
        p.next(Renewed)
        d.transport.leave(1)
        d.transport.leave(1)
        assert not d.fetched(1) and p.released(1) is False
        with pytest.raises(Empty):
            d.next(Fetched, 0.1)
        assert not d.failures(), "nothing failed"


@pytest.mark.parametrize("asked", [False, True])
def test_37_leaving_before_the_connection_is_up_still_releases_the_lease_at_once(kind, asked):
    """An engine that finds the whole prompt in its own cache leaves right after it attaches."""
    with peers(kind=kind) as (p, d):
        for id in range(1, 21):
            p.offer(id, SOME)
            if asked:
                d.fetch(id, p.ticket(id), OURS)
            else:
                d.transport.attach(id, p.ticket(id))
            d.transport.leave(id)
            if asked:
                d.fetched(id)  # or not, if it was quick
            assert p.next(Released).lease == id
        assert not d.failures()
        until(lambda: not d.transport._detaching and not d.transport._clients)


def test_leaving_an_unresponsive_peer_ends_at_the_timeout(kind):
    with socket.create_server(("127.0.0.1", 0)) as server, peers(kind=kind, wait_s=2.0) as (p, d):
        d.transport.attach(1, p.ticket(1, f"127.0.0.1:{server.getsockname()[1]}"))
        d.transport.leave(1)
        sock, _ = server.accept()
        with sock:
            sock.settimeout(30)
            while sock.recv(4096):
                pass
        until(lambda: not d.transport._detaching and not d.transport._clients)
        assert not d.failures()


def test_28_a_lease_is_renewed_while_a_client_waits_without_the_engine_loop(kind):
    # If this machine does not run a thread for the time of a lease, the lease is lost; the next attempt is longer.
    assert any(renewed_in_time(kind, lease_s) for lease_s in (0.3, 1.5, 6.0))


def renewed_in_time(kind: str, lease_s: float) -> bool:
    with peers(kind=kind, lease_s=lease_s) as (p, d):
        p.offer(1, SOME)
        began_s = time.monotonic()
        d.transport.attach(1, p.ticket(1))
        try:
            renewals = [p.next(Renewed, 4 * lease_s).until_s for _ in range(8)]
        except Empty:
            return False
        assert renewals == sorted(renewals) and renewals[-1] - renewals[0] > 1.6 * lease_s
        assert time.monotonic() - began_s > 1.6 * lease_s, "not more often than it must"
        if any(b - a >= lease_s for a, b in pairwise(renewals)):
            return False
        d.transport.fetch(Fetch(1, p.ticket(1), 0, OURS))
        return d.fetched(1)


@pytest.mark.parametrize("at", [0, 4, 8, 20, 3 * HEADER_BYTES, 2 * BLOCK_BYTES, 8 * BLOCK_BYTES - 9, CHECKSUM_AT])
def test_39_a_damaged_byte_is_detected_at_any_position(at):
    def damage(data: bytes, offset: int) -> bytes:
        i = at - offset
        return data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :] if 0 <= i < len(data) else data

    harmless = at == 8  # the first frame states how long the lease lasts; a changed byte there does no harm to KV
    with peers(wait_s=30.0 if harmless else 1.0) as (p, d), proxy(p.transport.address, damage) as address:
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) is harmless, d.failures()


def test_39_the_checksum_depends_on_content_and_order_but_not_on_portions():
    p = Peer()
    memory = p.transport._memory
    right = checksum(memory.lend((5, 6, 7)))
    parts = [run for portion in memory.lend((5, 6, 7)) for run in portion]
    assert checksum([[part[:1], part[1:]] for part in parts]) == right
    assert checksum(memory.lend((6, 5, 7))) != right and checksum(memory.lend((5, 6))) != right
    assert checksum([[parts[1], parts[0], *parts[2:]]]) != right
    p.tensors[3][6, 100] ^= 1
    assert checksum(memory.lend((5, 6, 7))) != right
    p.transport.close()


def checksum(portions: Iterable[Portion]) -> bytes:
    checksum = Checksum()
    for portion in portions:
        checksum.add(portion)
    return checksum.digest()


@pytest.mark.parametrize("at", [0, 10, HEADER_BYTES, 2 * HEADER_BYTES, BLOCK_BYTES, 8 * BLOCK_BYTES + HEADER_BYTES])
def test_39_a_broken_connection_fails_the_fetch_at_once(at):
    def cut(data: bytes, offset: int) -> bytes | None:
        return data if offset + len(data) <= at else None

    with peers(wait_s=60) as (p, d), proxy(p.transport.address, cut) as address:
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert not d.fetched(1) and p.released(1) is False


def test_37_a_silent_connection_is_detected_in_time():
    silence = threading.Event()

    def stall(data: bytes, offset: int) -> bytes:
        if offset:
            silence.wait(60)
        return data

    with peers(wait_s=0.5) as (p, d), proxy(p.transport.address, stall) as address:
        p.offer(1, SOME)
        began_s = time.monotonic()
        d.fetch(1, p.ticket(1, address), OURS)
        assert not d.fetched(1) and 0.4 < time.monotonic() - began_s < 40
        assert d.failures() == {"timeout": 1}
        silence.set()


def test_a_slow_connection_that_makes_progress_does_not_time_out():
    # Retried with a longer limit if this machine did not run a thread for as long as the connection may be silent.
    assert any(waited_for(wait_s) for wait_s in (0.4, 2.0, 8.0))


def waited_for(wait_s: float) -> bool:
    def slow(data: bytes, offset: int) -> bytes:
        time.sleep(wait_s / 4)
        return data

    with peers(wait_s=wait_s) as (p, d), proxy(p.transport.address, slow) as address:
        p.offer(1, SOME)
        began_s = time.monotonic()
        d.fetch(1, p.ticket(1, address), OURS)
        if not d.fetched(1):
            return False
        assert same(p, SOME, d, OURS) and time.monotonic() - began_s > wait_s
        return True


RUBBISH = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
    FrameHeader(FrameKind.ATTACH, length=2**40).encode(),
    FrameHeader(FrameKind.ATTACH, length=8).encode() + b"\xff" * 8,
    FrameHeader(FrameKind.FETCH, 0, 8).encode(),
    FrameHeader(FrameKind.DONE).encode(),
    FrameHeader(FrameKind.BEAT).encode(),
    FrameHeader(FrameKind.BLOCKS, 0, 1, 2**50).encode(),
    FrameHeader(FrameKind.END).encode(),
]


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_54_a_peer_that_sends_garbage_is_disconnected_without_affecting_others(rubbish, kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME, filled=1)
        d.fetch(1, p.ticket(1), OURS)
        address = parse_address(p.transport.address)
        with socket.create_connection((address.host, address.port), timeout=60) as stranger:
            stranger.sendall(rubbish)
            assert hung_up(stranger)
        p.transport.fill(1, len(SOME))
        assert d.fetched(1) and same(p, SOME, d, OURS)


def test_39_a_frame_with_an_unexpected_body_closes_the_connection(kind):
    """If the connection stayed open, the body would be read as the next frame."""
    with peers(kind=kind) as (p, _):
        p.offer(1, SOME)
        body = msgspec.msgpack.encode(Attach(PROTOCOL, 1, GENERATION, VERSION, "test"))
        attach = FrameHeader(FrameKind.ATTACH, length=len(body)).encode() + body
        address = parse_address(p.transport.address)
        with socket.create_connection((address.host, address.port), timeout=60) as stranger:
            stranger.sendall(attach)
            assert len(stranger.recv(HEADER_BYTES)) == HEADER_BYTES, "attached"
            stranger.sendall(
                FrameHeader(FrameKind.BEAT, length=HEADER_BYTES).encode() + FrameHeader(FrameKind.BEAT).encode()
            )
            assert p.released(1) is False


@pytest.mark.parametrize(
    "lie",
    [
        FrameHeader(FrameKind.END).encode(),
        FrameHeader(FrameKind.BLOCKS, 1, 1, blocks_bytes(1)).encode() + bytes(blocks_bytes(1)),
        FrameHeader(FrameKind.BLOCKS, 0, 9, blocks_bytes(9)).encode() + bytes(blocks_bytes(9)),
        FrameHeader(FrameKind.BLOCKS, 0, 1, blocks_bytes(1) - 1).encode() + bytes(blocks_bytes(1)),
        FrameHeader(FrameKind.FETCH, 0, 1).encode(),
    ],
    ids=["end", "other blocks", "more blocks", "less bytes", "request"],
)
def test_39_an_engine_that_sends_unexpected_frames_is_rejected(lie, kind):
    with socket.create_server(("127.0.0.1", 0)) as server, peers(kind=kind) as (p, d):
        d.fetch(1, p.ticket(1, f"127.0.0.1:{server.getsockname()[1]}"), OURS)
        sock, _ = server.accept()
        sock.sendall(FrameHeader(FrameKind.TAKEN, a=30_000).encode() + lie)
        assert not d.fetched(1) and d.failures() == {"corrupt": 1}
        sock.close()


def test_a_connection_continues_after_its_share_of_a_turn(monkeypatch, kind):
    monkeypatch.setattr(link, "MOST_BYTES_PER_TURN", 1)
    monkeypatch.setattr(serving, "MESSAGE_BYTES", 1)
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS)


def test_a_silent_peer_is_disconnected(monkeypatch, kind):
    monkeypatch.setattr(tcp, "UNATTACHED_S", 0.2)
    with peers(kind=kind) as (p, _):
        address = parse_address(p.transport.address)
        with socket.create_connection((address.host, address.port), timeout=60) as stranger:
            assert hung_up(stranger)


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_transport_that_closes_ends_every_fetch_once(kind):
    with peers(kind=kind) as (p, d):
        p.offer(1, SOME, filled=1)
        d.fetch(1, p.ticket(1), OURS)
        p.next(Renewed)
        d.transport.close()
        assert not d.fetched(1) and p.next(Released).fetched is False


def until(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.005)
