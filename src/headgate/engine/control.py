"""Control commands: pause, resume, weight updates, sleep, stop-and-wait. Each is a generator that runs between steps.

A command does what it can, then yields until its postcondition holds. The step loop advances all commands once per
turn, after outputs have been sent, and continues to run steps. An abort therefore never waits for a pause, nor a
pause for an abort.

The states of an engine: running → pausing → paused → (updating → paused | quarantined) → running. Two settings are
separate from the state: whether new requests are refused (`rejecting`), and what may be scheduled (the scheduler's
`flow`). From the first instant of a pause, new requests are refused or queued, while running sequences are aborted,
finished or frozen, depending on the mode. A resume cancels a pause that is still in progress.

A paused engine may release memory (sleep). It then stays paused until all of that memory is allocated again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from headgate.core.scheduler import Flow, Scheduler
from headgate.core.sequence import Sequence
from headgate.device.weights.file_stamps import Stamps, stamps
from headgate.engine.collecting import Collecting, Wires
from headgate.errors import HalfWritten, ModelError, OutOfMemory, RequestError, SourceLost, Unavailable
from headgate.protocol.command import (
    ChecksumWeights,
    CollectWeights,
    Command,
    Denied,
    DiscardWeights,
    EngineState,
    FileSource,
    Flush,
    Flushed,
    JoinGroup,
    LeaveGroup,
    ListSequences,
    Pause,
    PauseMode,
    Result,
    Resume,
    SequenceList,
    SequenceStatus,
    Sleep,
    Source,
    StagedSource,
    State,
    Stop,
    Tag,
    UpdateWeights,
    Wake,
    WeightChecksums,
)
from headgate.protocol.groups import present
from headgate.protocol.output import Cause

log = logging.getLogger(__name__)

Program = Generator[None, None, Result]

# How long a pause waits for the device to release the sequences that it forced to end.
FORCE_S = 0.4


@dataclass(frozen=True, slots=True)
class ControlJob:
    client: int
    number: int
    program: Program


class DeviceResources(Protocol):
    """Loads weights and moves device memory; implemented by `ModelResources`. Only one operation runs at a time."""

    @property
    def asleep(self) -> tuple[Tag, ...]: ...

    def load_weights(
        self, source: Source, *, partial: bool = False, checksum: Mapping[str, str] | None = None
    ) -> Future[None]: ...

    def sleep(self, tags: Collection[Tag]) -> Future[None]: ...

    def wake_weights(self) -> Future[None]: ...

    def wake_kv(self) -> Future[None]: ...

    def checksums(self) -> Future[dict[str, str]]: ...


class Control:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        resources: DeviceResources,
        wires: Wires | None = None,
        settle_transfers: Callable[[], Future[None]],
        send_outputs: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.state: State = "running"
        self.mode: PauseMode | None = None
        self.rejecting = False
        self._scheduler = scheduler
        self._resources = resources
        self._settle_transfers = settle_transfers
        self._send_outputs = send_outputs
        self._wake = wake
        self._last_update: tuple[Source, Stamps] | None = None  # its source, with the stamps of its files
        self._resumes = 0  # number of resumes; each cancels earlier pauses, even if another pause follows at once
        self._jobs: list[ControlJob] = []
        self._done: list[
            tuple[ControlJob, Result]
        ] = []  # commands that needed no wait; answered only after outputs have been sent
        self._deadlines: dict[int, float] = {}  # id of a command's wait -> its deadline
        self.collecting = Collecting(wires, now_s=lambda: scheduler.now_s, until=self._until, wake=wake)

    def refuse_if_held(self, *, accepted: bool) -> None:
        """Raise if the current pause refuses a request.

        A new request is refused unless the pause queues it. A request that was accepted before the pause is refused
        only if the pause aborts such requests.
        """
        if self.mode == "abort" if accepted else self.rejecting:
            raise Unavailable(f"the engine is {self.state} and takes no new requests; try again later", code="paused")

    @property
    def asleep(self) -> tuple[Tag, ...]:
        return self._resources.asleep

    @property
    def next_deadline_s(self) -> float:
        return min(self.collecting.deadline_s, *self._deadlines.values(), float("inf"))

    # -- running commands -------------------------------------------------------

    def start(self, client: int, number: int, command: Command) -> None:
        """Start a command, and run it up to its first wait."""
        job = ControlJob(client, number, self._run(command))
        if (result := _advance(job)) is None:
            self._jobs.append(job)
        else:
            self._done.append((job, result))

    def advance(self) -> Iterator[tuple[ControlJob, Result]]:
        """Advance every command once; yields those that are done, with their results."""
        self._settle()
        self.collecting.expire()
        done, self._done = self._done, []
        yield from done
        for job in list(self._jobs):
            if (result := _advance(job)) is not None:
                self._jobs.remove(job)
                yield job, result

    def _run(self, command: Command) -> Program:
        begun = self._begin(command)
        if isinstance(begun, Generator):
            return (yield from begun)
        return begun

    def _begin(self, command: Command) -> Program | Result:
        match command:
            case Stop():
                return self._stop(command)
            case Pause():
                return self._pause(command)
            case Resume():
                return self._resume()
            case UpdateWeights():
                return self._update(command)
            case Sleep():
                return self._sleep(command)
            case Wake():
                return self._wake_up(command)
            case Flush():
                return Flushed(self._scheduler.pool.flush())
            case ChecksumWeights():
                return self._checksum()
            case ListSequences():
                return SequenceList(self.list_sequences())
            case JoinGroup() | LeaveGroup() | CollectWeights() | DiscardWeights():
                return self.collecting.run(command)

    def _until(self, holds: Callable[[], bool], deadline_s: float) -> Generator[None, None, bool]:
        """Yield until `holds()` is true or the deadline has passed; returns whether it is true."""
        wait = id(holds)
        self._deadlines[wait] = deadline_s
        try:
            while not holds():
                if self._scheduler.now_s >= deadline_s:
                    return False
                yield
            return True
        finally:
            del self._deadlines[wait]

    # -- the commands -----------------------------------------------------------

    def _stop(self, stop: Stop) -> Program:
        began_s = self._scheduler.now_s
        ended = self._end(list(self._scheduler.sequences) if stop.ids is None else stop.ids, stop.cause)
        yield  # terminal outputs are sent first
        # Sequences that had already ended are watched too, because they may still have blocks.
        watched = ended if stop.ids is None else stop.ids
        yield from self._until(lambda: not self._holding(watched), began_s + stop.timeout_s)
        return self._engine_state(began_s, ended=ended)

    def _pause(self, pause: Pause) -> Program:
        if self.state in ("updating", "quarantined"):
            raise _conflict(f"cannot pause: the engine is {self.state}, so it runs no requests anyway")
        began_s = self._scheduler.now_s
        ended, resumes = self._enter_pause(pause), self._resumes

        def over() -> bool:
            return self.state != "pausing" or self._resumes != resumes

        yield
        paused = yield from self._until(over, began_s + pause.timeout_s)
        forced = [] if paused else self._force_out()
        if forced:
            yield from self._until(over, self._scheduler.now_s + FORCE_S)
        return self._engine_state(began_s, ended=ended, forced=forced)

    def _enter_pause(self, pause: Pause) -> dict[int, int]:
        """Start a pause; returns the ids of the sequences it aborted, each with its number of output tokens.

        Repeating a pause changes nothing.
        """
        if pause.mode == "drain" and self.state == "paused" and self.mode != "drain":
            self._refuse_if_asleep()  # without its memory the engine cannot finish started sequences
        self.rejecting = not pause.queue
        if self.state == "paused" and self.mode in (pause.mode, "abort"):
            return {}
        self.state, self.mode = "pausing", pause.mode
        self._scheduler.pause(Flow.DRAIN if pause.mode == "drain" else Flow.FROZEN)
        return self._end(list(self._scheduler.sequences), "pause") if pause.mode == "abort" else {}

    def _force_out(self) -> list[int]:
        """Abort all started sequences, because a drain has timed out; returns their ids."""
        started = [seq.id for seq in self._scheduler.sequences.values() if seq.started_s is not None]
        if self.mode != "drain":
            return []  # other modes have nothing left to abort; they wait only for a step in flight
        self._end(started, "pause")
        return started

    def _settle(self) -> None:
        """Complete the pause in progress if its condition now holds."""
        scheduler = self._scheduler
        if self.state != "pausing":
            return
        if self.mode == "drain" and scheduler.drained:
            scheduler.pause(Flow.FROZEN)
        if scheduler.quiesced and not (self.mode == "abort" and scheduler.leaving):
            self.state = "paused"
            log.info("paused (%s): %r", self.mode, scheduler)

    def _resume(self) -> Result:
        if self.state in ("updating", "quarantined"):
            raise _conflict(f"the engine is {self.state}; a full weight update must succeed first")
        self._refuse_if_asleep()
        self.state, self.mode, self.rejecting = "running", None, False
        self._resumes += 1
        self._scheduler.resume()
        return self._engine_state(self._scheduler.now_s)

    def _update(self, update: UpdateWeights) -> Program:
        if self.state not in ("paused", "quarantined"):
            raise _conflict(f"the engine is {self.state}; pause it before changing its weights", code="not_paused")
        began_s, current = self._scheduler.now_s, self._scheduler.version
        given = _identify(update.source)
        if update.version == current and self.state == "paused" and given is not None and given == self._last_update:
            return self._engine_state(began_s)  # the same update again: the caller may have missed the first answer
        if update.version is not None and update.version <= current:
            # Cache keys contain the version: if a number were reused, KV of other weights could be found.
            message = f"version {update.version} is not above {current}; give new weights a new number"
            raise RequestError(message, param="version", code="stale_version")
        self._refuse_unless_ready_for(update)
        partial, checksum = update.base is not None, update.checksum
        yield from self._until_loaded(
            lambda: self._resources.load_weights(update.source, partial=partial, checksum=checksum)
        )
        self._change_weights(update)
        self.collecting.loaded()
        self._last_update = given
        return self._engine_state(began_s)

    def _refuse_unless_ready_for(self, update: UpdateWeights) -> None:
        if isinstance(update.source, StagedSource):
            self.collecting.refuse_unless_collected()
        if update.base is not None or update.checksum is not None:
            self.collecting.refuse_several_ranks("take changed tensors or checksums of tensors")
        if update.base is None:
            return
        if self.state == "quarantined" or "weights" in self._resources.asleep:
            state = "quarantined" if self.state == "quarantined" else "asleep"
            raise _conflict(f"the engine is {state} and needs a full update, not changed tensors", code="wrong_base")
        if update.base != self._scheduler.version:
            message = f"the update applies to version {update.base}, but this engine has {self._scheduler.version}"
            raise _conflict(f"{message}; the weights are unchanged", code="wrong_base")

    def _until_loaded(self, load: Callable[[], Future[None]]) -> Generator[None, None, None]:
        """Yield until new weights are loaded. On failure, the old weights stay, or the engine is quarantined."""
        try:
            yield from self._until_moved(load)
        except HalfWritten as error:
            self.state = "quarantined"
            log.error("quarantined: %s", error)
            raise _conflict(
                f"the update failed midway and the weights are unusable: {error}", code="quarantined"
            ) from error
        except ModelError as error:
            raise _refused(error) from error

    def _until_moved(self, move: Callable[[], Future[None]]) -> Generator[None, None, None]:
        """Yield until `move` is done. Meanwhile the state is `updating`, in which pauses and resumes are refused."""
        before, self.state = self.state, "updating"
        try:
            moving = move()
            moving.add_done_callback(lambda _: self._wake())
            while not moving.done():
                yield
            moving.result()
        except OutOfMemory as error:
            raise Unavailable(str(error), code="out_of_memory") from error
        finally:
            self.state = before

    def _change_weights(self, update: UpdateWeights) -> None:
        # Tokens of the old weights must be sent before the version changes.
        self._send_outputs()
        version = self._scheduler.version + 1 if update.version is None else update.version
        self._scheduler.weights_changed(version, recompute=update.recompute)
        self.state = "paused"
        log.info("weights are now version %d", version)

    def _sleep(self, sleep: Sleep) -> Program:
        began_s = self._scheduler.now_s
        self._refuse_unless_paused("putting it to sleep")
        if "kv_cache" in sleep.tags:
            if self._scheduler.lends_kv:
                raise _conflict("KV is leased to another engine; try again when that engine has fetched it")
            self._scheduler.kv_lost()
            yield from self._until_moved(self._settle_transfers)
        yield from self._until_moved(lambda: self._resources.sleep(sleep.tags))
        log.info("asleep: %s", ", ".join(self._resources.asleep))
        return self._engine_state(began_s)

    def _wake_up(self, wake: Wake) -> Program:
        began_s = self._scheduler.now_s
        self._refuse_unless_paused("waking it")
        sleeping = set(wake.tags) & set(self._resources.asleep)
        if "weights" in sleeping:
            yield from self._until_loaded(self._resources.wake_weights)
        if "kv_cache" in sleeping:
            yield from self._until_moved(self._resources.wake_kv)
        return self._engine_state(began_s)

    def _checksum(self) -> Program:
        if "weights" in self._resources.asleep:
            raise _conflict("the weights are asleep; wake the engine first", code="asleep")
        version, computing = self._scheduler.version, self._resources.checksums()
        computing.add_done_callback(lambda _: self._wake())
        while not computing.done():
            yield
        return WeightChecksums(version, computing.result())

    def _refuse_if_asleep(self) -> None:
        if asleep := self._resources.asleep:
            raise _conflict(f"asleep: {', '.join(asleep)}; wake the engine first", code="asleep")

    def _refuse_unless_paused(self, what: str) -> None:
        if self.state != "paused":
            raise _conflict(f"the engine is {self.state}; pause it before {what}", code="not_paused")

    # -- helpers ----------------------------------------------------------------

    def _end(self, ids: list[int], cause: Cause) -> dict[int, int]:
        sequences = self._scheduler.sequences
        ended = {id: sequences[id].output_len for id in ids if id in sequences}
        self._scheduler.abort(list(ended), cause)
        return ended

    def _engine_state(
        self, began_s: float, *, ended: dict[int, int] | None = None, forced: list[int] | None = None
    ) -> EngineState:
        scheduler = self._scheduler
        return EngineState(
            state=self.state,
            mode=self.mode,
            rejecting=self.rejecting,
            version=scheduler.version,
            ended=ended or {},
            forced=forced or [],
            held=self._holding(),
            elapsed_s=scheduler.now_s - began_s,
            asleep=self._resources.asleep,
        )

    def _holding(self, ids: Collection[int] | None = None) -> list[int]:
        """Ids of sequences that have ended and still have blocks; only those in `ids`, if given."""
        return [seq.id for seq in self._scheduler.returning if ids is None or seq.id in ids]

    def list_sequences(self) -> list[SequenceStatus]:
        return [self._sequence_status(seq) for seq in self._scheduler.sequences.values()]

    def _sequence_status(self, seq: Sequence) -> SequenceStatus:
        return SequenceStatus(
            id=seq.id,
            phase="preempted" if seq.preempted else seq.phase.name.lower(),
            prompt_tokens=seq.prompt_len,
            output_tokens=seq.output_len,
            blocks=len(present(seq.blocks)),
            age_s=self._scheduler.now_s - seq.arrived_s,
            priority=seq.request.priority,
        )


def _advance(job: ControlJob) -> Result | None:
    """Advance a command once; returns its result when it is done."""
    try:
        next(job.program)
    except StopIteration as done:
        result: Result = done.value
        return result
    except RequestError as error:
        return Denied(error.status, error.code, error.message)
    return None


def _identify(source: Source) -> tuple[Source, Stamps] | None:
    """A value that is equal for equal weights; None if the weights do not come from files."""
    if not isinstance(source, FileSource) or not (found := stamps(source.path)):
        return None
    return source, found


def _refused(error: ModelError) -> RequestError:
    """The error for an update that changed nothing: the weights do not fit the model, or their source was lost."""
    refused = RequestError(f"the weights are refused and nothing has changed: {error}", code="bad_weights")
    if isinstance(error, SourceLost):
        refused.status, refused.code = 502, "source_lost"
    return refused


def _conflict(message: str, code: str = "conflict") -> RequestError:
    error = RequestError(message, code=code)
    error.status = 409
    return error
