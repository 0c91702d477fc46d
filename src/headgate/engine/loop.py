"""The loop: the only caller of the scheduler, and the one place where time enters the engine.

A turn: take what has arrived, commit the steps that have landed, launch the next one, and only then tell clients, so that
the device works while words travel. The loop sleeps in its inbox alone; a landed step, a message or the next deadline wakes
it, so an idle engine expires and answers like a busy one. It knows neither sockets nor asyncio.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from headgate.core.leases import Filled, Granted, Withdrawn
from headgate.core.scheduler import Scheduler
from headgate.engine.control import Control, DeviceResources
from headgate.engine.evidence import StepRecorder
from headgate.engine.post import sort_by_client
from headgate.errors import EngineDead, RankLost, RequestError
from headgate.protocol.command import Stop
from headgate.protocol.message import (
    Abort,
    CommandAnswer,
    CommandCall,
    EngineStatus,
    Message,
    StepOutputs,
    Submit,
    Suspend,
)
from headgate.protocol.output import Refused
from headgate.protocol.plan import StepResult
from headgate.protocol.request import GenerateRequest
from headgate.transfer.transport import Event, Fetched, NoTransport, Released, Renewed, Transport

if TYPE_CHECKING:
    from headgate.device.executor import Executor  # which imports torch, and a simulated device needs none

# Longest sleep of an idle loop; leases are renewed and expire on a coarser scale than this.
IDLE_S = 1.0


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        send: Callable[[int, StepOutputs | CommandAnswer], None],
        *,
        resources: DeviceResources,
        transport: Transport | None = None,
        recorder: StepRecorder | None = None,
        run_ahead: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._send = send
        self._run_ahead = run_ahead  # steps on the device at once; more hides scheduling, fewer makes aborts quicker
        self._clock = clock
        self._inbox: SimpleQueue[Message | Event | None] = SimpleQueue()
        self._transport = transport or NoTransport()
        self._steps: deque[Future[StepResult]] = deque()
        self._refused: list[Refused] = []
        self._recorder = recorder or StepRecorder()
        self._closed = False
        self._failure: RankLost | None = None
        self._abort_messages = 0
        self.control = Control(
            scheduler, resources=resources, settle_transfers=self._settle_transfers, tell=self._tell, wake=self.wake
        )
        scheduler.tick(clock())
        scheduler.pool.move_horizon()  # nothing is older than the engine
        self.status = self._look()  # replaced whole every turn, so any thread may read it
        self._transport.start(self.post)

    def post(self, message: Message | Event) -> None:
        """Hand the loop a message; may be called from any thread, and never blocks."""
        self._inbox.put(message)

    def close(self) -> None:
        """Make `run` return after its current turn; may be called from any thread."""
        self._closed = True
        self.wake()

    def fail(self, error: RankLost) -> None:
        """The device is not whole any more, though no step may have told: the next turn raises `error`. From any thread."""
        self._failure = error
        self.wake()

    @property
    def closed(self) -> bool:
        """Nothing will ever happen here again."""
        return self._closed

    def wake(self) -> None:
        """End the loop's sleep; safe in any thread and in a signal handler."""
        self._inbox.put(None)

    def run(self) -> None:
        while not self._closed:
            self.turn()

    def turn(self) -> None:
        """Wait for something to happen, and deal with all that has. What comes out of it is a bug, and the end."""
        if self._closed:
            raise EngineDead("the engine is closed")
        try:
            self._turn()
        except Exception as error:
            if not self._closed:
                self._closed = True
                # A process that was killed is no bug of ours, and our last plans have nothing to say about it.
                if not isinstance(error, RankLost):
                    self._recorder.write(error, self.scheduler, self.control.state, self.control.look())
            raise

    def _turn(self) -> None:
        messages = self._receive()
        if self._failure is not None:
            raise self._failure
        for event in messages:
            # Before the clock: whoever renewed a lease in time keeps it, however long we have been away.
            if isinstance(event, Event):
                self._moved(event)
        self.scheduler.tick(self._clock())
        for message in messages:
            if not isinstance(message, Event):
                self._handle(message)
        self._commit()
        self._launch()
        self._tell()
        self._answer()
        self._inform_transport()
        self.status = self._look()

    def quiet(self) -> tuple[float, EngineStatus]:
        """Seconds since the last turn, and the status then; may be called from any thread."""
        status = self.status
        return self._clock() - status.turn_s, status

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, and nothing is on its way home."""
        scheduler = self.scheduler
        return not (scheduler.sequences or scheduler.leaving or self._steps)

    def _look(self) -> EngineStatus:
        scheduler, counters = self.scheduler, self.scheduler.counters
        return EngineStatus(
            scheduler.now_s,
            bool(self._steps),
            scheduler.version,
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pool.held,
            scheduler.pool.cached,
            counters.preemptions,
            counters.prompt_tokens,
            counters.cached_tokens,
            self.control.state,
            self.control.asleep,
            self.control.mode,
            self.control.rejecting,
            self._abort_messages,
            counters.output_tokens,
            scheduler.pool.horizon_s,
            len(scheduler.leases),
            scheduler.leases.blocks,
            counters.leases_expired,
            counters.transfers,
            counters.transfers_lost,
            counters.rescheduled,
            self._transport.counts(),
            scheduler.fetches,
        )

    # -- in ---------------------------------------------------------------------

    def _receive(self) -> list[Message | Event]:
        """All that has arrived, after a sleep if nothing has. `None` only wakes us."""
        messages: list[Message | Event | None] = []
        with suppress(Empty):
            messages.append(self._inbox.get(timeout=self._sleep_s()))
            while True:
                messages.append(self._inbox.get_nowait())
        return [message for message in messages if message is not None]

    def _sleep_s(self) -> float:
        next_s = min(self.scheduler.next_deadline_s, self.control.next_deadline_s)
        return min(max(next_s - self._clock(), 0), IDLE_S)

    def _handle(self, message: Message) -> None:
        match message:
            case Submit(requests):
                for request in requests:
                    self._submit(request)
            case Abort(ids, cause):
                self._abort_messages += 1
                self.scheduler.abort(ids, cause)
            case Suspend(ids, suspended):
                self.scheduler.suspend(ids, suspended=suspended)
            case CommandCall(client, number, command):
                self._abort_messages += isinstance(command, Stop)
                self.control.start(client, number, command)

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self.control.refuse_if_held(accepted=request.accepted)
            self.scheduler.add(_seeded(request))
            if request.ticket is not None:
                self._transport.attach(request.id, request.ticket)
        except RequestError as error:
            self._refused.append(Refused(request.id, error.status, error.code, error.message, error.param))

    # -- the device -------------------------------------------------------------

    def _commit(self) -> None:
        while self._steps and self._steps[0].done():
            result = self._steps.popleft().result()
            self._recorder.landed(result)
            self.scheduler.commit(result)

    def _launch(self) -> None:
        while len(self._steps) < self._run_ahead and (plan := self.scheduler.schedule()):
            # Before the plan can touch a block that was lent until now.
            self._inform_transport()
            self._recorder.planned(plan)
            for fetch in plan.fetches:
                self._transport.fetch(fetch)
            if plan.rows:
                step = self.executor.launch(plan)
                self._steps.append(step)
                step.add_done_callback(lambda _: self.wake())

    # -- other engines ------------------------------------------------------------

    def _moved(self, event: Event) -> None:
        match event:
            case Fetched(id, ok):
                self.scheduler.transfer_done(id, ok)
            case Renewed(lease, generation, until_s):
                self.scheduler.leases.renew(lease, generation, until_s)
            case Released(lease, generation, fetched):
                self.scheduler.end_lease(lease, generation, fetched=fetched)

    def _inform_transport(self) -> None:
        for news in self.scheduler.leases.take_news():
            match news:
                case Granted(lease):
                    self._transport.offer(lease.id, lease.generation, lease.version, lease.blocks)
                case Filled(id, blocks):
                    self._transport.fill(id, blocks)
                case Withdrawn(id):
                    self._transport.withdraw(id)
        unwanted, self.scheduler.unwanted = self.scheduler.unwanted, []
        for id in unwanted:
            self._transport.leave(id)

    def _settle_transfers(self) -> Future[None]:
        self._inform_transport()  # nobody else shall come
        return self._transport.settle()

    # -- out --------------------------------------------------------------------

    def _tell(self) -> None:
        outputs = self.scheduler.take_outputs()
        outputs.refused, self._refused = self._refused, []
        if outputs:
            for client, share in sort_by_client(outputs):
                self._send(client, StepOutputs(share))

    def _answer(self) -> None:
        for job, result in self.control.advance():
            # A command may have ended sequences; its clients hear that before its caller does.
            self._tell()
            self.status = self._look()  # whoever hears the answer may look at once, from another thread
            self._send(job.client, CommandAnswer(job.number, result))


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """A request that did not say which random stream is its own gets one. Only one that did can be resumed exactly."""
    if request.sampling.seed is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, sampling=sampling)
