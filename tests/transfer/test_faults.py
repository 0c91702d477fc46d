"""Whatever happens to P, to D or between them, the client gets the same tokens and both release everything."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import pytest
from msgspec.structs import replace

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.protocol.command import FileSource, Pause, Resume, UpdateWeights
from headgate.protocol.request import GenerateRequest, Ticket
from tests.transfer.engines import DEADLINE_S, Export, Pair, Side, config, export
from tests.transfer.peers import TRANSPORTS, proxy

# Takes minutes; faults through the router are in tests/router/test_disagg.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S, WAIT_S = 4.0, 6.0  # longer than a busy machine delays a thread
SLOW = config(backend="torch", max_batch_tokens=16, lease_s=LEASE_S, kv_wait_s=WAIT_S)
SPARED = {"tcp": 50_000, "nixl": 100}  # bytes of a connection that pass in any case before the fault
PROMPT_TOKENS, BLOCKS = 400, 24  # whole blocks of 16, and one token more at least
SAMPLING = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
numbers = count()


def slow(transport: str) -> EngineConfig:
    return dataclasses.replace(SLOW, kv_transport=transport)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(model, request) -> Iterator[Pair]:
    settings = slow(request.param)
    pair = Pair(model, settings, settings)
    yield pair
    pair.close()


def fresh_request() -> GenerateRequest:
    rng = random.Random(next(numbers))
    return GenerateRequest(0, tuple(rng.randrange(256) for _ in range(PROMPT_TOKENS)), SAMPLING)


async def expected(side: Side, request: GenerateRequest) -> list[int]:
    """Return the answer of a single engine, with a salt, so that `request` does not find its KV in the cache."""
    return (await side.answer(replace(request, salt="alone")))[0]


@asynccontextmanager
async def half_computed(p: Side, request: GenerateRequest) -> AsyncIterator[tuple[Export, Ticket]]:
    """Yield an export whose ticket P has issued; P is frozen before the prompt is computed."""
    async with p.exporting(export(request.prompt)) as exported:
        ticket = await exported.ticket()
        await p.client.call(Pause("freeze"))
        assert ticket is not None
        try:
            yield exported, ticket
        finally:
            if p.replicas.replicas[0].client is not None:
                await p.client.call(Resume())


@asynccontextmanager
async def fetching(d: Side, request: GenerateRequest, ticket: Ticket) -> AsyncIterator[asyncio.Task[list[int]]]:
    """Yield the task of a request for which D waits for KV that does not arrive."""

    async def answer() -> list[int]:
        return (await d.answer(replace(request, ticket=ticket)))[0]

    task = asyncio.create_task(answer())
    async with asyncio.timeout(DEADLINE_S):
        while (await d.status()).held_blocks < BLOCKS:
            await asyncio.sleep(0.005)
    try:
        yield task
    finally:
        await task


def test_blocks_arrive_while_p_still_computes_and_the_rest_when_it_continues(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(p, request)
        async with half_computed(p, request) as (exported, ticket), fetching(d, request, ticket) as answer:
            assert (await p.status()).leased_blocks == BLOCKS and not answer.done()
            before = await d.status()
            assert before.held_blocks >= BLOCKS, "30: what is reserved counts as used"
            await p.client.call(Resume())
            assert await answer == right and (await exported.end()).cause == "exported"
            assert (await d.status()).transfers == before.transfers + 1

    pair.run(work)


def test_32_38_an_aborted_export_is_reported_to_d_at_once(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(p, request)
        async with half_computed(p, request) as (_, ticket), fetching(d, request, ticket) as answer:
            began_s, before = time.monotonic(), await d.status()
            [id] = p.client._streams
            p.client.abort(id, "api_abort")
            async with asyncio.timeout(DEADLINE_S):
                while (await d.status()).transfers_lost == before.transfers_lost:
                    await asyncio.sleep(0.005)
            assert time.monotonic() - began_s < WAIT_S * 0.8
            assert await answer == right
            assert (await d.status()).moved.failures["withdrawn"] >= 1

    pair.run(work)


def test_37_d_waits_for_a_silent_p_only_until_its_timeout(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(p, request)
        async with half_computed(p, request) as (exported, ticket):
            async with fetching(d, request, ticket) as answer:
                assert await answer == right
            assert (await d.status()).moved.failures["timeout"] >= 1
            ended = await exported.end()
            assert (ended.finish_reason, ended.cause) == ("abort", "transfer_failed")
            await p.until_released()  # although it is still frozen

    pair.run(work)


def test_38_an_answer_aborted_during_its_transfer_leaks_nothing_on_either_side(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        async with half_computed(p, request) as (exported, ticket), fetching(d, request, ticket) as answer:
            [id] = d.client._streams
            d.client.abort(id, "api_abort")
            assert await answer == []
            assert (await exported.end()).cause == "transfer_failed"
            await d.until_released()

    pair.run(work)


def test_37_kv_that_is_not_fetched_is_kept_only_until_its_lease_expires(pair):
    async def work(p: Side, d: Side) -> None:
        began_s = time.monotonic()
        async with p.exporting(export(fresh_request().prompt)) as exported:
            assert await exported.ticket()
            ended = await exported.end()
        assert ended.cause == "transfer_failed" and LEASE_S * 0.9 < time.monotonic() - began_s < LEASE_S + 20

    pair.run(work)


def test_23_a_pause_that_aborts_leaves_no_lease(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(d, request)
        async with p.exporting(export(request.prompt)) as exported:
            ticket = await exported.ticket()
            state = await p.client.call(Pause("abort"))
            status = await p.status()
            assert state.state == "paused" and (status.leases, status.held_blocks) == (0, 0)
            assert (await exported.end()).cause == "pause"
            assert (await d.answer(replace(request, ticket=ticket)))[0] == right
            await p.client.call(Resume())

    pair.run(work)


def test_28_a_lease_outlives_its_time_while_d_has_no_room_or_is_paused(pair):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(p, request)
        async with p.exporting(export(request.prompt)) as exported:
            ticket = await exported.ticket()
            await d.client.call(Pause("freeze", queue=True))
            answer = asyncio.create_task(d.answer(replace(request, ticket=ticket)))
            await asyncio.sleep(LEASE_S * 2)
            assert (await p.status()).leases == 1
            before = (await d.status()).transfers
            await d.client.call(Resume())
            assert (await answer)[0] == right and (await exported.end()).cause == "exported"
            assert (await d.status()).transfers == before + 1

    pair.run(work)


def test_39_new_weights_on_p_end_its_exports(pair, model):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(d, request)
        async with half_computed(p, request) as (exported, ticket):
            await p.client.call(UpdateWeights(FileSource(str(model)), recompute=False))
            assert (await exported.end()).cause == "weights"
        assert (await d.answer(replace(request, ticket=ticket)))[0] == right
        # The same weights with another version: D must reject a ticket for them.
        again = fresh_request()
        right, lost = await expected(d, again), (await d.status()).transfers
        async with p.exporting(export(again.prompt)) as exported:
            ticket = await exported.ticket()
            assert ticket is not None and ticket.version == 1
            assert (await d.answer(replace(again, ticket=ticket)))[0] == right
        assert (await d.status()).transfers == lost

    other = Pair(model, SLOW, SLOW)
    try:
        other.run(work)
    finally:
        other.close()


@pytest.mark.parametrize("harm", ["cut", "damage", "delay"])
def test_39_a_damaged_connection_never_causes_a_wrong_token(pair, harm):
    def mangle(data: bytes, offset: int) -> bytes | None:
        if harm == "delay":
            time.sleep(0.05)
            return data
        if offset + len(data) < SPARED[pair.transport]:
            return data
        return None if harm == "cut" else bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1])

    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right, before = await expected(p, request), (await d.status()).transfers
        async with p.exporting(export(request.prompt)) as exported:
            ticket = await exported.ticket()
            assert ticket is not None
            with proxy(ticket.engine, mangle) as address:
                answer, _ = await d.answer(replace(request, ticket=replace(ticket, engine=address)))
            assert answer == right
            assert (await exported.end()).cause == ("exported" if harm == "delay" else "transfer_failed")
        assert (await d.status()).transfers - before == (harm == "delay")

    pair.run(work)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_37_a_killed_p_costs_d_only_the_prefill(model, transport):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        right = await expected(p, request)
        exporting = p.exporting(export(request.prompt))
        exported = await exporting.__aenter__()
        ticket = await exported.ticket()
        assert ticket is not None
        await p.client.call(Pause("freeze"))
        async with fetching(d, request, ticket) as answer:
            began_s, pid = time.monotonic(), p.pid
            os.kill(pid, signal.SIGKILL)
            assert await answer == right
            assert time.monotonic() - began_s < WAIT_S + 20
        await exporting.__aexit__(None, None, None)
        await d.until_released()
        await until_back(p, pid)
        # The restarted engine rejects a ticket of its previous process.
        assert (await d.answer(replace(request, salt="later", ticket=ticket)))[0] == right

    killed = Pair(model, slow(transport), slow(transport))
    try:
        killed.run(work)
    finally:
        killed.close()


async def until_back(side: Side, killed: int) -> None:
    """Wait until an engine is up again. Its death may not have been detected yet."""
    async with asyncio.timeout(DEADLINE_S):
        while (replica := side.replicas.replicas[0]).state != "ready" or replica.pid == killed:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_37_p_gets_everything_back_when_d_dies_or_hangs(model, harm, transport):
    async def work(p: Side, d: Side) -> None:
        request = fresh_request()
        async with half_computed(p, request) as (exported, ticket):

            async def ask() -> None:
                async with d.client.generate(replace(request, ticket=ticket)) as stream:
                    async for _ in stream:
                        pass

            asked, pid = asyncio.create_task(ask()), d.pid
            async with asyncio.timeout(DEADLINE_S):
                while (await d.status()).held_blocks < BLOCKS:
                    await asyncio.sleep(0.005)
            began_s = time.monotonic()
            os.kill(pid, harm)
            ended = await exported.end()
            assert ended.cause == "transfer_failed"
            took_s = time.monotonic() - began_s
            assert took_s < (LEASE_S * 0.5 if harm == signal.SIGKILL else LEASE_S + 20)
            await p.until_released()
            with suppress(ProcessLookupError):  # a hanging process must be killed
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait([asked], timeout=DEADLINE_S)
            asked.exception()
        await until_back(d, pid)

    patient = dataclasses.replace(slow(transport), kv_wait_s=60.0)
    killed = Pair(model, slow(transport), patient)
    try:
        killed.run(work)
    finally:
        killed.close()
