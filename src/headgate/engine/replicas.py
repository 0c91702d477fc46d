"""The engines of a server: starts, watches and restarts them, and gives each stream to one of them.

Each replica is in one of four states: *starting* (no client yet), *ready*, *down* (its process has ended and is
restarted after a delay), *outdated* (it answers commands but gets no streams, because it does not hold the weights of
the last update). One task per replica owns its process and moves it between the states.

`call_all` runs a command on every engine and records the state that all engines should have: which weights, and
whether paused. An engine that restarts is brought to that state before it gets streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path

import msgspec

from headgate import scratch
from headgate.config import EngineConfig
from headgate.device.weights.file_stamps import Stamps, stamps
from headgate.engine.child import engine_process, raise_at_exit
from headgate.engine.client import CALL_TIMEOUT_S, MOST_IDS, EngineClient, connected
from headgate.engine.moving_stream import MovingStream, Place
from headgate.engine.start import EngineStart
from headgate.engine.tasks import lone_errors
from headgate.errors import EngineDead, HeadgateError, Late, RequestError
from headgate.logs import LogFormat
from headgate.protocol.command import (
    BroadcastSource,
    Command,
    Denied,
    EngineState,
    FileSource,
    JoinGroup,
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

START_TIMEOUT_S = 1800.0  # enough to read a large checkpoint from a slow disk
SOON_S = 60.0  # an engine that ends sooner than this after its start is restarted after a growing delay
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # the last one repeats
PING_TIMEOUT_S = 30.0
STOP_MARGIN_S = 0.5  # added to the engine's own timeout, so that its answer can arrive
MOVE_TIMEOUT_S = 30.0  # how long a stream waits for an engine that can continue it


@dataclass(frozen=True)
class FleetWeights:
    """The weights that every engine of this server should hold: those of the last update that succeeded."""

    version: int = 0
    source: Source | None = None  # None: the model's own weights
    stamps: Stamps = field(default_factory=dict)  # show whether the files of `source` have changed

    def to_start_with(self, start: EngineStart) -> EngineStart:
        """Return `start` with these weights if their files are unchanged, else `start` as it is."""
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
    outdated: bool = False  # does not hold the weights of the last update, or holds incomplete ones
    known: str = "running"  # the state that it last reported, or was last asked for and may not have reached yet

    @property
    def state(self) -> str:
        if self.client is not None:
            return "outdated" if self.outdated else "ready"
        return "down" if self.restarts else "starting"


class Replicas:
    """All engines of this server. Use `started` to create it."""

    def __init__(self, start: EngineStart, engines: int, client: int, folder: Path) -> None:
        self._start = start
        self._client = client
        # One count for all engines: a stream that still refers to an engine that was lost must not name a sequence of
        # the engine that has replaced it.
        self._numbers = count(1)
        self.replicas = [Replica(i, f"ipc://{folder}/engine-{i}.sock") for i in range(engines)]
        self._streams: dict[MovingStream, None] = {}  # open streams, oldest first
        self._weights = FleetWeights()
        self.asked: Pause | Resume | None = None  # the last pause or resume sent to all engines
        self._info: EngineInfo | None = None
        self._changed = asyncio.Condition()
        self._stopping = False

    @property
    def info(self) -> EngineInfo:
        """The facts that are the same for all engines; available once the first engine has been ready."""
        if self._info is None:
            raise EngineDead("no engine is ready yet")
        return self._info

    @property
    def version(self) -> int:
        """The version of the weights that engines must hold to be given streams."""
        return self._weights.version

    def _usable(self) -> list[Replica]:
        """Engines that may be given streams."""
        return [replica for replica in self.replicas if replica.client is not None and not replica.outdated]

    # -- streams ----------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[MovingStream]:
        """Yield the answer to `request` as a stream, from any engine; leaving early aborts the request."""
        answer = MovingStream(request, self._choose)
        self._streams[answer] = None
        try:
            async with aclosing(answer.chunks):
                yield answer
        finally:
            self._streams.pop(answer, None)

    def end_all(self, cause: Cause) -> None:
        """Abort the requests of all streams; each stream still gets its terminal output."""
        for stream in list(self._streams):
            stream.end(cause)

    async def _choose(self, answer: MovingStream, left_s: float | None) -> tuple[int, EngineClient] | None:
        """Return the usable engine with the fewest streams, or None if the request is being ended.

        Waits if no engine is usable. Raises EngineDead if that takes too long, if all engines have outdated weights, or
        if the server is shutting down.
        """
        if not self._usable() and not answer.ending:
            await self._wait_for_engine(answer, MOVE_TIMEOUT_S if left_s is None else left_s)
        if answer.ending:
            return None
        clients = [(replica.index, replica.client) for replica in self._usable() if replica.client is not None]
        if not clients:
            raise EngineDead("the server is shutting down")
        return min(clients, key=lambda choice: choice[1].open_streams)

    async def _wait_for_engine(self, answer: MovingStream, left_s: float) -> None:
        """Wait until an engine is usable, the stream is being ended, or the server is shutting down.

        Ends the stream at its deadline, which is in `left_s`. Raises EngineDead if no engine is usable within
        `MOVE_TIMEOUT_S`, unless the deadline is before that, and when all engines are outdated.
        """
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
        """Abort the sequences at `places` and wait until their blocks are free; returns those not free in time.

        Each engine gets one command for every `MOST_IDS` sequences.
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
        """Run `command` on all engines at once; returns the outcome of each by its index, within `timeout_s`.

        An update counts as soon as one engine holds its weights; engines without them are then outdated.
        """
        if isinstance(command, UpdateWeights) and command.version is None:
            # All engines must use the same number, and their own next numbers differ if one missed an update.
            command = msgspec.structs.replace(command, version=self._weights.version + 1)
        known, before = _stamps_of(command), self.asked
        if isinstance(command, Pause | Resume):
            self.asked = command  # set before the calls, so that an engine that restarts meanwhile follows it
        if isinstance(command, Pause) and finds_accepted(command, before):
            for stream in self._streams:
                stream.accepted = True
        commands = [_addressed(command, replica) for replica in self.replicas]
        calls = map(_call, self.replicas, commands, repeat(timeout_s))
        outcome = dict(enumerate(await asyncio.gather(*calls)))
        reached = [result for result in outcome.values() if isinstance(result, EngineState)]
        if not reached and self.asked is command and any(isinstance(result, Denied) for result in outcome.values()):
            self.asked = before  # every engine that answered refused it; late or lost engines alone do not undo it
        if reached and isinstance(command, UpdateWeights):
            self._weights = FleetWeights(reached[0].version, command.source, known)
            for replica in self.replicas:
                replica.outdated = True  # until it reports this version
        for index, result in outcome.items():
            self._note_outcome(self.replicas[index], command, result)
        await self._notify()
        return outcome

    def _note_outcome(self, replica: Replica, command: Command, result: Result | HeadgateError) -> None:
        """Update the state of `replica`, and whether streams may use it, from its answer to `command`."""
        replica.known = _state_after(command, result, replica.known)
        if isinstance(result, EngineState):
            if result.version > self._weights.version:
                # An update that timed out earlier has succeeded after all.
                self._weights = FleetWeights(result.version)
            self._compare(replica, result.version)
        elif isinstance(result, Denied) and result.code == "quarantined":
            replica.outdated = True

    def _steps(self, followed: Pause | Resume | None, version: int) -> tuple[CatchUpStep, ...]:
        """The steps by which an engine reaches the state recorded by `call_all`.

        `followed` is the last pause or resume that the engine has run since its start.
        """
        asked = self.asked
        missed = isinstance(asked, Resume) and isinstance(followed, Pause)
        observed = Observed(followed is asked, version, missed_resume=missed)
        # A running engine never loads the recorded weights; it reads them only when it starts.
        return steps(Desired(isinstance(asked, Pause), self._weights.version), observed)

    def _compare(self, replica: Replica, version: int) -> None:
        before, replica.outdated = replica.outdated, CatchUpStep.EXCLUDE in self._steps(self.asked, version)
        if replica.outdated and not before:
            log.warning(
                "engine %d holds weights version %d instead of %d; it gets no streams until an update",
                *(replica.index, version, self._weights.version),
            )

    # -- processes --------------------------------------------------------------

    async def keep(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run one replica and restart it until cancelled. If the first start fails, `started` gets the error."""
        clock, quick = asyncio.get_running_loop().time, 0  # how often in a row the engine ended soon after its start
        while True:
            began_s = clock()
            try:
                await self._run_once(replica, started)
            except HeadgateError as error:
                if not started.done():
                    started.set_exception(error)
                    return
                _raise_if_cancelled()
                log.error("engine %d: %s", replica.index, error)
            quick = quick if clock() - began_s < SOON_S else 0
            pause_s = RESTART_PAUSES_S[min(quick, len(RESTART_PAUSES_S) - 1)]
            replica.restarts, quick = replica.restarts + 1, quick + 1
            log.warning("engine %d has ended; starting it again in %g s", replica.index, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run one process of the replica until it ends; always raises EngineDead then."""
        weights = self._weights
        async with self._process(replica, weights) as process:
            with lone_errors():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(raise_at_exit(process))
                    async with connected(replica.address, self._client, START_TIMEOUT_S, self._numbers) as client:
                        await self._bring_up(replica, client)
                        if self._weights is not weights:
                            raise EngineDead("the weights were updated while this engine started")
                        await self._offer(replica, client, started)

    async def _bring_up(self, replica: Replica, client: EngineClient) -> None:
        """Compare a new engine's weights with the recorded ones, and pause it if all engines should be paused."""
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
            raise EngineDead("the engine does not answer") from None

    async def _offer(self, replica: Replica, client: EngineClient, started: asyncio.Future[None]) -> None:
        """Let streams use the replica through `client`, until cancelled."""
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
        async with engine_process(weights.to_start_with(start)) as process:
            replica.pid = process.pid
            try:
                yield process
            finally:
                replica.pid = None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """Fail the streams that wait for an engine, because the server is shutting down."""
        self._stopping = True
        await self._notify()


def finds_accepted(pause: Pause, before: Pause | Resume | None) -> bool:
    """Whether `pause` treats open requests as accepted before it. Requests that an earlier pause refuses are not."""
    if not isinstance(before, Pause):
        return True
    return before.queue and (before.mode, before.queue) != (pause.mode, pause.queue)


def _addressed(command: Command, replica: Replica) -> Command:
    """Return `command` for this replica. Where engines join a trainer's group, each gets its own rank."""
    if isinstance(command, JoinGroup):
        try:
            return msgspec.structs.replace(command, rank=command.rank + replica.index)
        except ValueError as error:
            raise RequestError(f"the group is too small for all engines: {error}", param="world_size") from error
    if not isinstance(command, UpdateWeights) or not isinstance(command.source, BroadcastSource):
        return command
    try:
        source = msgspec.structs.replace(command.source, rank=command.source.rank + replica.index)
    except ValueError as error:
        raise RequestError(f"the group is too small for all engines: {error}", param="world_size") from error
    return msgspec.structs.replace(command, source=source)


def _state_after(command: Command, result: Result | HeadgateError, known: str) -> str:
    """The state of an engine after `command`. An engine that did not answer is assumed to run the command later."""
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
    """The stamps of the files that an update names, taken before the engines read them."""
    match command:
        case UpdateWeights(FileSource(path), base=None):  # changed tensors are not enough for an engine to start with
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
    result = await _call(replica, Stop(ids, cause, timeout_s), timeout_s + STOP_MARGIN_S)
    if isinstance(result, HeadgateError):
        log.warning("engine %d cannot stop sequences %s: %s", replica.index, ids, result)
    # An engine that has ended holds no blocks.
    held = result.held if isinstance(result, EngineState) else ids if replica.client else []
    return [Place(replica.index, id) for id in held if id in ids]


def _raise_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled; an error from the ending process may have replaced it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


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
    """Start `count` engines for `model` and yield them when all are ready; raises if one cannot start."""
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
