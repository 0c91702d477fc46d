"""The step loop: the only caller of the scheduler, and the only place where the engine reads the clock.

A turn handles the messages that have arrived, commits the steps that have landed, launches the next step, and sends
outputs last, so that the device works while messages travel. The loop sleeps only while it waits for its inbox. A
landed step, a message or the next deadline wakes it, so deadlines and messages are handled as promptly in an idle
engine as in a busy one. The loop uses neither sockets nor asyncio.
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
from headgate.engine.collecting import Wires
from headgate.engine.control import Control, DeviceResources
from headgate.engine.evidence import StepRecorder
from headgate.engine.outputs import split_by_client
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
    from headgate.device.executor import Executor  # this module imports torch, which a simulated device does not need

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
        wires: Wires | None = None,
        transport: Transport | None = None,
        recorder: StepRecorder | None = None,
        run_ahead: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._send = send
        self._run_ahead = run_ahead  # most steps in flight: more hide scheduling time, fewer speed up aborts
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
            scheduler,
            resources=resources,
            wires=wires,
            settle_transfers=self._settle_transfers,
            send_outputs=self._send_outputs,
            wake=self.wake,
        )
        scheduler.tick(clock())
        scheduler.pool.move_horizon()  # nothing was cached before the engine started
        self.status = self._build_status()  # replaced as a whole every turn, so any thread may read it
        self._transport.start(self.post)

    def post(self, message: Message | Event) -> None:
        """Queue a message for the loop. Any thread may call it; it never blocks."""
        self._inbox.put(message)

    def close(self) -> None:
        """Make `run` return after its current turn. Any thread may call it."""
        self._closed = True
        self.wake()

    def fail(self, error: RankLost) -> None:
        """Make the next turn raise `error`, even if no step has failed yet. Any thread may call it."""
        self._failure = error
        self.wake()

    @property
    def closed(self) -> bool:
        """Whether the loop has ended: no further turn will run."""
        return self._closed

    def wake(self) -> None:
        """End the loop's sleep. Safe in any thread and in a signal handler."""
        self._inbox.put(None)

    def run(self) -> None:
        while not self._closed:
            self.turn()

    def turn(self) -> None:
        """Wait for messages or a landed step, and handle them. An exception is a bug and ends the engine."""
        if self._closed:
            raise EngineDead("the engine is closed")
        try:
            self._turn()
        except Exception as error:
            if not self._closed:
                self._closed = True
                # A rank that was killed is not a bug in this process, and the last plans do not explain it.
                if not isinstance(error, RankLost):
                    self._recorder.write(error, self.scheduler, self.control.state, self.control.list_sequences())
            raise

    def _turn(self) -> None:
        messages = self._receive()
        if self._failure is not None:
            raise self._failure
        for event in messages:
            # Renewals are handled before the clock is read: a lease renewed in time survives a slow turn.
            if isinstance(event, Event):
                self._handle_transfer(event)
        self.scheduler.tick(self._clock())
        for message in messages:
            if not isinstance(message, Event):
                self._handle(message)
        self._commit()
        self._launch()
        self._send_outputs()
        self._answer_commands()
        self._inform_transport()
        self.status = self._build_status()

    def quiet(self) -> tuple[float, EngineStatus]:
        """Seconds since the last turn, and the status then. Any thread may call it."""
        status = self.status
        return self._clock() - status.turn_s, status

    @property
    def idle(self) -> bool:
        """Whether no sequence runs, waits, or still owns a row or blocks."""
        scheduler = self.scheduler
        return not (scheduler.sequences or scheduler.leaving or self._steps)

    def _build_status(self) -> EngineStatus:
        scheduler, counters, control = self.scheduler, self.scheduler.counters, self.control
        return EngineStatus(
            turn_s=scheduler.now_s,
            busy=bool(self._steps),
            version=scheduler.version,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            held_blocks=scheduler.pool.held,
            cached_blocks=scheduler.pool.cached,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            state=control.state,
            asleep=control.asleep,
            mode=control.mode,
            rejecting=control.rejecting,
            abort_messages=self._abort_messages,
            output_tokens=counters.output_tokens,
            horizon_s=scheduler.pool.horizon_s,
            leases=len(scheduler.leases),
            leased_blocks=scheduler.leases.blocks,
            leases_expired=counters.leases_expired,
            transfers=counters.transfers,
            transfers_lost=counters.transfers_lost,
            rescheduled=counters.rescheduled,
            moved=self._transport.counts(),
            fetches=scheduler.fetches,
        )

    # -- messages in ---------------------------------------------------------

    def _receive(self) -> list[Message | Event]:
        """All messages that have arrived, after a sleep if there are none. `None` only ends the sleep."""
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
            # The transport must be notified of ended leases before the plan can overwrite their blocks.
            self._inform_transport()
            self._recorder.planned(plan)
            for fetch in plan.fetches:
                self._transport.fetch(fetch)
            if plan.rows:
                step = self.executor.launch(plan)
                self._steps.append(step)
                step.add_done_callback(lambda _: self.wake())

    # -- other engines ------------------------------------------------------------

    def _handle_transfer(self, event: Event) -> None:
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
        self._inform_transport()  # withdraws all leases, so that no other engine starts to fetch
        return self._transport.settle()

    # -- outputs ----------------------------------------------------------------

    def _send_outputs(self) -> None:
        outputs = self.scheduler.take_outputs()
        outputs.refused, self._refused = self._refused, []
        if outputs:
            for client, share in split_by_client(outputs):
                self._send(client, StepOutputs(share))

    def _answer_commands(self) -> None:
        for job, result in self.control.advance():
            # A command may have ended sequences; their terminal outputs are sent before the command's answer.
            self._send_outputs()
            self.status = self._build_status()  # the caller may read the status as soon as it has the answer
            self._send(job.client, CommandAnswer(job.number, result))


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """Draw a seed for a request that has none. Only a request that brought a seed can be resumed exactly."""
    if request.sampling.seed is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, sampling=sampling)
