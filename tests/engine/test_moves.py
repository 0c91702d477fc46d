"""Streams that lose their engine repeatedly, and an update that is answered too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.engine.client import TokenStream
from headgate.engine.moving_stream import MOST_MOVES, MovingStream
from headgate.engine.replicas import Replicas
from headgate.engine.start import EngineStart
from headgate.errors import EngineDead, HeadgateError
from headgate.protocol.command import EngineState, FileSource, Result, Resume, UpdateWeights
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Ended, Timings
from headgate.protocol.request import GenerateRequest

INFO = EngineInfo(100, 1000, (), 32, 4, 4, "fake", "fake", "none")


class DyingEngine:
    """An engine that fails during its n-th stream, after `token_counts[n]` tokens."""

    open_streams = 0
    lost = None
    info = INFO

    def __init__(self, token_counts: list[int]) -> None:
        self.token_counts = token_counts
        self.requests: list[GenerateRequest] = []

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
        stream = TokenStream(len(self.requests) + 1)
        self.requests.append(request)
        for token in range(self.token_counts.pop(0)):
            stream.add_token(token, 0, None)
        stream.fail(EngineDead("died"))
        yield stream

    def lose(self, error: EngineDead) -> None: ...


def replicas_over(engine: object) -> Replicas:
    replicas = Replicas(EngineStart("", "", EngineConfig()), 1, 0, Path("/nowhere"))
    replicas.replicas[0].client = engine  # type: ignore[assignment]
    return replicas


async def read(replicas: Replicas, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async with replicas.generate(request) as chunks:
        with pytest.raises(EngineDead, match="3 engines were lost in a row"):  # noqa: PT012 (what came before counts)
            async for chunk in chunks:
                tokens += chunk.tokens
    return tokens


def test_a_request_that_crashes_its_engines_is_not_retried_on_the_whole_fleet():
    engine = DyingEngine([0] * 10)
    assert asyncio.run(read(replicas_over(engine), GenerateRequest(0, (1,)))) == []
    assert len(engine.requests) == MOST_MOVES + 1


def test_a_stream_that_makes_progress_may_move_any_number_of_times():
    engine = DyingEngine([1, 1, 1, 1, 1, 0, 0, 0])
    assert len(asyncio.run(read(replicas_over(engine), GenerateRequest(0, (1,))))) == 5
    assert engine.requests[5].generated == (0,) * 5


def test_a_moved_stream_has_only_the_rest_of_its_timeout():
    engine = DyingEngine([1, 1, 0, 0, 0])
    asyncio.run(read(replicas_over(engine), GenerateRequest(0, (1,), timeout_s=600.0)))
    times = [request.timeout_s for request in engine.requests]
    assert times == sorted(times, reverse=True) and 0 < times[-1] < 600


def test_a_prompt_whose_engine_is_lost_before_its_vector_is_repeated_on_another():
    class Pooling(DyingEngine):
        @asynccontextmanager
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
            async with super().generate(request) as stream:
                if len(self.requests) == 2:
                    stream = TokenStream(2)
                    stream.add_vector(b"vector")
                    stream.finish(Ended(2, "length", "max_tokens", 1, 0, 0, Timings(0, 0, None, 0)))
                yield stream

    async def main() -> list[bytes | None]:
        async with replicas_over(engine).generate(asked) as chunks:
            return [chunk.vector async for chunk in chunks]

    engine, asked = Pooling([0, 0]), GenerateRequest(0, (1,), SamplingParams(max_tokens=0), pooling="mean")
    assert asyncio.run(main()) == [b"vector"]
    assert engine.requests == [asked, asked]


def test_engine_info_is_known_while_no_engine_is_connected():
    async def main() -> None:
        replicas, engine, started = replicas_over(None), DyingEngine([]), asyncio.Future[None]()
        with pytest.raises(EngineDead, match="no engine is ready yet"):
            assert replicas.info
        offer = asyncio.create_task(replicas._offer(replicas.replicas[0], engine, started))  # type: ignore[arg-type]
        await started
        assert replicas.info is INFO
        offer.cancel()
        await asyncio.wait([offer])
        assert replicas.replicas[0].client is None and replicas.info is INFO

    asyncio.run(main())


class LateEngine:
    """An engine that carries out an update, but answers only after the caller's timeout."""

    open_streams = 0
    lost = None

    def __init__(self) -> None:
        self.version = 0

    async def call(self, command: object, timeout_s: float) -> Result | HeadgateError:
        if isinstance(command, UpdateWeights):
            assert command.version is not None and command.version > self.version, "stale version"
            self.version = command.version
            raise TimeoutError
        return EngineState("running", version=self.version)


def test_an_update_whose_success_is_reported_too_late_does_not_take_the_fleet_out_of_service():
    async def main() -> None:
        replicas = replicas_over(LateEngine())
        for _ in range(2):
            await replicas.call_all(UpdateWeights(FileSource("path")))
            await replicas.call_all(Resume())
            assert replicas.replicas[0].state == "ready"

    asyncio.run(main())


def test_20_a_stream_may_be_aborted_when_its_wait_for_an_engine_times_out():
    """A pause at that moment was answered with 500. Found by seed 148919683."""

    async def wait_and_end() -> list[str]:
        answer, causes = MovingStream(GenerateRequest(0, (1,)), replicas_over(None)._choose), []

        def end() -> None:
            answer.end("pause")
            causes.append(answer.cause)

        with pytest.raises(TimeoutError):  # noqa: PT012 (what follows must not run)
            async with asyncio.timeout(0) as answer.wait:
                asyncio.get_running_loop().call_soon(end)  # the timeout has expired, but its task has not run yet
                await asyncio.sleep(60)
        return causes

    assert asyncio.run(wait_and_end()) == ["pause"]
