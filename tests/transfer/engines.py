"""Two engine processes: P computes prompts for D."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.engine.client import EngineClient
from headgate.engine.replicas import Replicas, started
from headgate.protocol.message import EngineStatus
from headgate.protocol.output import Ended
from headgate.protocol.request import GenerateRequest, Ticket

DEADLINE_S = 60.0
CONFIG = EngineConfig(device="cpu", dtype="float32", kv_blocks=64, block_size=16, max_running=8, max_batch_tokens=64)


def config(**changes: Any) -> EngineConfig:
    return replace(CONFIG, **changes)


@dataclass
class Side:
    replicas: Replicas
    index: int = 0

    @property
    def client(self) -> EngineClient:
        client = self.replicas.replicas[self.index].client
        assert client is not None
        return client

    @property
    def pid(self) -> int:
        pid = self.replicas.replicas[self.index].pid
        assert pid is not None
        return pid

    async def status(self) -> EngineStatus:
        return (await self.client.ping(60.0)).status

    async def answer(self, request: GenerateRequest) -> tuple[list[int], Ended]:
        tokens: list[int] = []
        async with asyncio.timeout(DEADLINE_S), self.client.generate(request) as stream:
            async for chunk in stream:
                tokens += chunk.tokens
                if chunk.ended is not None:
                    return tokens, chunk.ended
        raise AssertionError("no terminal output")

    @asynccontextmanager
    async def exporting(self, request: GenerateRequest) -> AsyncIterator[Export]:
        async with self.client.generate(request) as stream:
            yield Export(stream.__aiter__())

    async def until_released(self) -> EngineStatus:
        """Wait until the engine has released everything; returns its status."""
        async with asyncio.timeout(DEADLINE_S):
            while (status := await self.status()).held_blocks or status.leases or status.running or status.waiting:
                await asyncio.sleep(0.01)
        return status


class Export:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ended: Ended | None = None

    async def ticket(self) -> Ticket | None:
        async with asyncio.timeout(DEADLINE_S):
            chunk = await anext(self._stream)
        self._ended = chunk.ended
        assert not chunk.tokens
        return chunk.ticket

    async def end(self) -> Ended:
        async with asyncio.timeout(DEADLINE_S):
            while self._ended is None:
                chunk = await anext(self._stream)
                assert not chunk.tokens, "an export samples nothing"
                self._ended = chunk.ended
        return self._ended


def export(prompt: tuple[int, ...], **fields: Any) -> GenerateRequest:
    return GenerateRequest(0, prompt, SamplingParams(max_tokens=1), export_kv=True, **fields)


@asynccontextmanager
async def two_engines(
    model: Path, p: EngineConfig = CONFIG, d: EngineConfig = CONFIG
) -> AsyncIterator[tuple[Side, Side]]:
    async with started(model, p, client=1) as first, started(model, d, client=2) as second:
        yield Side(first), Side(second)


class Pair:
    """Two engines in a separate event loop, shared by several tests."""

    def __init__(self, model: Path, p: EngineConfig = CONFIG, d: EngineConfig = CONFIG) -> None:
        self.transport = p.kv_transport
        self._known, self._stop = threading.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, args=(model, p, d))
        self._thread.start()
        assert self._known.wait(60)
        if self._failure is not None:
            raise self._failure

    def _main(self, model: Path, p: EngineConfig, d: EngineConfig) -> None:
        async def serve() -> None:
            async with two_engines(model, p, d) as (self.p, self.d):
                self.loop = asyncio.get_running_loop()
                self._known.set()
                await self._stop.wait()

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._failure = error
            self._known.set()

    def run(self, work: Callable[[Side, Side], Coroutine[Any, Any, None]]) -> None:
        """Run `work` with P and D; both must have released everything afterwards."""

        async def whole() -> None:
            await work(self.p, self.d)
            await self.p.until_released()
            await self.d.until_released()

        asyncio.run_coroutine_threadsafe(whole(), self.loop).result(DEADLINE_S * 4)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
