"""Writes that wait for the end of a turn: all of them go out, in order, whatever becomes of one connection."""

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


def test_what_is_written_in_a_turn_goes_out_at_its_end_and_together():
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


def test_nothing_is_written_to_who_has_gone():
    async def test() -> None:
        outbox, wire = Outbox(), Wire()
        wire.abort()
        for size in (1, Outbox.LARGE):
            write(outbox, wire, b"x" * size)
            await asyncio.sleep(0)
        assert wire.written == []

    asyncio.run(test())


def test_what_is_large_goes_out_at_once_after_what_waits():
    async def test() -> None:
        outbox, wire, large = Outbox(), Wire(), b"x" * Outbox.LARGE
        write(outbox, wire, b"a")
        write(outbox, wire, large)
        assert wire.written == [b"a" + large]
        await asyncio.sleep(0)
        assert len(wire.written) == 1

    asyncio.run(test())


def test_a_long_turn_does_not_keep_everybody_waiting():
    async def test() -> None:
        outbox, wires = Outbox(), [Wire() for _ in range(Outbox.MOST + 1)]
        for wire in wires:
            write(outbox, wire, b"a")
        assert [wire.written for wire in wires] == [[b"a"]] * Outbox.MOST + [[]]
        await asyncio.sleep(0)
        assert wires[-1].written == [b"a"]

    asyncio.run(test())


def test_one_connection_that_is_gone_or_broken_does_not_hurt_the_others(caplog):
    async def test() -> None:
        outbox, gone, broken, well = Outbox(), Wire(), Wire(broken=True), Wire()
        for wire in (gone, broken, well):
            write(outbox, wire, b"a")
        gone.abort()
        await asyncio.sleep(0)
        assert (gone.written, well.written) == ([], [b"a"]) and broken.closing

    asyncio.run(test())
    assert "a connection takes no more" in caplog.text
