"""Writes that wait for the end of a turn: all are sent, in order, whatever happens to one connection."""

from __future__ import annotations

import asyncio
from typing import cast

from headgate.router.data_path.outbox import Outbox


class Wire:
    def __init__(self, *, broken: bool = False) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self.broken = broken

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("Cannot call write() after write_eof()")
        self.written.append(data)

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


def write(outbox: Outbox, wire: Wire, data: bytes) -> None:
    outbox.write(cast(asyncio.WriteTransport, wire), data)


def test_writes_of_one_turn_of_the_event_loop_are_sent_together_at_its_end():
    async def test() -> None:
        outbox, one, other = Outbox(), Wire(), Wire()
        for wire, data in ((one, b"a"), (other, b"b"), (one, b"c")):
            write(outbox, wire, data)
        assert one.written == other.written == []
        await asyncio.sleep(0)
        assert (one.written, other.written) == ([b"ac"], [b"b"])
        write(outbox, one, b"d")
        await asyncio.sleep(0)
        assert one.written == [b"ac", b"d"]

    asyncio.run(test())


def test_nothing_is_written_to_a_closed_connection():
    async def test() -> None:
        outbox, wire = Outbox(), Wire()
        wire.abort()
        for size in (1, Outbox.LARGE):
            write(outbox, wire, b"x" * size)
            await asyncio.sleep(0)
        assert wire.written == []

    asyncio.run(test())


def test_large_writes_are_sent_at_once_after_pending_ones():
    async def test() -> None:
        outbox, wire, large = Outbox(), Wire(), b"x" * Outbox.LARGE
        write(outbox, wire, b"a")
        write(outbox, wire, large)
        assert wire.written == [b"a" + large]
        await asyncio.sleep(0)
        assert len(wire.written) == 1

    asyncio.run(test())


def test_writes_are_sent_before_the_end_of_a_long_turn():
    async def test() -> None:
        outbox, wires = Outbox(), [Wire() for _ in range(Outbox.MOST + 1)]
        for wire in wires:
            write(outbox, wire, b"a")
        assert [wire.written for wire in wires] == [[b"a"]] * Outbox.MOST + [[]]
        await asyncio.sleep(0)
        assert wires[-1].written == [b"a"]

    asyncio.run(test())


def test_a_closed_or_broken_connection_does_not_affect_the_others(caplog):
    async def test() -> None:
        outbox, gone, broken, well = Outbox(), Wire(), Wire(broken=True), Wire()
        for wire in (gone, broken, well):
            write(outbox, wire, b"a")
        gone.abort()
        await asyncio.sleep(0)
        assert (gone.written, well.written) == ([], [b"a"]) and broken.closing

    asyncio.run(test())
    assert "cannot write to a connection" in caplog.text
