"""The simulation itself: virtual time, connections and processes behave like real ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from headgate.testing.sim.loop import SimLoop, SimProcess, SimulationHung
from headgate.testing.sim.network import KvDamage, NetworkConditions, SimNetwork, SimSocket

SERVER = ("server", 1)


class RecordingProtocol(asyncio.Protocol):
    """Records the events of its connection."""

    def __init__(self) -> None:
        self.received = b""
        self.lost: list[Exception | None] = []
        self.full: list[bool] = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data

    def connection_lost(self, error):
        self.lost.append(error)

    def pause_writing(self):
        self.full.append(True)

    def resume_writing(self):
        self.full.append(False)


class Pair:
    """A connected client and server."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.client_host, self.server_host = SimProcess(loop, "client"), SimProcess(loop, "server")
        self.server_host.on_end.append(lambda: loop.network.host_ended(self.server_host))
        self.server = RecordingProtocol()

    async def connect(self) -> None:
        async def listen():
            await self.loop.create_server(lambda: self.server, sock=SimSocket(*SERVER))

        async def connect():
            return await self.loop.create_connection(RecordingProtocol, *SERVER)

        await self.server_host.spawn(listen())
        self.transport, self.client = await self.client_host.spawn(connect())
        await asyncio.sleep(1)


@contextmanager
def world() -> Iterator[SimLoop]:
    loop = SimLoop()
    try:
        yield loop
    finally:
        for task in list(loop.tasks):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()


def run_in_world(test: Callable[[Pair], Awaitable[None]], conditions: NetworkConditions | None = None) -> float:
    """Run `test` on a new loop; returns the virtual time it took."""
    with world() as loop:
        loop.network = SimNetwork(loop, random.Random(1), conditions or NetworkConditions(splits=1.0, jitter_s=0.1))

        async def run():
            pair = Pair(loop)
            await pair.connect()
            await test(pair)

        loop.run_until_complete(run())
        return loop.time()


def test_a_virtual_day_takes_no_real_time():
    async def wait(pair):
        await asyncio.sleep(86400)

    assert run_in_world(wait) >= 86400


def test_bytes_arrive_whole_and_in_order_however_they_are_cut():
    async def check(pair):
        sent = b""
        for i in range(200):
            pair.transport.write(b"%d " % i)
            sent += b"%d " % i
        await asyncio.sleep(60)
        assert pair.server.received == sent

    run_in_world(check)


def test_a_cut_is_silent_and_held_bytes_arrive_when_it_ends():
    async def check(pair):
        pair.loop.network.cut("client", "server")
        pair.transport.write(b"hello")
        await asyncio.sleep(60)
        assert pair.server.received == b"" and not pair.client.lost
        pair.loop.network.mend("client", "server")
        await asyncio.sleep(1)
        assert pair.server.received == b"hello"

    run_in_world(check)


def test_a_killed_process_resets_its_connections_and_sends_nothing_more():
    async def check(pair):
        pair.server_host.kill()
        pair.server.transport.write(b"too late")
        await asyncio.sleep(1)
        assert isinstance(pair.client.lost[0], ConnectionResetError) and pair.client.received == b""
        with pytest.raises(ConnectionRefusedError):
            await pair.client_host.spawn(pair.loop.create_connection(RecordingProtocol, *SERVER))

    run_in_world(check)


def test_peers_of_an_isolated_machine_are_not_notified():
    async def check(pair):
        pair.loop.network.isolate("server")
        pair.server_host.kill()
        await asyncio.sleep(600)
        assert not pair.client.lost
        pair.loop.network.rejoin("server")
        await asyncio.sleep(1)
        assert pair.client.lost

    run_in_world(check)


def test_a_stopped_process_does_nothing_until_it_resumes():
    async def check(pair):
        pair.server_host.stop()
        pair.transport.write(b"hello")
        await asyncio.sleep(10)
        assert pair.server.received == b""
        pair.server_host.resume()
        await asyncio.sleep(0.01)
        assert pair.server.received == b"hello"

    run_in_world(check)


def test_a_writer_is_held_back_until_its_reader_has_caught_up():
    async def check(pair):
        pair.server.transport.pause_reading()
        pair.transport.write(bytes(1000))
        await asyncio.sleep(1)
        assert pair.client.full == [True] and pair.server.received == b""
        pair.server.transport.resume_reading()
        await asyncio.sleep(1)
        assert pair.client.full == [True, False] and len(pair.server.received) == 1000

    run_in_world(check, NetworkConditions(high_water=500))


def test_a_close_arrives_after_the_last_byte():
    async def check(pair):
        pair.transport.write(b"bye")
        pair.transport.close()
        await asyncio.sleep(5)
        assert pair.server.received == b"bye" and pair.server.lost == [None] and pair.client.lost == [None]

    run_in_world(check)


def test_a_half_closed_connection_still_receives():
    async def check(pair):
        pair.server.eof_received = lambda: True
        pair.transport.write(b"that is all")
        pair.transport.write_eof()
        await asyncio.sleep(5)
        pair.server.transport.write(b"thanks")
        await asyncio.sleep(5)
        assert pair.server.received == b"that is all" and pair.client.received == b"thanks" and not pair.client.lost

    run_in_world(check)


def test_bytes_on_a_slow_connection_are_late_and_in_order():
    async def check(pair):
        pair.loop.network.slow_down("client", "server", 1000.0)
        for i in range(20):
            pair.transport.write(b"%d " % i)
        await asyncio.sleep(5)
        assert len(pair.server.received) < 50
        await asyncio.sleep(2000)
        assert pair.server.received == b"".join(b"%d " % i for i in range(20))

    run_in_world(check)


def test_only_kv_is_damaged_and_the_damage_is_counted():
    async def check(pair):
        network = pair.loop.network
        network.damage = KvDamage(corrupted=1.0)
        pair.transport.write(bytes(1000))
        pair.transport.carries_kv = True
        pair.transport.write(bytes(1000))
        await asyncio.sleep(5)
        assert len(pair.server.received) == 2000 and pair.server.received[:1000] == bytes(1000)
        assert sum(byte != 0 for byte in pair.server.received) == network.damage_counts["KV corrupted"] > 0

    run_in_world(check)


def test_kv_that_is_cut_short_ends_with_its_connection():
    async def check(pair):
        pair.loop.network.damage = KvDamage(cut_short=1.0)
        pair.transport.carries_kv = True
        pair.transport.write(bytes(1000))
        await asyncio.sleep(5)
        assert len(pair.server.received) < 1000 and pair.server.lost == [None]

    run_in_world(check)


def test_waiting_for_an_event_that_never_happens_is_noticed():
    with world() as loop, pytest.raises(SimulationHung, match="no timer is left"):
        loop.run_until_complete(loop.create_future())


def test_a_loop_that_spins_is_noticed():
    async def spin():
        while True:
            await asyncio.sleep(0)

    with world() as loop, pytest.raises(SimulationHung, match="spins"):
        loop.run_until_complete(spin())
