"""Several engines behind one method: started, watched, restarted; a stream whose engine dies goes on in another.

Each replica is in one of three states: *starting* (no client yet), *ready* (has a client), *down* (its process has
ended and will be started again after a pause). One task per replica owns its process and moves it between the states.

A stream knows its request and every token it has passed on. When its engine is lost and another is ready, it asks that
one for the same request plus the tokens; the reader notices nothing but the wait.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headgate.config import EngineConfig
from headgate.engine.client import Chunk, EngineClient, TokenStream, connected
from headgate.engine.start import CANNOT_START, EngineStart
from headgate.engine.tasks import lone_errors
from headgate.errors import CannotStart, EngineDead, HeadgateError
from headgate.logs import LogFormat
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest

log = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0  # large checkpoints on slow disks
STOP_TIMEOUT_S = 15.0
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # the last one repeats
MOVE_TIMEOUT_S = 30.0  # how long a stream waits for an engine to go on in


@dataclass(eq=False)
class Replica:
    index: int
    address: str
    client: EngineClient | None = None  # set while ready
    pid: int | None = None
    restarts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        return "ready" if self.client is not None else "starting" if not self.restarts else "down"


class MovingStream:
    """One answer, wherever it is being made. Leaving it early aborts it, under the name in `cause`."""

    def __init__(self) -> None:
        self.cause: Cause = "client_disconnect"
        self.ending = False
        self.chunks: AsyncGenerator[Chunk, None]
        self.at: tuple[EngineClient, TokenStream] | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self.chunks

    def end(self, cause: Cause) -> None:
        """Ask for the end; the terminal output still comes, unless the engine dies first."""
        self.cause, self.ending = cause, True
        if self.at is not None:
            client, stream = self.at
            client.abort(stream.id, cause)


class Replicas:
    """Use `started` to get one."""

    def __init__(self, start: EngineStart, count: int, client: int, folder: Path) -> None:
        self._start = start
        self._client = client
        self.replicas = [Replica(i, f"ipc://{folder}/engine-{i}.sock") for i in range(count)]
        self._streams: set[MovingStream] = set()
        self._changed = asyncio.Condition()
        self._stopping = False

    @property
    def info(self) -> EngineInfo:
        return next(client.info for client in self._clients())

    def _clients(self) -> list[EngineClient]:
        return [replica.client for replica in self.replicas if replica.client is not None]

    # -- asking -----------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[MovingStream]:
        """The answer to `request` as chunks, from whichever engine; leaving early aborts it."""
        answer = MovingStream()
        answer.chunks = self._chunks(request, answer)
        self._streams.add(answer)
        try:
            async with aclosing(answer.chunks):
                yield answer
        finally:
            self._streams.discard(answer)

    def end_all(self, cause: Cause) -> None:
        """Ask for the end of every stream; each still gets its terminal output."""
        for stream in list(self._streams):
            stream.end(cause)

    async def _chunks(self, request: GenerateRequest, answer: MovingStream) -> AsyncGenerator[Chunk, None]:
        tokens, scored = list(request.generated), 0
        while True:
            client = await self._choose()
            resumed = msgspec.structs.replace(request, generated=tuple(tokens))
            try:
                async with client.generate(resumed) as stream:
                    answer.at = client, stream
                    try:
                        async for chunk in _without_scores(stream, scored):
                            tokens += chunk.tokens
                            scored += len(chunk.prompt_logprobs)
                            yield chunk
                    finally:
                        answer.at, stream.cause = None, answer.cause
                    return
            except EngineDead as error:
                if answer.ending:
                    return
                log.warning("a stream lost its engine after %d tokens and goes on elsewhere: %s", len(tokens), error)

    async def _choose(self) -> EngineClient:
        """The ready engine with the fewest streams; waits a while for one if there is none."""
        if not self._clients():
            await self._wait_for_engine()
        if not (clients := self._clients()):
            raise EngineDead("the server is shutting down")
        return min(clients, key=lambda client: client.open_streams)

    async def _wait_for_engine(self) -> None:
        try:
            async with asyncio.timeout(MOVE_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: self._clients() or self._stopping)
        except TimeoutError:
            raise EngineDead(f"no engine has become ready in {MOVE_TIMEOUT_S:g} s") from None

    # -- keeping them alive -----------------------------------------------------

    async def keep(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run one replica, again and again, until cancelled. A first start that fails is told through `started`."""
        while True:
            try:
                await self._live(replica, started)
            except HeadgateError as error:
                if not started.done():
                    started.set_exception(error)
                    return
                log.error("engine %d: %s", replica.index, error)
            pause_s = RESTART_PAUSES_S[min(replica.restarts, len(RESTART_PAUSES_S) - 1)]
            replica.restarts += 1
            log.warning("engine %d has ended; starting it again in %g s", replica.index, pause_s)
            await asyncio.sleep(pause_s)

    async def _live(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """From the start of its process to the end of it, which always raises EngineDead."""
        async with self._process(replica) as process:
            with lone_errors():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_raise_at_end(process))
                    async with connected(replica.address, self._client, START_TIMEOUT_S) as client:
                        await self._offer(replica, client, started)

    async def _offer(self, replica: Replica, client: EngineClient, started: asyncio.Future[None]) -> None:
        """Let streams use `client`, until cancelled."""
        replica.client = client
        await self._notify()
        if not started.done():
            started.set_result(None)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            replica.client = None
            client.lose(EngineDead(f"engine {replica.index} has ended"))
            await self._notify()

    @asynccontextmanager
    async def _process(self, replica: Replica) -> AsyncIterator[asyncio.subprocess.Process]:
        start = msgspec.structs.replace(self._start, address=replica.address, name=f"engine {replica.index}")
        argument = msgspec.json.encode(start).decode()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headgate.engine.process", argument),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is for us alone
        )
        replica.pid = process.pid
        try:
            yield process
        finally:
            replica.pid = None
            await _stop(process)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """No stream waits for an engine any more."""
        self._stopping = True
        await self._notify()


async def _without_scores(stream: TokenStream, told: int) -> AsyncIterator[Chunk]:
    """Chunks without the first `told` prompt scores, which an earlier engine has already told."""
    async for chunk in stream:
        if told and chunk.prompt_logprobs:
            told, chunk.prompt_logprobs = max(0, told - len(chunk.prompt_logprobs)), chunk.prompt_logprobs[told:]
        yield chunk


async def _raise_at_end(process: asyncio.subprocess.Process) -> None:
    await process.wait()
    if process.returncode == CANNOT_START:
        raise CannotStart("the engine could not start; its reason is above")
    raise EngineDead(_obituary(process))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the engine's standard input, which ends it; kill it if that takes too long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        log.warning("engine process %d did not end in %g s; killing it", process.pid, STOP_TIMEOUT_S)
        process.kill()
        await process.wait()


def _obituary(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"the engine process was killed by signal {-code}"
    return f"the engine process ended with exit code {code}"


@asynccontextmanager
async def started(
    model: Path,
    config: EngineConfig,
    *,
    count: int = 1,
    client: int = 0,
    log_level: str = "INFO",
    log_format: LogFormat = "text",
) -> AsyncIterator[Replicas]:
    """`count` engines for `model`, all of them ready; raises if one cannot start."""
    with lone_errors(), tempfile.TemporaryDirectory(prefix="headgate-") as folder:
        start = EngineStart(str(model), "", config, log_level, log_format)
        replicas = Replicas(start, count, client, Path(folder))
        async with asyncio.TaskGroup() as tasks:
            starts = [asyncio.get_running_loop().create_future() for _ in replicas.replicas]
            keepers = [
                tasks.create_task(replicas.keep(replica, start))
                for replica, start in zip(replicas.replicas, starts, strict=True)
            ]
            try:
                await asyncio.gather(*starts)
                yield replicas
            finally:
                await replicas.stop()
                for keeper in keepers:
                    keeper.cancel()
