"""Connections between engines: after any bytes, the next transfer arrives complete."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
from hypothesis import strategies as st

from headgate.transfer.frames import CHECKSUM_BYTES, PROTOCOL, BadFrame, FrameHeader, FrameKind, decode_header
from headgate.transfer.tcp import parse_address
from tests.fuzzing.properties import damaged, fuzzed, replaced
from tests.transfer.peers import GENERATION, VERSION, peers, same

THEIRS, OURS = (5, 6, 7), (1, 2, 3)
numbers = count(1)


def attach(body: Any) -> bytes:
    packed = msgspec.msgpack.encode(body)
    return FrameHeader(FrameKind.ATTACH, length=len(packed)).encode() + packed


ATTACH = [PROTOCOL, 7, GENERATION, VERSION, "test"]
SAID_BY_CLIENTS = (
    attach(ATTACH)
    + FrameHeader(FrameKind.BEAT).encode()
    + FrameHeader(FrameKind.FETCH, 0, 3).encode()
    + FrameHeader(FrameKind.DONE).encode()
)
SAID_BY_SERVERS = (
    FrameHeader(FrameKind.TAKEN, a=0).encode()
    + FrameHeader(FrameKind.BLOCKS, 0, 1, 6 * 4096 + CHECKSUM_BYTES).encode()
    + bytes(6 * 4096 + CHECKSUM_BYTES)
    + FrameHeader(FrameKind.END).encode()
)
KINDS = st.builds(
    lambda kind, a, b, length, digest: FrameHeader(kind, a, b, length, digest).encode(),
    st.sampled_from(list(FrameKind)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.one_of(st.integers(0, 2000), st.integers(0, 2**64 - 1)),
    st.binary(min_size=8, max_size=8),
)
ODD_ATTACH = replaced(ATTACH).map(lambda body: attach(body) if fits(body) else b"")


def fits(body: Any) -> bool:
    try:
        return len(msgspec.msgpack.encode(body)) < 1000
    except OverflowError:
        return False


from_clients = st.lists(
    st.one_of(damaged(SAID_BY_CLIENTS), KINDS, ODD_ATTACH, st.just(attach(ATTACH))), max_size=4
).map(b"".join)
from_servers = st.lists(
    st.one_of(damaged(SAID_BY_SERVERS), KINDS, st.just(FrameHeader(FrameKind.TAKEN, a=9).encode())), max_size=4
).map(b"".join)


@fuzzed(st.one_of(st.binary(min_size=32, max_size=32), KINDS), few=40)
def test_a_header_is_read_or_refused(data: bytes) -> None:
    with suppress(BadFrame):
        header = decode_header(data)
        assert header.kind is FrameKind.BLOCKS or header.length <= 2**18


@fuzzed(st.lists(from_clients, min_size=1, max_size=5), few=8)
def test_37_garbage_on_one_connection_does_not_affect_other_transfers(sent: list[bytes]) -> None:
    with peers() as (p, d):
        p.offer(7, THEIRS)
        address = parse_address(p.transport.address)
        for data in sent:
            with suppress(OSError), socket.create_connection((address.host, address.port), 5) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(60)
                while stranger.recv(65536):
                    pass
        lease = 1000 + next(numbers)
        p.offer(lease, THEIRS)
        d.fetch(1, p.ticket(lease), OURS)
        assert d.fetched(1) and same(p, THEIRS, d, OURS)
        assert "internal" not in d.failures()


@fuzzed(from_servers, few=15)
def test_39_a_fetch_ends_once_and_accepts_no_damaged_block_whatever_the_answer(answer: bytes) -> None:
    with peers(wait_s=2.0) as (p, d), socket.create_server(("127.0.0.1", 0)) as liar:
        thread = threading.Thread(target=lie, args=(liar, answer))
        thread.start()
        host, port = liar.getsockname()
        d.fetch(1, p.ticket(1, f"{host}:{port}"), OURS)
        d.fetched(1)
        assert "internal" not in d.failures()
        assert d.events.empty()
        thread.join(60)


def lie(liar: socket.socket, answer: bytes) -> None:
    liar.settimeout(60)
    with suppress(OSError), liar.accept()[0] as connection:
        connection.recv(65536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        while connection.recv(65536):
            pass
