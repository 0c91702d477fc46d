"""KV from another engine brings the experts that were chosen for its tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headgate.contract.sampling import SamplingParams
from headgate.engine.routed import RoutedTokens
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.transfer.engines import Side, config, export, two_engines

PROMPT = tuple(range(40, 77))
ASKED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, return_routed_experts=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", tokenizer=False)


async def experts(side: Side, request: GenerateRequest) -> np.ndarray:
    shape = side.client.info.routed
    assert shape is not None
    routed, count = RoutedTokens(shape, 0), len(request.prompt)
    async with asyncio.timeout(60), side.client.generate(request) as stream:
        async for chunk in stream:
            routed.add(chunk.routed)
            count += len(chunk.tokens)
    complete = routed.of_answer(count)
    assert complete is not None and count == len(request.prompt) + 8
    return complete.array()


async def by_way_of(p: Side, d: Side, request: GenerateRequest) -> np.ndarray:
    async with p.exporting(export(request.prompt)) as exported:
        ticket = await exported.ticket()
        found = await experts(d, replace(request, ticket=ticket))
        await exported.end()
    return found


def test_the_engine_that_fetched_a_prompt_returns_its_experts(mixture):
    async def main() -> None:
        keeping = config(backend="torch", routed_experts=True)
        async with two_engines(mixture, keeping, keeping) as (p, d):
            request = GenerateRequest(0, PROMPT, ASKED, salt="alone")
            expected = await experts(p, request)
            np.testing.assert_array_equal(await by_way_of(p, d, replace(request, salt="")), expected)
            status = await d.until_released()
            await p.until_released()
            assert (status.transfers, status.transfers_lost) == (1, 0)

    asyncio.run(main())


def test_a_prompt_whose_experts_the_other_engine_does_not_keep_is_computed_again(mixture):
    async def main() -> None:
        without, keeping = config(backend="torch"), config(backend="torch", routed_experts=True)
        async with two_engines(mixture, without, keeping) as (p, d):
            request = GenerateRequest(0, PROMPT, ASKED, salt="alone")
            expected = await experts(d, request)
            async with p.exporting(export(PROMPT)) as exported:
                ticket = await exported.ticket()
                found = await experts(d, replace(request, salt="", ticket=ticket))
            np.testing.assert_array_equal(found, expected)
            status = await d.until_released()
            await p.until_released()
            assert (status.transfers, status.transfers_lost) == (0, 1)

    asyncio.run(main())
