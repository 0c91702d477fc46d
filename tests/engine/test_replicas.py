"""Tests with real engine processes on a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.device.weights.loading import SafetensorsFolder
from headgate.engine.replicas import Replica, Replicas, started
from headgate.errors import EngineDead, RequestError
from headgate.protocol.command import (
    BroadcastSource,
    EngineState,
    FileSource,
    ListSequences,
    Pause,
    Resume,
    SequenceList,
    Source,
    UpdateWeights,
)
from headgate.protocol.request import GenerateRequest
from headgate.testing.tiny import tiny_model
from headgate.weights import publish

CONFIG = EngineConfig(max_running=8, max_context=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


async def collect(replicas: Replicas, seed: int, count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, seed=seed, ignore_eos=True)
    async with replicas.generate(GenerateRequest(0, (1, 2, 3, seed), params)) as chunks:
        return [token async for chunk in chunks for token in chunk.tokens]


def test_streams_continue_when_their_engine_is_killed_and_restarts(folder):
    async def main() -> None:
        async with asyncio.timeout(250), started(folder, CONFIG, count=2) as replicas:
            undisturbed = await asyncio.gather(*(collect(replicas, seed, 450) for seed in range(8)))
            first = replicas.replicas[0]
            killed = first.pid
            running = asyncio.gather(*(collect(replicas, seed, 450) for seed in range(8)))
            async with asyncio.timeout(60):
                while first.client is None or first.client.open_streams < 4:
                    await asyncio.sleep(0)
            os.kill(killed, signal.SIGKILL)
            assert await running == undisturbed
            async with asyncio.timeout(60):
                while first.state != "ready":
                    await asyncio.sleep(0.02)
            assert first.restarts == 1 and first.pid != killed
            assert await collect(replicas, 0, 450) == undisturbed[0]

    asyncio.run(main())


async def until(replica: Replica, state: str) -> None:
    async with asyncio.timeout(60):
        while replica.state != state:
            await asyncio.sleep(0.02)


async def kill(replica: Replica) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)
    await until(replica, "down")


async def update(replicas: Replicas, source: Source) -> list[str]:
    """Pause, update and resume; returns the engines' states."""
    await replicas.call_all(Pause("abort"))
    answers = await replicas.call_all(UpdateWeights(source))
    await replicas.call_all(Resume())
    assert all(isinstance(each, EngineState) for each in answers.values()), answers
    return [replica.state for replica in replicas.replicas]


def test_55_a_restarted_engine_has_the_weights_of_the_fleet_or_gets_no_streams(folder, tmp_path, caplog):
    new = tiny_model(tmp_path / "new", seed=1)

    async def main() -> None:
        async with asyncio.timeout(250), started(folder, CONFIG, count=2) as replicas:
            first, second = replicas.replicas
            old = await collect(replicas, 0, 20)
            assert await update(replicas, FileSource(str(new))) == ["ready", "ready"]
            fresh = await collect(replicas, 0, 20)
            assert fresh != old

            await replicas.call_all(Pause("abort"))
            await kill(first)
            await until(first, "ready")  # started from the same files
            assert first.client is not None
            status = (await first.client.ping(60)).status
            assert (status.version, status.state) == (1, "paused")
            await replicas.call_all(Resume())
            await kill(second)
            assert await collect(replicas, 0, 20) == fresh
            await until(second, "ready")

            with publish(dict(SafetensorsFolder(folder))) as files:
                assert await update(replicas, files) == ["ready", "ready"]
            assert await collect(replicas, 0, 20) == old
            await kill(first)
            await until(first, "outdated")  # the published files are gone
            assert first.client is not None and first.client.open_streams == 0
            running = asyncio.gather(*(collect(replicas, 0, 20) for _ in range(4)))
            assert await running == [old] * 4

            assert await update(replicas, FileSource(str(new))) == ["ready", "ready"]
            assert (await first.client.ping(60)).status.version == 3
            assert await collect(replicas, 0, 20) == fresh

    asyncio.run(main())
    assert caplog.text.count("engine 0 holds weights version 0 instead of 2") == 1


def test_18_24_a_restarted_engine_takes_the_state_last_requested_for_the_fleet(folder):
    """A pause that a resume cancelled is not remembered; a pause in progress counts."""

    async def main() -> None:
        async with asyncio.timeout(200), started(folder, CONFIG, count=2) as replicas:
            first, second = replicas.replicas
            running = asyncio.create_task(collect(replicas, 1, 450))
            while not first.client.open_streams + second.client.open_streams:
                await asyncio.sleep(0)
            pausing = asyncio.create_task(replicas.call_all(Pause("drain", timeout_s=100)))
            await asyncio.sleep(0)
            await replicas.call_all(Resume())
            await pausing
            await kill(first)
            await until(first, "ready")
            assert (await first.client.ping(60)).status.state == "running"
            assert len(await running) == 450

            await kill(first)
            stream = asyncio.create_task(collect(replicas, 1, 450))
            while not second.client.open_streams:
                await asyncio.sleep(0)
            os.kill(second.pid, signal.SIGSTOP)
            pausing = asyncio.create_task(replicas.call_all(Pause("drain", timeout_s=100)))
            await until(first, "ready")
            assert (await first.client.ping(60)).status.state == "paused"
            os.kill(second.pid, signal.SIGCONT)
            await pausing
            await replicas.call_all(Resume())
            assert len(await stream) == 450

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["freeze", "drain", "abort"])
def test_18_56_a_stream_that_loses_its_engine_during_a_pause_waits_or_ends_with_its_part(folder, mode):
    async def main() -> None:
        async with asyncio.timeout(200), started(folder, CONFIG, count=2) as replicas:
            undisturbed = await collect(replicas, 1, 450)
            stream = asyncio.create_task(collect(replicas, 1, 450))
            while not (lost := next((r for r in replicas.replicas if r.client and r.client.open_streams), None)):
                await asyncio.sleep(0)
            assert lost.pid is not None
            os.kill(lost.pid, signal.SIGSTOP)  # so that the pause finds it with running work
            other = next(replica for replica in replicas.replicas if replica is not lost)
            pausing = asyncio.create_task(replicas.call_all(Pause(mode, timeout_s=100)))
            while (await other.client.ping(60)).status.state != "paused":
                await asyncio.sleep(0.02)
            os.kill(lost.pid, signal.SIGKILL)
            await pausing
            if mode != "abort":
                await asyncio.sleep(0.1)
                assert not stream.done()
                await replicas.call_all(Resume())
            tokens = await stream
            assert tokens == (undisturbed[: len(tokens)] if mode == "abort" else undisturbed)

    asyncio.run(main())


def test_58_a_deadline_expires_while_there_is_no_engine(folder):
    async def main() -> None:
        async with asyncio.timeout(100), started(folder, CONFIG) as replicas:
            os.kill(replicas.replicas[0].pid, signal.SIGSTOP)
            replicas.replicas[0].client, client = None, replicas.replicas[0].client
            request = GenerateRequest(0, (1, 2), SamplingParams(max_tokens=9), timeout_s=0.05)
            async with replicas.generate(request) as stream:
                assert [chunk async for chunk in stream] == [] and stream.cause == "deadline"
            replicas.replicas[0].client = client
            os.kill(replicas.replicas[0].pid, signal.SIGCONT)

    asyncio.run(main())


def test_50_55_requests_do_not_wait_when_all_engines_lack_the_weights_of_the_fleet(folder):
    async def main() -> None:
        async with asyncio.timeout(100), started(folder, CONFIG) as replicas:
            replicas.replicas[0].outdated = True
            with pytest.raises(EngineDead, match="no engine holds the weights of the last update"):
                async with asyncio.timeout(20):
                    await collect(replicas, 1, 3)

    asyncio.run(main())


def test_an_engine_that_cannot_restart_does_not_affect_the_others(folder, monkeypatch, caplog):
    async def main() -> None:
        async with asyncio.timeout(100), started(folder, CONFIG, count=2) as replicas:
            monkeypatch.setattr("headgate.engine.replicas.START_TIMEOUT_S", 0.01)
            await kill(replicas.replicas[0])
            while "has not answered in 0.01 s" not in caplog.text:
                await asyncio.sleep(0.02)
            monkeypatch.setattr("headgate.engine.replicas.START_TIMEOUT_S", 100.0)
            monkeypatch.setattr("headgate.engine.child.sys.executable", "/nowhere/python")
            while "the engine process cannot be started" not in caplog.text:
                await asyncio.sleep(0.02)
            assert len(await collect(replicas, 1, 9)) == 9

    asyncio.run(main())


def test_43_an_engine_that_does_not_answer_is_named_and_delays_no_caller(folder):
    async def main() -> None:
        async with asyncio.timeout(250), started(folder, CONFIG, count=2) as replicas:
            first, second = replicas.replicas
            assert first.pid is not None
            os.kill(first.pid, signal.SIGSTOP)
            try:
                for timeout_s in (1.0, 5.0, 25.0):  # longer if the other process was not scheduled in that time
                    outcome = await replicas.call_all(Pause("abort"), timeout_s=timeout_s)
                    if isinstance(outcome[1], EngineState):
                        break
            finally:
                os.kill(first.pid, signal.SIGCONT)
            assert isinstance(outcome[0], EngineDead)
            assert f"engine 0 has not answered in {timeout_s:g} s" in str(outcome[0])
            assert isinstance(outcome[1], EngineState) and outcome[1].state == "paused"
            for _ in range(5):
                await kill(second)
                outcome = await replicas.call_all(ListSequences())
                if isinstance(outcome[1], EngineDead):
                    break  # and not yet restarted
                await until(second, "ready")
            assert isinstance(outcome[0], SequenceList) and isinstance(outcome[1], EngineDead)
            with pytest.raises(RequestError, match="the group is too small for all engines"):
                await replicas.call_all(UpdateWeights(BroadcastSource("tcp://localhost:1", 2)))

    asyncio.run(main())


def test_an_engine_that_cannot_start_is_an_error_with_a_reason(tmp_path, capfd):
    async def main() -> None:
        async with asyncio.timeout(250), started(tmp_path, CONFIG):
            raise AssertionError("started without a model")

    with pytest.raises(EngineDead, match="could not start; its log above has the reason"):
        asyncio.run(main())
    assert "has no config.json" in capfd.readouterr().err


def test_closing_replicas_ends_the_engine_processes(folder):
    async def main() -> int:
        async with asyncio.timeout(250), started(folder, CONFIG) as replicas:
            pid = replicas.replicas[0].pid
            assert pid is not None and Path(f"/proc/{pid}").exists()
            return pid

    assert not Path(f"/proc/{asyncio.run(main())}").exists()
