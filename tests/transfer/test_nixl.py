"""Behaviour specific to NIXL. Behaviour common to all transports is in `test_tcp.py`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from headgate.transfer import serving
from headgate.transfer.frames import FrameHeader, FrameKind, encode
from headgate.transfer.nixl import NixlSlots
from headgate.transfer.slots import AHEAD
from headgate.transfer.staging import Agent
from headgate.transfer.tcp import parse_address
from headgate.transfer.transport import Renewed
from tests.transfer.peers import Peer, counted, peers, same
from tests.transfer.test_tcp import BLOCK_BYTES, OURS, SOME, hung_up, until


def agent(peer: Peer) -> Agent:
    return peer.transport._agent  # type: ignore[attr-defined, no-any-return]


def slots_released(*all_peers: Peer) -> bool:
    return not any(slots.taken for peer in all_peers for slots in (agent(peer).out, agent(peer).into))


def test_blocks_bypass_the_connection_and_are_counted_as_transferred():
    with peers(kind="nixl") as (p, d), counted(p.transport.address) as (address, came):
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS)
        assert sum(came) < BLOCK_BYTES
        assert d.transport.counts().received_bytes > len(SOME) * BLOCK_BYTES
        assert p.transport.counts().sent_bytes > len(SOME) * BLOCK_BYTES
        assert p.released(1)
        until(lambda: slots_released(p, d))


def test_blocks_without_a_free_slot_go_over_the_connection():
    with peers(kind="nixl") as (p, d), counted(p.transport.address) as (address, came):
        while agent(p).out.take() is not None:
            pass
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1, address), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS) and sum(came) > len(SOME) * BLOCK_BYTES


def test_one_connection_never_uses_more_slots_than_its_share(monkeypatch):
    monkeypatch.setattr(serving, "MESSAGE_BYTES", 1)
    with peers(kind="nixl") as (p, d):
        take, taken = agent(p).out.take, []

        def counted_take():  # type: ignore[no-untyped-def]
            slot = take()
            taken.append(agent(p).out.taken)
            return slot

        agent(p).out.take = counted_take  # type: ignore[method-assign]
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS)
        assert len(taken) == len(SOME) and max(taken) == AHEAD


def test_an_engine_without_nixl_fetches_from_one_that_has_it_and_not_the_other_way_round():
    p, d = Peer(kind="nixl"), Peer(fill=0)
    try:
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert d.fetched(1) and same(p, SOME, d, OURS)
        d.offer(2, OURS)
        p.fetch(2, d.ticket(2), SOME)
        assert not p.fetched(2) and p.failures() == {"another protocol": 1}
    finally:
        p.transport.close()
        d.transport.close()


def test_39_a_changed_byte_in_a_slot_is_detected():
    with peers(kind="nixl") as (p, d):
        write = agent(p).out.write

        def write_wrong(slot, portions):  # type: ignore[no-untyped-def]
            digest = write(slot, portions)
            agent(p).out._words[slot, 100] ^= 1
            return digest

        agent(p).out.write = write_wrong  # type: ignore[method-assign]
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        assert not d.fetched(1) and d.failures() == {"corrupt": 1} and p.released(1) is False
        assert slots_released(p, d)


@contextmanager
def stalled(p: Peer) -> Iterator[None]:
    """P's NIXL makes no progress, as in a stopped process, so nothing can be read; its connection still responds."""
    make_progress = agent(p).make_progress
    agent(p).make_progress = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        agent(p).make_progress = make_progress  # type: ignore[method-assign]


def test_32_38_blocks_are_free_at_once_and_a_read_that_lands_late_touches_none():
    with peers(kind="nixl") as (p, d):
        with stalled(p):
            p.offer(1, SOME)
            d.fetch(1, p.ticket(1), OURS)
            until(lambda: agent(d).into.taken == 1)
            began_s = time.monotonic()
            p.transport.withdraw(1)
            assert not d.fetched(1) and time.monotonic() - began_s < 2
            assert d.failures() == {"withdrawn": 1} and agent(d).into.taken == 1
        until(lambda: slots_released(p, d))
        assert not any(tensor.any() for i in range(40) for tensor in d.block(i))
        p.offer(2, SOME)
        d.fetch(2, p.ticket(2), OURS)
        assert d.fetched(2) and same(p, SOME, d, OURS)


def test_37_a_stalled_read_times_out():
    with peers(kind="nixl", wait_s=0.5) as (p, d), stalled(p):
        p.offer(1, SOME)
        began_s = time.monotonic()
        d.fetch(1, p.ticket(1), OURS)
        assert not d.fetched(1) and 0.4 < time.monotonic() - began_s < 5
        assert d.failures() == {"timeout": 1} and p.released(1) is False


def test_28_a_lease_is_renewed_during_a_stalled_read():
    with peers(kind="nixl", lease_s=0.3) as (p, d), stalled(p):
        p.offer(1, SOME)
        d.fetch(1, p.ticket(1), OURS)
        renewals = [p.next(Renewed).until_s for _ in range(8)]
        assert renewals[-1] - renewals[0] > 0.5


def test_kv_comes_over_the_connection_when_many_reads_are_stuck():
    with peers(kind="nixl") as (p, d):
        with stalled(p):
            for id in range(1, 9):
                p.offer(id, SOME)
                d.fetch(id, p.ticket(id), OURS)
            until(lambda: agent(d).into.taken == 8)
            for id in range(1, 9):
                d.transport.leave(id)
                assert not d.fetched(id)
            with counted(p.transport.address) as (address, came):
                p.offer(9, SOME)
                d.fetch(9, p.ticket(9, address), OURS)
                assert d.fetched(9) and same(p, SOME, d, OURS) and sum(came) > len(SOME) * BLOCK_BYTES
        until(lambda: slots_released(p, d))
        assert not agent(d).stuck


def test_a_failed_read_fails_its_fetch_and_the_next_one_reconnects(monkeypatch):
    with peers(kind="nixl") as (p, d):
        p.offer(1, SOME)
        p.offer(2, SOME)
        with monkeypatch.context() as patch:
            patch.setattr(agent(d)._agent, "check_xfer_state", lambda _: "ERR")
            d.fetch(1, p.ticket(1), OURS)
            assert not d.fetched(1) and d.failures() == {"read failed": 1}
            until(lambda: slots_released(p, d))
            assert not agent(d)._remotes
        d.fetch(2, p.ticket(2), OURS)
        assert d.fetched(2) and same(p, SOME, d, OURS)


def agent_frame(metadata: bytes) -> bytes:
    body = msgspec.msgpack.encode(NixlSlots(metadata, 2**20, 2**20))
    return b"".join(encode(FrameHeader(FrameKind.AGENT, length=len(body)), body))


def ready(offset: int, size: int = 8) -> bytes:
    return FrameHeader(FrameKind.READY, 0, 8, size).encode() + offset.to_bytes(8, "little")[:size]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (ready(0), "corrupt"),
        (FrameHeader(FrameKind.AGENT, length=8).encode() + b"\xff" * 8, "corrupt"),
        (FrameHeader(FrameKind.AGENT, length=2**30).encode(), "corrupt"),
        (agent_frame(b"x") + agent_frame(b"y"), "corrupt"),
        (agent_frame(b"x") + ready(2**20), "corrupt"),
        (agent_frame(b"x") + ready(2**63), "corrupt"),
        (agent_frame(b"x") + ready(0, 4), "corrupt"),
        (agent_frame(b"x") + ready(0), "read failed"),
        (agent_frame(b"") + ready(0), "read failed"),
    ],
    ids=["no agent", "rubbish", "too long", "two agents", "behind", "far behind", "short", "nobody", "nothing"],
)
def test_39_an_invalid_slot_description_is_rejected(lie, why):
    with socket.create_server(("127.0.0.1", 0)) as server, peers(kind="nixl") as (p, d):
        d.fetch(1, p.ticket(1, f"127.0.0.1:{server.getsockname()[1]}"), OURS)
        sock, _ = server.accept()
        sock.sendall(FrameHeader(FrameKind.TAKEN, a=30_000).encode() + lie)
        assert not d.fetched(1) and d.failures() == {why: 1} and slots_released(d)
        sock.close()


def test_54_a_peer_that_returns_a_slot_it_does_not_have_is_disconnected():
    with peers(kind="nixl") as (p, _):
        address = parse_address(p.transport.address)
        with socket.create_connection((address.host, address.port), timeout=5) as stranger:
            stranger.sendall(FrameHeader(FrameKind.TOOK).encode())
            assert hung_up(stranger)


def test_a_fetch_left_in_the_middle_releases_slots_on_both_sides():
    with peers(kind="nixl") as (p, d):
        with stalled(p):
            p.offer(1, SOME)
            d.fetch(1, p.ticket(1), OURS)
            until(lambda: agent(p).out.taken == 1)
            d.transport.leave(1)
            assert not d.fetched(1) and p.released(1) is False
        until(lambda: slots_released(p, d))
