"""Real engine processes on a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headgate.config import EngineConfig
from headgate.engine.replicas import Replicas, started
from headgate.errors import EngineDead
from headgate.protocol.request import GenerateRequest, SamplingParams
from headgate.testing.tiny import tiny_model

CONFIG = EngineConfig(max_running=8, max_context=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


async def collect(replicas: Replicas, seed: int, count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, seed=seed, ignore_eos=True)
    async with replicas.generate(GenerateRequest(0, (1, 2, 3, seed), params)) as chunks:
        return [token async for chunk in chunks for token in chunk.tokens]


def test_streams_go_on_when_their_engine_is_killed_and_it_comes_back(folder):
    async def main() -> None:
        async with asyncio.timeout(60), started(folder, CONFIG, count=2) as replicas:
            undisturbed = await asyncio.gather(*(collect(replicas, seed, 450) for seed in range(8)))
            first = replicas.replicas[0]
            killed = first.pid
            running = asyncio.gather(*(collect(replicas, seed, 450) for seed in range(8)))
            async with asyncio.timeout(10):
                while first.client is None or first.client.open_streams < 4:
                    await asyncio.sleep(0)
            os.kill(killed, signal.SIGKILL)
            assert await running == undisturbed
            async with asyncio.timeout(30):
                while first.state != "ready":
                    await asyncio.sleep(0.02)
            assert first.restarts == 1 and first.pid != killed
            assert await collect(replicas, 0, 450) == undisturbed[0]

    asyncio.run(main())


def test_an_engine_that_cannot_start_is_an_error_with_a_reason(tmp_path, capfd):
    async def main() -> None:
        async with asyncio.timeout(60), started(tmp_path, CONFIG):
            raise AssertionError("started without a model")

    with pytest.raises(EngineDead, match="could not start; its reason is above"):
        asyncio.run(main())
    assert "has no config.json" in capfd.readouterr().err


def test_leaving_ends_the_engine_processes(folder):
    async def main() -> int:
        async with asyncio.timeout(60), started(folder, CONFIG) as replicas:
            pid = replicas.replicas[0].pid
            assert pid is not None and Path(f"/proc/{pid}").exists()
            return pid

    assert not Path(f"/proc/{asyncio.run(main())}").exists()
