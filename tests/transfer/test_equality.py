"""D's answers with KV computed by P equal those of a single engine, token for token."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.models import read_spec
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from tests.transfer.engines import Side, config, export, two_engines
from tests.transfer.peers import TRANSPORTS

BLOCK = 16


def some_prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of lengths around block boundaries and beyond one step's budget; some share a prefix."""
    shared = tuple(rng.randrange(256) for _ in range(96))
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 160, 200]
    prompts = []
    for i in range(count):
        tail = tuple(rng.randrange(256) for _ in range(rng.choice(lengths)))
        prompts.append(shared[: rng.choice([0, 16, 40, 96])] + tail if i % 2 else tail)
    return prompts


async def by_way_of(p: Side, d: Side, request: GenerateRequest) -> list[int]:
    """Return the answer of D to `request`; D starts while P still computes the prompt."""
    async with p.exporting(export(request.prompt, generated=request.generated, salt=request.salt)) as exported:
        ticket = await exported.ticket()
        tokens, _ = await d.answer(replace(request, ticket=ticket))
        ended = await exported.end()
    assert ended.output_tokens == len(request.generated)
    return tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_36_kv_from_another_engine_gives_the_same_tokens(model, backend, transport):
    expect_the_same_tokens(model, backend, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_36_kv_of_layers_with_windows_gives_the_same_tokens(tmp_path, transport):
    windows = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "num_hidden_layers": 2}
    model = tiny_model(tmp_path, "qwen3", tokenizer=False, **windows)
    assert read_spec(model).kv_layout.windows == (None, 40)
    expect_the_same_tokens(model, "cpu", transport)


def expect_the_same_tokens(model: Path, backend: str, transport: str) -> None:
    rng = random.Random(7)
    prompts = some_prompts(rng, 40)

    async def main() -> None:
        settings = config(backend=backend, kv_transport=transport)
        async with two_engines(model, settings, settings) as (p, d):
            for i, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=8, temperature=i % 2, seed=i, ignore_eos=True)
                request = GenerateRequest(0, prompt, sampling, salt=f"alone {i}")
                expected, _ = await p.answer(request)
                resumed = GenerateRequest(0, prompt, sampling, generated=tuple(expected[: i % 8]))
                assert await by_way_of(p, d, resumed) == expected[i % 8 :], f"prompt {i}"
            status = await d.until_released()
            await p.until_released()
            assert status.transfers > 20 and status.transfers_lost == 0 and not status.moved.failures

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_36_37_many_requests_in_a_small_cache_get_the_same_tokens_and_leak_nothing(model, transport):
    """The cache is so small that exports wait, or expire and free their blocks. Some answers are aborted, and some
    clients disconnect. Every answer that completes is correct."""
    rng = random.Random(11)
    prompts = some_prompts(rng, 48)

    def crowded(patience_s: float) -> EngineConfig:
        return config(
            backend="torch",
            kv_blocks=40,
            max_batch_tokens=48,
            lease_s=patience_s,
            export_wait_s=patience_s,
            kv_transport=transport,
        )

    async def one(p: Side, d: Side, i: int, expected: list[int]) -> None:
        request = GenerateRequest(0, prompts[i], greedy)
        async with p.exporting(export(request.prompt)) as exported:
            ticket = await exported.ticket()
            if i % 5 == 0:
                return  # the reader leaves, which releases the KV
            asked = asyncio.create_task(d.answer(replace(request, ticket=ticket)))
            if i % 7 == 0:
                await asyncio.sleep(rng.random() * 0.05)
                asked.cancel()
                return
            assert (await asked)[0] == expected, f"prompt {i}"

    async def main(config: EngineConfig) -> bool:
        async with two_engines(model, config, config) as (p, d):
            answers = await asyncio.gather(*(d.answer(GenerateRequest(0, x, greedy, salt="alone")) for x in prompts))
            await asyncio.gather(*(one(p, d, i, tokens) for i, (tokens, _) in enumerate(answers)))
            status = await d.until_released()
            await p.until_released()
            return status.transfers > 5

    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    # If the machine does not run an engine for that long, all leases expire; the next attempt uses longer ones.
    assert any(asyncio.run(main(crowded(patience_s))) for patience_s in (2.0, 8.0, 30.0))
