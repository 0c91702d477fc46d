"""KV of a GPU by way of pinned memory."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from headgate.protocol.request import GenerateRequest, SamplingParams
from headgate.worker.blocks import DeviceBlocks, HostBlocks
from tests.transfer.engines import config, two_engines
from tests.transfer.test_equality import by_way_of, some_prompts
from tests.transfer.test_tcp import checksum

pytestmark = pytest.mark.gpu


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randn(20, 4, 16, 8, dtype=torch.bfloat16) for _ in range(6)]


def test_what_a_gpu_lends_is_what_the_host_would_and_can_be_stored_elsewhere(tensors):
    host = HostBlocks(tensors, "same")
    device = DeviceBlocks([tensor.cuda() for tensor in tensors], "same")
    other = [torch.zeros_like(tensor, device="cuda") for tensor in tensors]
    store = DeviceBlocks(other, "same")
    theirs, ours = (3, 4, 19, 0), (7, 1, 2, 12)
    assert host.block_bytes == device.block_bytes
    assert checksum(device.lend(theirs)) == checksum(host.lend(theirs))
    for portion, lent in zip(store.room(ours), device.lend(theirs), strict=True):
        for place, words in zip(portion, lent, strict=True):
            place[:] = words
    for tensor, stored in zip(tensors, other, strict=True):
        assert torch.equal(stored[list(ours)].cpu(), tensor[list(theirs)])
        untouched = [i for i in range(20) if i not in ours]
        assert not stored[untouched].any()


def test_36_kv_from_another_gpu_engine_gives_the_same_tokens(model):
    prompts = some_prompts(random.Random(3), 20)

    async def main() -> None:
        settings = config(device="cuda", memory_fraction=0.1)
        async with two_engines(model, settings, settings) as (p, d):
            for i, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=8, temperature=i % 2, seed=i, ignore_eos=True)
                expected, _ = await p.answer(GenerateRequest(0, prompt, sampling, salt=f"alone {i}"))
                assert await by_way_of(p, d, GenerateRequest(0, prompt, sampling)) == expected, f"prompt {i}"
            status = await d.until_home()
            assert status.transfers > 5 and status.transfers_lost == 0

    asyncio.run(main())
