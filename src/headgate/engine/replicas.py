"""Several engines behind one method: started, watched, restarted; a stream whose engine dies goes on in another.

Each replica is in one of four states: *starting* (no client yet), *ready*, *down* (its process has ended and will be
started again after a pause), *outdated* (it can be called, but holds other weights than the fleet and gets no streams). One
task per replica owns its process and moves it between the states.

`call_all` carries out a command on every engine and remembers what it made of the fleet: which weights, paused or not. An
engine that comes back comes back like that.

A stream knows its request and every token it has passed on. When its engine is lost and another is ready, it asks that
one for the same request plus the tokens; the reader notices nothing but the wait.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import msgspec

from headgate import scratch
from headgate.config import EngineConfig
from headgate.device.weights.file_stamps import Stamps, stamps
from headgate.engine.client import CALL_TIMEOUT_S, MOST_IDS, Chunk, EngineClient, TokenStream, connected
from headgate.engine.start import CANNOT_START, EngineStart
from headgate.engine.tasks import lone_errors
from headgate.errors import CannotStart, EngineDead, HeadgateError, Late, RequestError
from headgate.logs import LogFormat
from headgate.protocol.command import (
    BroadcastSource,
    Command,
    Denied,
    EngineState,
    FileSource,
    Pause,
    Result,
    Resume,
    Sleep,
    Source,
    Stop,
    UpdateWeights,
    Wake,
)
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest
from headgate.reconcile import CatchUpStep, Desired, Observed, steps

log = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0  # large checkpoints on slow disks
STOP_TIMEOUT_S = 15.0
SOON_S = 60.0  # an engine that lived longer did not die of its start
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # the last one repeats
PING_TIMEOUT_S = 30.0
STOP_MARGIN_S = 0.5  # for the answer to come, after the engine has given up waiting
MOST_MOVES = 2  # without a token in between: a request that kills its engine must not go through the whole fleet
DEADLINE_GRACE_S = 0.3  # after a deadline, for the engine's own terminal output
MOVE_TIMEOUT_S = 30.0  # how long a stream waits for an engine to go on in


@dataclass(frozen=True)
class FleetWeights:
    """What every engine should hold, since the last update that succeeded."""

    version: int = 0
    source: Source | None = None  # None: the model's own
    stamps: Stamps = field(default_factory=dict)  # of its files, by which to know them again

    def to_start_with(self, start: EngineStart) -> EngineStart:
        """`start` with these weights, if they can still be had."""
        source = self.source
        if isinstance(source, FileSource) and self.stamps and stamps(source.path) == self.stamps:
            return msgspec.structs.replace(start, weights=source, version=self.version)
        return start


@dataclass(eq=False)
class Replica:
    index: int
    address: str
    client: EngineClient | None = None  # set while ready or outdated
    pid: int | None = None
    restarts: int = 0
    outdated: bool = False  # holds other weights than the fleet, or none that are whole
    known: str = (
        "running"  # its state by its last answer, or the one that it was last asked to take and may not have yet
    )

    @property
    def state(self) -> str:
        if self.client is not None:
            return "outdated" if self.outdated else "ready"
        return "down" if self.restarts else "starting"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream is being made: which engine, and what the engine calls it."""

    engine: int
    id: int


class MovingStream:
    """One answer, wherever it is being made. Leaving it early aborts it, under the name in `cause`."""

    def __init__(self) -> None:
        self.cause: Cause = "client_disconnect"
        self.ending = False
        self.accepted = False  # before a pause began, which governs it then also while no engine has it
        self.chunks: AsyncGenerator[Chunk, None]
        self.at: tuple[EngineClient, TokenStream] | None = None
        self.place: Place | None = None  # the same, as a value
        self.parts: list[TokenStream] = []  # of all engines it has been at
        self.wait: asyncio.Timeout | None = None  # for an engine

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self.chunks

    def end(self, cause: Cause) -> None:
        """Ask for the end; the terminal output still comes, unless no engine has it, or its engine dies first."""
        if self.ending:
            return
        self._leave(cause)
        if self.at is not None:
            client, stream = self.at
            client.abort(stream.id, cause)

    def overdue(self) -> None:
        """Its deadline has passed and the engine has not ended it: the reader is not kept waiting any longer."""
        self._leave("deadline")
        if self.at is not None:
            self.at[1].leave()

    def end_at(self, cause: Cause) -> Place | None:
        """The same, but telling its engine is left to the caller; None if no engine has it."""
        self._leave(cause)
        return self.place

    @property
    def made(self) -> int:
        """Tokens that engines have told of it, heard or not; final when `settled`."""
        return sum(part.made for part in self.parts)

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called at every last word that is still to come."""
        for part in self.parts:
            if not part.settled:
                part.on_settled = call

    def _leave(self, cause: Cause) -> None:
        if not self.ending:
            self.cause, self.ending = cause, True
        if self.wait is not None and not self.wait.expired():
            self.wait.reschedule(asyncio.get_running_loop().time())


class Replicas:
    """Use `started` to get one."""

    def __init__(self, start: EngineStart, count: int, client: int, folder: Path) -> None:
        self._start = start
        self._client = client
        self.replicas = [Replica(i, f"ipc://{folder}/engine-{i}.sock") for i in range(count)]
        self._streams: dict[MovingStream, None] = {}  # in the order in which they were opened
        self._weights = FleetWeights()
        self.asked: Pause | Resume | None = None  # of the fleet, last
        self._info: EngineInfo | None = None
        self._changed = asyncio.Condition()
        self._stopping = False

    @property
    def info(self) -> EngineInfo:
        """What all engines have in common; known for good once the first one was ready."""
        if self._info is None:
            raise EngineDead("no engine is ready yet")
        return self._info

    @property
    def version(self) -> int:
        """Of the weights that engines must hold to be given streams."""
        return self._weights.version

    def _usable(self) -> list[Replica]:
        """Engines that streams may use."""
        return [replica for replica in self.replicas if replica.client is not None and not replica.outdated]

    # -- asking -----------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[MovingStream]:
        """The answer to `request` as chunks, from whichever engine; leaving early aborts it."""
        answer = MovingStream()
        answer.accepted = request.accepted
        answer.chunks = self._chunks(request, answer)
        self._streams[answer] = None
        try:
            async with aclosing(answer.chunks):
                yield answer
        finally:
            self._streams.pop(answer, None)

    def end_all(self, cause: Cause) -> None:
        """Ask for the end of every stream; each still gets its terminal output."""
        for stream in list(self._streams):
            stream.end(cause)

    async def _chunks(self, request: GenerateRequest, answer: MovingStream) -> AsyncGenerator[Chunk, None]:
        tokens, scored, stalled = list(request.generated), 0, 0
        began_s = asyncio.get_running_loop().time()
        while (replica := await self._choose(answer, _left(request.timeout_s, began_s))) is not None:
            client = replica.client
            assert client is not None
            known, timeout_s, moved = len(tokens), _left(request.timeout_s, began_s), bool(answer.parts)
            # A ticket is good for one engine: its lease ended with the connection of the first.
            ticket = None if moved else request.ticket
            resumed = msgspec.structs.replace(
                request, generated=tuple(tokens), timeout_s=timeout_s, ticket=ticket, accepted=answer.accepted
            )
            try:
                async with client.generate(resumed) as stream:
                    answer.parts.append(stream)
                    answer.at, answer.place = (client, stream), Place(replica.index, stream.id)
                    timer = _in(timeout_s, answer.overdue)
                    try:
                        async for chunk in _without_scores(stream, scored):
                            tokens += chunk.tokens
                            scored += len(chunk.prompt_logprobs)
                            yield chunk
                    finally:
                        answer.at, answer.place, stream.cause = None, None, answer.cause
                        if timer is not None:
                            timer.cancel()
                    return
            except EngineDead as error:
                if answer.ending:
                    return
                if request.export_kv:
                    raise  # its ticket is out, and names an engine that is gone
                stalled = stalled + 1 if len(tokens) == known else 0
                if stalled > MOST_MOVES:
                    raise EngineDead(
                        f"{stalled} engines were lost in a row before the next token; giving up"
                    ) from error
                log.warning("a stream lost its engine after %d tokens and goes on elsewhere: %s", len(tokens), error)
            except RequestError as error:
                if error.code != "paused" or not (moved or answer.accepted):
                    raise
                answer.end("pause")  # which ended what had an engine

    async def _choose(self, answer: MovingStream, left_s: float | None) -> Replica | None:
        """The ready engine with the fewest streams; waits a while for one if there is none, unless `answer` ends."""
        if not self._usable() and not answer.ending:
            await self._wait_for_engine(answer, MOVE_TIMEOUT_S if left_s is None else left_s)
        if answer.ending:
            return None
        if not (usable := self._usable()):
            raise EngineDead("the server is shutting down")
        return min(usable, key=lambda replica: replica.client.open_streams if replica.client else 0)

    async def _wait_for_engine(self, answer: MovingStream, left_s: float) -> None:
        """`left_s`: until its deadline."""
        try:
            async with asyncio.timeout(min(left_s, MOVE_TIMEOUT_S)) as answer.wait, self._changed:
                await self._changed.wait_for(lambda: self._usable() or self._stopping or self._all_outdated())
        except TimeoutError:
            answer.wait = None
            if left_s < MOVE_TIMEOUT_S:
                answer.end("deadline")
            elif not answer.ending:
                raise EngineDead(f"no engine has become ready in {MOVE_TIMEOUT_S:g} s") from None
        finally:
            answer.wait = None
        if self._all_outdated():
            raise EngineDead("no engine holds the weights of the last update; update them again")

    def _all_outdated(self) -> bool:
        return all(replica.state == "outdated" for replica in self.replicas)

    # -- control ----------------------------------------------------------------

    async def stop_at(self, places: Collection[Place], cause: Cause, timeout_s: float) -> set[Place]:
        """End what is made there, and return when all it owns has come home; where it has not in time.

        One command per engine and `MOST_IDS` sequences.
        """
        stops = []
        for replica in self.replicas:
            ids = [place.id for place in places if place.engine == replica.index]
            batches = [ids[i : i + MOST_IDS] for i in range(0, len(ids), MOST_IDS)]
            stops += [_stop_some(replica, batch, cause, timeout_s) for batch in batches]
        return {place for held in await asyncio.gather(*stops) for place in held}

    async def call_all(
        self, command: Command, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[int, Result | HeadgateError]:
        """Have every engine carry out `command`, at once; what became of it, by replica. None takes longer than told.

        New weights count as the fleet's as soon as one engine holds them; one that could not follow is outdated.
        """
        if isinstance(command, UpdateWeights) and command.version is None:
            # Not each engine's own next one: one of them may have missed an update.
            command = msgspec.structs.replace(command, version=self._weights.version + 1)
        known, before = _stamps_of(command), self.asked
        if isinstance(command, Pause | Resume):
            self.asked = command  # from now on, for an engine that comes back meanwhile
        if isinstance(command, Pause) and finds_accepted(command, before):
            for stream in self._streams:
                stream.accepted = True
        commands = [_addressed(command, replica) for replica in self.replicas]
        calls = map(_call, self.replicas, commands, repeat(timeout_s))
        outcome = dict(enumerate(await asyncio.gather(*calls)))
        told = [result for result in outcome.values() if isinstance(result, EngineState)]
        if not told and self.asked is command and any(isinstance(result, Denied) for result in outcome.values()):
            self.asked = before  # it is refused; an engine that is late or down is still to follow
        if told and isinstance(command, UpdateWeights):
            self._weights = FleetWeights(told[0].version, command.source, known)
            for replica in self.replicas:
                replica.outdated = True  # until it is seen to hold them
        for index, result in outcome.items():
            self._judge(self.replicas[index], command, result)
        await self._notify()
        return outcome

    def _judge(self, replica: Replica, command: Command, result: Result | HeadgateError) -> None:
        """Whether streams may use an engine that has answered like this, and in which state it is."""
        replica.known = _state_after(command, result, replica.known)
        if isinstance(result, EngineState):
            if result.version > self._weights.version:
                # An update whose answer we did not wait for has succeeded after all.
                self._weights = FleetWeights(result.version)
            self._compare(replica, result.version)
        elif isinstance(result, Denied) and result.code == "quarantined":
            replica.outdated = True

    def _steps(self, followed: Pause | Resume | None, version: int) -> tuple[CatchUpStep, ...]:
        """What the engines were asked, and one that has `followed` nothing else since its start has not done."""
        asked = self.asked
        missed = isinstance(asked, Resume) and isinstance(followed, Pause)
        observed = Observed(followed is asked, version, missed_resume=missed)
        # Weights are read when an engine starts; they cannot be given to one that runs.
        return steps(Desired(isinstance(asked, Pause), self._weights.version), observed)

    def _compare(self, replica: Replica, version: int) -> None:
        before, replica.outdated = replica.outdated, CatchUpStep.EXCLUDE in self._steps(self.asked, version)
        if replica.outdated and not before:
            log.warning(
                "engine %d holds weights of version %d and the fleet %d; it gets no streams until an update",
                *(replica.index, version, self._weights.version),
            )

    # -- keeping them alive -----------------------------------------------------

    async def keep(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run one replica, again and again, until cancelled. A first start that fails is told through `started`."""
        clock, quick = asyncio.get_running_loop().time, 0  # ends in a row that came soon after the start
        while True:
            began_s = clock()
            try:
                await self._live(replica, started)
            except HeadgateError as error:
                if not started.done():
                    started.set_exception(error)
                    return
                _go_if_cancelled()
                log.error("engine %d: %s", replica.index, error)
            quick = quick if clock() - began_s < SOON_S else 0
            pause_s = RESTART_PAUSES_S[min(quick, len(RESTART_PAUSES_S) - 1)]
            replica.restarts, quick = replica.restarts + 1, quick + 1
            log.warning("engine %d has ended; starting it again in %g s", replica.index, pause_s)
            await asyncio.sleep(pause_s)

    async def _live(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """From the start of its process to the end of it, which always raises EngineDead."""
        weights = self._weights
        async with self._process(replica, weights) as process:
            with lone_errors():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_raise_at_end(process))
                    async with connected(replica.address, self._client, START_TIMEOUT_S) as client:
                        await self._bring_up(replica, client)
                        if self._weights is not weights:
                            raise EngineDead("the fleet's weights changed while it started")
                        await self._offer(replica, client, started)

    async def _bring_up(self, replica: Replica, client: EngineClient) -> None:
        """See what a fresh engine holds, and make it what the others are: paused, if they are, when it is offered."""
        replica.outdated = False
        try:
            status = (await client.ping(PING_TIMEOUT_S)).status
            self._compare(replica, status.version)
            replica.known = status.state
            followed: Pause | Resume | None = None
            while not {CatchUpStep.PAUSE, CatchUpStep.RESUME}.isdisjoint(self._steps(followed, status.version)):
                followed = asked = self.asked
                assert asked is not None
                replica.known = _state_after(asked, await client.call(asked), replica.known)
        except TimeoutError:
            raise EngineDead("it does not answer") from None

    async def _offer(self, replica: Replica, client: EngineClient, started: asyncio.Future[None]) -> None:
        """Let streams use `client`, until cancelled."""
        replica.client, self._info = client, client.info
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
    async def _process(self, replica: Replica, weights: FleetWeights) -> AsyncIterator[asyncio.subprocess.Process]:
        start = msgspec.structs.replace(
            self._start,
            address=replica.address,
            name=f"engine {replica.index}",
            config=self._start.config.for_replica(replica.index),
        )
        argument = msgspec.json.encode(weights.to_start_with(start)).decode()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headgate.engine.process", argument),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for us alone
            )
        except OSError as error:
            raise EngineDead(f"its process cannot be started: {error}") from error
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


def finds_accepted(pause: Pause, before: Pause | Resume | None) -> bool:
    """Whether requests that `pause` finds were accepted: not those that come during a pause that refuses them."""
    if not isinstance(before, Pause):
        return True
    return before.queue and (before.mode, before.queue) != (pause.mode, pause.queue)


def _addressed(command: Command, replica: Replica) -> Command:
    """`command` as this replica should hear it: in a group, each engine has a rank of its own."""
    if not isinstance(command, UpdateWeights) or not isinstance(command.source, BroadcastSource):
        return command
    try:
        source = msgspec.structs.replace(command.source, rank=command.source.rank + replica.index)
    except ValueError as error:
        raise RequestError(f"the group is too small for all engines: {error}", param="world_size") from error
    return msgspec.structs.replace(command, source=source)


def _state_after(command: Command, result: Result | HeadgateError, known: str) -> str:
    """The state of an engine that was in `known`; one that has not answered is still to carry the command out."""
    match command, result:
        case _, EngineState():
            return result.state
        case Pause(), HeadgateError():
            return "pausing"
        case Resume(), EngineDead() if not isinstance(result, Late):
            return "running"
        case UpdateWeights() | Sleep() | Wake(), Late():
            return "updating"
    return known


def _stamps_of(command: Command) -> Stamps:
    """Of the files that an update names, before they are read."""
    match command:
        case UpdateWeights(FileSource(path)):
            return stamps(path)
        case _:
            return {}


async def _call(replica: Replica, command: Command, timeout_s: float) -> Result | HeadgateError:
    if replica.client is None:
        return EngineDead(f"engine {replica.index} is {replica.state}")
    try:
        return await replica.client.call(command, timeout_s)
    except TimeoutError:
        return Late(f"engine {replica.index} has not answered in {timeout_s:g} s")
    except HeadgateError as error:
        return error


async def _stop_some(replica: Replica, ids: list[int], cause: Cause, timeout_s: float) -> list[Place]:
    told = await _call(replica, Stop(ids, cause, timeout_s), timeout_s + STOP_MARGIN_S)
    if isinstance(told, HeadgateError):
        log.warning("engine %d cannot stop sequences %s: %s", replica.index, ids, told)
    # What an engine that is gone has held is gone with it.
    held = told.held if isinstance(told, EngineState) else ids if replica.client else []
    return [Place(replica.index, id) for id in held if id in ids]


def _left(timeout_s: float | None, began_s: float) -> float | None:
    """What is left of a request's time; an engine that gets it too late ends it at once."""
    if timeout_s is None:
        return None
    return max(timeout_s - (asyncio.get_running_loop().time() - began_s), 1e-3)


def _in(timeout_s: float | None, call: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Have `call` called if the engine lets a request's time pass."""
    if timeout_s is None:
        return None
    return asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, call)


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


def _go_if_cancelled() -> None:
    """The end of a process in the moment in which its keeper is cancelled hides that one."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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
    with lone_errors(), scratch.folder() as folder:
        start = EngineStart(str(model), "", config, log_level, log_format)
        replicas = Replicas(start, count, client, folder)
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
