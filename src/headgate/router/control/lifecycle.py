"""Pauses, resumes, sleep and cache flushes of the whole fleet: the same operations as on one server, for all workers.

A call succeeds or fails as a whole. The status is 200 if every worker has carried it out, and 202 if only workers
that are down have not. If a worker that is up has not, the answer is an error that names such workers (`results.py`).
The latest pause is kept for workers that come back (`fleet/catch_up.py`). While weights or memory change
(`weights.py`), no other control call starts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from headgate.contract.control import ControlBody, FleetResult, MemoryRequest, PauseRequest, Refusal, RequestName
from headgate.contract.operations import control as control_ops
from headgate.contract.operations.operation import Operation
from headgate.contract.orders import ONLY_IF_HEADER, ORDER_HEADER, OWN, RUNNING, UNRESUMED
from headgate.router.control.abort import end_at_removed_workers
from headgate.router.control.fan_out import (
    SLACK_S,
    CallerHeaders,
    WorkerCall,
    WorkerReply,
    all_refuse,
    call_of,
    is_down,
    to_all,
)
from headgate.router.control.results import ControlReport, RouterResult, count_requests, merge, require_all
from headgate.router.exchange.ending import PAUSE
from headgate.router.exchange.relay import NoWorker
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.router import Router

log = logging.getLogger(__name__)

CLIENT_WAIT_S = 2.0  # how long a call waits until clients have received the ends of aborted requests
MIN_CLIENT_WAIT_S = 0.5  # shortest such wait, because ends may arrive after the workers' replies
MIN_TIMEOUT_S = 0.05  # shortest time that a worker gets to answer

ONLY_IF_OWN = ONLY_IF_HEADER.encode(), OWN.encode()
ONLY_IF_RUNNING = ONLY_IF_HEADER.encode(), RUNNING.encode()
ONLY_IF_UNRESUMED = ONLY_IF_HEADER.encode(), UNRESUMED.encode()

encode = msgspec.json.Encoder().encode

GET_STATUS = call_of(control_ops.IS_PAUSED, reads=ControlReport)


class FleetControls:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._fleet = router.fleet
        self._exclusive: str | None = None  # description of the change of weights or memory in progress
        self._in_progress = 0  # number of control calls
        self._resuming = asyncio.Lock()
        self._name = secrets.token_hex(8)  # identifies this process to the workers
        self._orders = count(1)
        self.unanswered_resumes: dict[Worker, WorkerCall] = {}  # sent again until the worker answers
        # Pauses in effect or in progress, with the requests that were accepted before each; the last one counts.
        self._pauses: list[tuple[PauseRequest, tuple[Exchange, ...]]] = []
        self.paused: set[Worker] = set()  # workers that have carried out the current pause
        self.late: set[Worker] = set()  # those that did so after the call
        self.restarted: set[Worker] = set()  # workers that carried out the pause and have restarted since
        self._fleet.on_restart = self._note_restart

    # -- operations -------------------------------------------------------------------

    async def pause(self, body: PauseRequest, caller: CallerHeaders) -> RouterResult:
        self.refuse_while_exclusive()
        self._refuse_if_empty()
        began_s = self._router.loop.time()
        due_s = began_s + body.timeout
        with self.in_progress():
            async with self._not_resuming(due_s):
                self._refuse_if_empty()
                accepted = self.hold(body)
                call = self.ordered(control_ops.PAUSE, encode(body))
                calls = to_all(self._fleet, call)
            replies = await self._router.worker_calls.fan_out(calls, caller, self.remaining_s(due_s) + SLACK_S)
            async with self._not_resuming(due_s + SLACK_S):
                if not self.conclude_pause(body, replies):  # a later call has made the replies outdated
                    return self._mark_pending(await self.status(caller, self.remaining_s(due_s)))
            ended = await self.end_accepted(body, accepted, caller, due_s + SLACK_S)
        result = self.merge(replies)
        results: list[FleetResult] = [reply.answer.result for reply in replies if reply.ok]
        result.aborted, result.finished = count_requests(results, ended)
        result.forced = [id for each in results for id in each.forced or ()]
        if body.clear_cache is True:
            self.forget_prefixes(reply.worker for reply in replies if reply.ok)
            result.blocks = sum(each.blocks or 0 for each in results)
        result.elapsed_s = round(self._router.loop.time() - began_s, 6)
        return require_all(result, replies)

    def _mark_pending(self, result: RouterResult) -> RouterResult:
        """Adjust the result of a pause that a later one has replaced: workers that run must still follow the later one."""
        for outcome in result.workers.values() if self.current_pause is not None else ():
            if outcome.state in ("running", "pausing") and outcome.error is UNSET:
                outcome.error, outcome.code = "it has not followed the latest pause yet", "accepted"
        return result

    async def resume(self, body: ControlBody, caller: CallerHeaders) -> RouterResult:
        self.refuse_while_exclusive()
        due_s = self._router.loop.time() + body.timeout
        with self.in_progress():
            async with self._not_resuming(due_s):
                try:
                    replies = await self._resume_all(caller, self.remaining_s(due_s))
                    result = self.merge(replies)
                finally:
                    self.release()
        return require_all(result, replies)

    async def _resume_all(self, caller: CallerHeaders, left_s: float) -> list[WorkerReply]:
        call = self.ordered(control_ops.RESUME, encode({"timeout": left_s}))
        replies = await self._ask_all(call, caller, left_s + SLACK_S)
        for reply in replies:
            self._note_resume(reply, call)
        return replies

    async def resume_one(self, worker: Worker, caller: CallerHeaders, *only_if: tuple[bytes, bytes]) -> WorkerReply:
        call = self.ordered(control_ops.RESUME, b"", *only_if)
        reply = await self._router.worker_calls.ask(worker, call, caller, self.patience_s)
        self._note_resume(reply, call)
        return reply

    def _note_resume(self, reply: WorkerReply, call: WorkerCall) -> None:
        """Keep a resume that the worker has not answered. It is repeated later, unless the worker is paused first."""
        if not reply.status:
            self.unanswered_resumes[reply.worker] = replace(call, order=(call.order[0], ONLY_IF_OWN))

    def ordered(self, operation: Operation, body: bytes = b"", *only_if: tuple[bytes, bytes]) -> WorkerCall:
        """Return a numbered pause or resume. A worker that has already received a later one refuses it."""
        return call_of(operation, body, ControlReport, (self.next_order(), *only_if))

    def next_order(self) -> tuple[bytes, bytes]:
        return ORDER_HEADER.encode(), f"{self._name}:{next(self._orders)}".encode()

    async def status(self, caller: CallerHeaders, timeout_s: float | None = None) -> RouterResult:
        patience_s = self.patience_s if timeout_s is None else min(timeout_s, self.patience_s)
        return self.merge(await self._ask_all(GET_STATUS, caller, patience_s))

    async def sleep(self, body: MemoryRequest, caller: CallerHeaders) -> RouterResult:
        return await self._change_memory(control_ops.SLEEP, "the fleet is being put to sleep", body, caller)

    async def wake(self, body: MemoryRequest, caller: CallerHeaders) -> RouterResult:
        return await self._change_memory(control_ops.WAKEUP, "the fleet is being woken", body, caller)

    async def flush(self, body: ControlBody, caller: CallerHeaders) -> RouterResult:
        call = call_of(control_ops.FLUSH_CACHE, encode(body), ControlReport)
        replies = await self._ask_all(call, caller, body.timeout + SLACK_S)
        self.forget_prefixes(reply.worker for reply in replies if reply.ok)
        result = self.merge(replies)
        result.blocks = sum(reply.answer.result.blocks or 0 for reply in replies if reply.ok)
        return require_all(result, replies)

    async def _change_memory(
        self, operation: Operation, what: str, body: MemoryRequest, caller: CallerHeaders
    ) -> RouterResult:
        async with self.exclusive(what):
            call = call_of(operation, encode(body), ControlReport)
            replies = await self._ask_all(call, caller, body.timeout + SLACK_S)
            self.forget_prefixes(reply.worker for reply in replies if reply.ok)
            return require_all(self.merge(replies), replies)

    # -- pauses, also for compatible APIs ---------------------------------------------

    @property
    def current_pause(self) -> PauseRequest | None:
        """The latest pause of the fleet; None if it should run."""
        return self._pauses[-1][0] if self._pauses else None

    def hold(self, pause: PauseRequest) -> tuple[Exchange, ...]:
        """Stop placing requests. Returns the requests that were accepted before."""
        self.unanswered_resumes.clear()
        accepted = self._router.hold(queue=pause.new_requests == "queue", mode=pause.mode)
        self._pauses.append((pause, accepted))
        return accepted

    async def end_accepted(
        self, pause: PauseRequest, accepted: Sequence[Exchange], caller: CallerHeaders, due_s: float
    ) -> list[RequestName]:
        """Complete a pause of mode `abort`: end the accepted requests that no worker has ended. Returns their names.

        Called after the workers have answered, because a pause that every worker refuses must not end requests.
        """
        ended: set[Exchange] = set()
        if pause.mode == "abort" and self.current_pause is pause:
            await self._end([each for each in _unended(accepted) if each.worker is None], due_s)
            ended = await self._end_at_removed_workers(_unended(accepted), caller, due_s)
            wait_s = max(pause.timeout, MIN_CLIENT_WAIT_S)
            await self._wait_over(_unended(accepted), min(due_s, self._router.loop.time() + wait_s))
            # Either their workers queue them, because the pause arrived there first, or the pause does not reach them.
            await self._end([each for each in _unended(accepted) if self._ends_only_here(each)], due_s)
        return [(each.tenant, each.id) for each in accepted if each.ended_by_pause or each in ended]

    async def _end_at_removed_workers(
        self, exchanges: Iterable[Exchange], caller: CallerHeaders, due_s: float
    ) -> set[Exchange]:
        """End requests at removed workers. The pause does not reach these workers, but only they have the answers' text."""
        removed = [each for each in exchanges if each.worker is not None and each.worker not in self._fleet]
        timeout_s = min(due_s - SLACK_S - self._router.loop.time(), CLIENT_WAIT_S)
        if not removed or timeout_s <= 0:
            return set()
        return await end_at_removed_workers(self._router, removed, PAUSE, caller, timeout_s)

    def _ends_only_here(self, exchange: Exchange) -> bool:
        """Whether no worker will end the request. If only the client is slow, the worker has already ended it."""
        worker = exchange.worker
        if worker is None or exchange.is_untouched:
            return True
        return (worker not in self._fleet or is_down(worker)) and not exchange.full

    async def _end(self, exchanges: Sequence[Exchange], due_s: float) -> None:
        for exchange in exchanges:
            exchange.end(PAUSE)
        await self._wait_over(exchanges, due_s)

    async def _wait_over(self, exchanges: Iterable[Exchange], due_s: float) -> None:
        if ends := [exchange.when_over() for exchange in exchanges]:
            await asyncio.wait(ends, timeout=min(CLIENT_WAIT_S, self.remaining_s(due_s)))

    def conclude_pause(self, pause: PauseRequest, replies: Sequence[WorkerReply]) -> bool:
        """Record which workers have paused; withdraw the pause if all have refused it.

        Returns False if the fleet was resumed or paused again while the workers were asked.
        """
        latest = self.current_pause is pause
        if not replies or all_refuse(replies):
            self.withdraw(pause)
        elif latest:
            self._pauses = self._pauses[-1:]
            followed = {reply.worker: reply.boot_id for reply in replies if reply.ok}
            # A worker that has restarted since its answer is not paused.
            self.restarted = {worker for worker, boot_id in followed.items() if worker.boot_id != boot_id}
            self.paused = followed.keys() - self.restarted
            self.late.clear()
        return latest

    def note_paused(self, worker: Worker) -> None:
        """Record that a worker has carried out the current pause after the call."""
        self.paused.add(worker)
        self.late.add(worker)

    def _note_restart(self, worker: Worker) -> None:
        if worker in self.paused:
            self.paused.discard(worker)
            self.late.discard(worker)
            self.restarted.add(worker)

    def withdraw(self, pause: PauseRequest) -> None:
        """Cancel this pause. If it was the latest, restore the one before it, or release the fleet."""
        was_latest = self.current_pause is pause
        self._pauses = [each for each in self._pauses if each[0] is not pause]
        if not self._pauses:
            self.release()
        elif was_latest:
            earlier, accepted = self._pauses[-1]
            self._router.hold_again(accepted, queue=earlier.new_requests == "queue", mode=earlier.mode)

    def release(self) -> None:
        self._pauses.clear()
        self.paused.clear()
        self.late.clear()
        self.restarted.clear()
        self._router.release()

    def release_for(self, resumed: Worker) -> None:
        """End the pause because another caller has resumed the fleet, as the state of `resumed` shows.

        A worker that paused late may have done so after that resume. It is resumed, unless another caller has paused
        it.
        """
        log.warning("%s was resumed by another caller; the pause of the fleet ends", resumed.name)
        late = [worker for worker in self._fleet if worker in self.late]
        self.release()
        self.unanswered_resumes |= {
            worker: self.ordered(control_ops.RESUME, b"", ONLY_IF_OWN) for worker in late if worker is not resumed
        }

    # -- shared parts -----------------------------------------------------------------

    def merge(self, replies: Sequence[WorkerReply]) -> RouterResult:
        return merge(self._router, replies, pause_wanted=self.current_pause is not None)

    def check(self, replies: Sequence[WorkerReply]) -> None:
        """Raise unless every worker that is up has carried out the call."""
        require_all(self.merge(replies), replies)

    def forget_prefixes(self, workers: Iterable[Worker]) -> None:
        now_s = self._fleet.clock()
        for worker in workers:
            worker.horizon_s = max(worker.horizon_s, now_s)

    async def probe(self, worker: Worker) -> None:
        assert self._router.probe is not None
        await self._router.probe(worker)

    async def probe_all(self) -> None:
        await asyncio.gather(*(self.probe(worker) for worker in self._fleet))

    @property
    def patience_s(self) -> float:
        return self._router.config.control_timeout_s

    def remaining_s(self, due_s: float) -> float:
        """Return the time until `due_s`, but never less than MIN_TIMEOUT_S, so that a worker can still answer."""
        return max(due_s - self._router.loop.time(), MIN_TIMEOUT_S)

    def workers_up(self) -> list[Worker]:
        return [worker for worker in self._fleet if worker.state != "down"]

    async def _ask_all(self, call: WorkerCall, caller: CallerHeaders, timeout_s: float) -> list[WorkerReply]:
        self._refuse_if_empty()
        return await self._router.worker_calls.fan_out(to_all(self._fleet, call), caller, timeout_s)

    def _refuse_if_empty(self) -> None:
        if not len(self._fleet):
            raise NoWorker("there is no worker; POST /v1/workers adds one")

    @property
    def idle(self) -> bool:
        """Whether no control call is in progress."""
        return not self._in_progress

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1

    @asynccontextmanager
    async def _not_resuming(self, due_s: float) -> AsyncIterator[None]:
        """Wait until no resume of the fleet is in progress, and prevent resumes inside the context."""
        try:
            async with asyncio.timeout_at(due_s):
                await self._resuming.acquire()
        except TimeoutError:
            raise Refusal(409, "resuming", "the fleet is being resumed; try again when that is done") from None
        try:
            yield
        finally:
            self._resuming.release()

    @asynccontextmanager
    async def exclusive(self, what: str) -> AsyncIterator[None]:
        """Reserve the fleet for a change of weights or memory. Other control calls are refused with `what` as reason."""
        self.refuse_while_exclusive()
        self._exclusive = what
        try:
            with self.in_progress():
                yield
        finally:
            self._exclusive = None

    def refuse_while_exclusive(self) -> None:
        if self._exclusive is not None:
            raise Refusal(409, "updating", f"{self._exclusive}; try again when that is done")


def _unended(accepted: Iterable[Exchange]) -> list[Exchange]:
    """Return the requests that a pause should still end. There are none if the fleet was resumed meanwhile."""
    foreign = ("sglang", "vllm")
    held = [exchange for exchange in accepted if exchange.held == "abort" and not exchange.over]
    return [each for each in held if each.worker is None or each.worker.kind not in foreign]
