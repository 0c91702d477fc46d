"""KV of a GPU: copied within device memory between processes on one GPU, or through pinned memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from msgspec.structs import replace

from headgate.contract.sampling import SamplingParams
from headgate.device.kv_blocks import DeviceBlocks, HostBlocks
from headgate.device.same_gpu import SameGpuCache, same_gpu_cache
from headgate.protocol.request import GenerateRequest
from tests.transfer.engines import DEADLINE_S, Side, config, export, two_engines
from tests.transfer.peers import counted
from tests.transfer.test_equality import by_way_of, some_prompts
from tests.transfer.test_faults import until_back
from tests.transfer.test_tcp import checksum

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = config(device="cuda", deterministic=True)
BLOCKS, PARTS, PART = 20, 6, (4, 16, 8)
THEIRS, OURS = (3, 4, 19, 0), (7, 1, 2, 12)


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(BLOCKS, *PART, generator=generator).bfloat16() for _ in range(PARTS)]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return drawn()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocks_lent_by_a_gpu_equal_those_of_the_host_and_can_be_stored(tensors, dtype):
    tensors = [tensor.to(dtype) for tensor in tensors]
    host = HostBlocks(tensors, "same")
    device = DeviceBlocks([tensor.cuda() for tensor in tensors], "same")
    other = [torch.zeros_like(tensor, device="cuda") for tensor in tensors]
    store = DeviceBlocks(other, "same")
    assert host.block_bytes == device.block_bytes
    assert checksum(device.lend(THEIRS)) == checksum(host.lend(THEIRS))
    for portion, lent in zip(store.room(OURS), device.lend(THEIRS), strict=True):
        for place, words in zip(portion, lent, strict=True):
            place[:] = words
    assert_stored(tensors, other)


def assert_stored(tensors: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    untouched = [i for i in range(BLOCKS) if i not in OURS]
    for tensor, stored in zip(tensors, other, strict=True):
        right, found = tensor.view(torch.uint8), stored.cpu().view(torch.uint8)
        assert torch.equal(found[list(OURS)], right[list(THEIRS)])
        assert not found[untouched].any()


# -- two processes, one GPU -------------------------------------------------------------

# Prints the descriptor of its shelf with some blocks in slot 0, and refills the other slots until it ends.
OTHER_PROCESS = """
import sys, threading
from headgate.device.same_gpu import same_gpu_cache
from tests.transfer.test_gpu import THEIRS, drawn

cache = same_gpu_cache([tensor.cuda() for tensor in drawn()])
shelf = cache.shelf()
print(shelf.put(0, THEIRS).hex(), shelf.descriptor.hex(), flush=True)
asked = threading.Thread(target=sys.stdin.read)
asked.start()
while asked.is_alive():
    for slot in range(1, shelf.slots):
        shelf.put(slot, THEIRS)
"""


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], bytes, bytes]]:
    """A process on our GPU: the process, the checksum of its slot 0, and the descriptor of its shelf."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])},
    )
    try:
        assert process.stdout is not None
        digest, descriptor = map(bytes.fromhex, process.stdout.readline().split())
        yield process, digest, descriptor
    finally:
        process.kill()
        process.communicate()


def empty_cache() -> tuple[SameGpuCache, list[torch.Tensor]]:
    empty = [torch.zeros(BLOCKS, *PART, dtype=torch.bfloat16, device="cuda") for _ in range(PARTS)]
    cache = same_gpu_cache(empty)
    assert cache is not None
    return cache, empty


def test_blocks_that_another_process_puts_in_a_slot_are_read_in_place(tensors):
    with other_process() as (_, digest, descriptor):
        cache, empty = empty_cache()
        assert digest == checksum(HostBlocks(tensors, "same").lend(THEIRS))
        assert cache.open(descriptor).take(0, OURS) == digest
        assert_stored(tensors, empty)


def test_a_shelf_of_our_own_process_cannot_be_opened_and_nothing_breaks():
    """CUDA maps only the memory of other processes; such a fetch goes over the connection."""
    cache, _ = empty_cache()
    shelf = cache.shelf()
    assert shelf is not None
    with suppress(OSError):  # it may also work, which is fine
        assert len(cache.open(shelf.descriptor).take(0, (1,))) == 8
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_37_a_process_that_dies_while_its_memory_is_read_does_not_affect_the_reader(tensors):
    with other_process() as (process, digest, descriptor):
        cache, empty = empty_cache()
        opened = cache.open(descriptor)
        assert opened.take(0, OURS) == digest
        threading.Timer(0.3, process.kill).start()
        ended_s = time.monotonic() + 1.5
        while time.monotonic() < ended_s:  # before, during and after its death
            for slot in range(opened.slots):
                opened.take(slot, OURS)
            if opened.take(0, OURS) == digest:
                assert_stored(tensors, empty)
        assert process.wait(10) == -signal.SIGKILL
        del opened
        assert torch.ones(3, device="cuda").sum().item() == 3
    with other_process() as (_, digest, descriptor):
        assert cache.open(descriptor).take(0, OURS) == digest, "and the next one is read"


def test_handles_of_a_process_that_is_gone_are_refused_and_nothing_breaks():
    cache, _ = empty_cache()
    with other_process() as (_, _, descriptor):
        pass
    with pytest.raises(OSError, match=r"."):
        cache.open(descriptor)
    assert torch.ones(3, device="cuda").sum().item() == 3


# -- two engines, one GPU ---------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_36_kv_from_another_gpu_engine_gives_the_same_tokens(model, transport):
    """Requests are greedy and sampled. Some prompts share a prefix or were sent before, so both engines have hits."""
    prompts = some_prompts(random.Random(3), 40)

    async def main() -> None:
        settings = config(device="cuda", deterministic=True, kv_transport=transport)
        async with two_engines(model, settings, settings) as (p, d):
            for i, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=8, temperature=i % 2, seed=i, ignore_eos=True)
                expected, _ = await p.answer(GenerateRequest(0, prompt, sampling, salt=f"alone {i}"))
                request = GenerateRequest(0, prompt, sampling)
                if i % 4 == 3:
                    await (p, d)[i // 4 % 2].answer(request)
                assert await by_way_of(p, d, request) == expected, f"prompt {i}"
            status = await d.until_released()
            await p.until_released()
            assert status.transfers > 10 and status.transfers_lost == 0 and not status.moved.failures

    asyncio.run(main())


def long_request(number: int) -> GenerateRequest:
    rng = random.Random(number)
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return GenerateRequest(0, tuple(rng.randrange(256) for _ in range(400)), sampling)


@pytest.mark.parametrize(("p_way", "d_way", "beside"), [("auto", "auto", True), ("tcp", "auto", False)])
def test_engines_on_one_gpu_send_only_control_frames_over_the_connection(model, p_way, d_way, beside):
    async def main() -> None:
        settings = [config(device="cuda", deterministic=True, kv_transport=way) for way in (p_way, d_way)]
        async with two_engines(model, *settings) as (p, d):
            request = long_request(0)
            expected, _ = await p.answer(replace(request, salt="alone"))
            async with p.exporting(export(request.prompt)) as exported:
                ticket = await exported.ticket()
                assert ticket is not None
                with counted(ticket.engine) as (address, came):
                    tokens, _ = await d.answer(replace(request, ticket=replace(ticket, engine=address)))
                    assert tokens == expected and (await exported.end()).cause == "exported"
            moved = (await d.until_released()).moved
            assert moved.received_bytes > 100_000 and not moved.failures
            assert (sum(came) < moved.received_bytes / 10) is beside, f"{sum(came)} of {moved.received_bytes}"

    asyncio.run(main())


def test_37_a_p_killed_during_transfers_costs_d_only_the_prefill(model):
    async def crowd(p: Side, d: Side, requests: list[GenerateRequest]) -> list[list[int]]:
        """Return D's answers with KV from P, which may be killed meanwhile."""

        async def one(request: GenerateRequest) -> list[int]:
            try:
                async with asyncio.timeout(DEADLINE_S), p.exporting(export(request.prompt)) as exported:
                    ticket = await exported.ticket()
                    return (await d.answer(replace(request, ticket=ticket)))[0]
            except Exception:  # P is gone, and its stream with it; D gets the request again, without a ticket
                return (await d.answer(request))[0]

        return list(await asyncio.gather(*map(one, requests)))

    async def main() -> None:
        async with two_engines(model, GPU, GPU) as (p, d):
            for round in range(3):
                requests = [long_request(100 * round + i) for i in range(1, 9)]
                expected = [(await d.answer(replace(each, salt=f"alone {round}")))[0] for each in requests]
                pid, before = p.pid, (await d.status()).transfers
                answers = asyncio.create_task(crowd(p, d, requests))
                async with asyncio.timeout(DEADLINE_S):
                    while (await d.status()).transfers == before and not answers.done():
                        await asyncio.sleep(0)
                os.kill(pid, signal.SIGKILL)
                assert await answers == expected, f"round {round}"
                await d.until_released()
                await until_back(p, pid)

    asyncio.run(main())
