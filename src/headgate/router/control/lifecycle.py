"""Holding the whole fleet, changing its weights, putting it to sleep: the same verbs as on one server, for all workers.

A call is all or nothing from the caller's point of view: 200 if every worker has followed, 202 if those that are down are
still to, and an error that names who has not if one could but did not. What the fleet was asked is remembered for those
who come back (`following`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict

from headgate.contract.control import (
    ControlBody,
    EngineOutcome,
    FleetResult,
    FleetUpdate,
    MemoryRequest,
    PauseRequest,
    Refusal,
    overall,
    source_of,
)
from headgate.contract.operations import control as control_ops
from headgate.contract.operations import vllm as vllm_ops
from headgate.contract.operations.operation import Operation
from headgate.contract.orders import ONLY_IF_HEADER, ORDER_HEADER, OWN, RUNNING
from headgate.errors import RequestError
from headgate.router.control.abort import end_at_leaving
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
from headgate.router.exchange.ending import PAUSE
from headgate.router.exchange.relay import NoWorker
from headgate.router.fleet.monitor import STATES
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.router import Router

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0  # for clients of what workers have ended to be answered
ACCEPTED = 202  # a worker's own word for: not all of my engines yet
LEAST_S = 0.05  # for a worker to answer

ONLY_IF_OWN = ONLY_IF_HEADER.encode(), OWN.encode()
ONLY_IF_RUNNING = ONLY_IF_HEADER.encode(), RUNNING.encode()

encode = msgspec.json.Encoder().encode


class ControlReport(msgspec.Struct):
    """A worker's answer to a control call."""

    result: FleetResult


class WorldSize(msgspec.Struct):
    world_size: Annotated[int, Meta(ge=0, le=1_000_000)]


LOOK = call_of(control_ops.IS_PAUSED, reads=ControlReport)
SIZE = call_of(vllm_ops.GET_WORLD_SIZE, reads=WorldSize)


class WorkerOutcome(msgspec.Struct, kw_only=True):
    state: str  # the worker's, or down
    weight_version: int | UnsetType = UNSET
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET


class EngineAt(EngineOutcome, kw_only=True):
    worker: str


class RouterResult(FleetResult, kw_only=True):
    workers: dict[str, WorkerOutcome]


class Partial(RequestError):
    """Some workers have followed, and others have not."""

    status = 502
    code = "partial"

    def __init__(self, message: str, result: RouterResult, *, status: int = 502, code: str = "partial") -> None:
        super().__init__(message, code=code)
        self.status = status
        self.result = result


class FleetControls:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._fleet = router.fleet
        self._moving: str | None = None  # what is moving weights or memory
        self._verbs = 0  # calls in progress
        self._resuming = asyncio.Lock()
        self._name = secrets.token_hex(8)  # of this process, to the workers
        self._orders = count(1)
        self.owed: dict[Worker, WorkerCall] = {}  # a resume that this worker has not answered
        self._asked: list[PauseRequest] = []  # pauses that hold, or may yet be refused by all; the last one counts
        self.paused: set[Worker] = set()  # who has followed
        self._fleet.on_restart = lambda worker: self.paused.discard(worker)
        self.update_asked: dict[str, Any] | None = None  # the body of the last one that others can be given too
        self._given: dict[Worker, bytes] = {}  # the update that each has been given last

    # -- verbs ------------------------------------------------------------------------

    async def pause(self, body: PauseRequest, asking: CallerHeaders) -> RouterResult:
        self.refuse_while_moving()
        self._refuse_if_empty()
        began_s = self._router.loop.time()
        due_s = began_s + body.timeout
        with self.busy():
            async with self._alone(due_s):
                self._refuse_if_empty()
                accepted = self.hold(body)
                call = self.ordered(control_ops.PAUSE, encode(body))
                calls = to_all(self._fleet, call)
            replies = await self._router.worker_calls.fan_out(calls, asking, self._left_s(due_s) + SLACK_S)
            async with self._alone(due_s + SLACK_S):
                if not self.judge_pause(body, replies):  # what was told is old
                    return self._pending(await self.look(asking, self._left_s(due_s)))
            ended = await self.end_accepted(body, accepted, asking, due_s + SLACK_S)
        result = self._result(replies)
        told: list[FleetResult] = [reply.told.result for reply in replies if reply.ok]
        result.aborted = ended + sum(each.aborted or 0 for each in told)
        result.finished = sum(each.finished or 0 for each in told)
        result.forced = [id for each in told for id in each.forced or ()]
        result.elapsed_s = round(self._router.loop.time() - began_s, 6)
        return self._checked(result, replies)

    def _pending(self, result: RouterResult) -> RouterResult:
        """Where the fleet stands after a pause that another one has replaced: workers that run are to follow that one."""
        for outcome in result.workers.values() if self.pause_asked is not None else ():
            if outcome.state in ("running", "pausing") and outcome.error is UNSET:
                outcome.error, outcome.code = "it has not followed the latest pause yet", "accepted"
        return result

    async def resume(self, body: ControlBody, asking: CallerHeaders) -> RouterResult:
        self.refuse_while_moving()
        due_s = self._router.loop.time() + body.timeout
        with self.busy():
            async with self._alone(due_s):
                try:
                    replies = await self._resume_all(asking, self._left_s(due_s))
                    result = self._result(replies)
                finally:
                    self.release()
        return self._checked(result, replies)

    async def _resume_all(self, asking: CallerHeaders, left_s: float) -> list[WorkerReply]:
        call = self.ordered(control_ops.RESUME, encode({"timeout": left_s}))
        replies = await self._all(call, asking, left_s + SLACK_S)
        for reply in replies:
            self.owe(reply, call)
        return replies

    def owe(self, reply: WorkerReply, call: WorkerCall) -> None:
        """A worker that has not answered a resume is resumed when it answers, unless it is paused anew until then."""
        if not reply.status:
            self.owed[reply.worker] = replace(call, order=(call.order[0], ONLY_IF_OWN))

    def ordered(self, operation: Operation, body: bytes = b"", *only_if: tuple[bytes, bytes]) -> WorkerCall:
        """A pause or a resume; a worker that gets it after a later one refuses it."""
        return call_of(operation, body, ControlReport, (self.next_order(), *only_if))

    def next_order(self) -> tuple[bytes, bytes]:
        return ORDER_HEADER.encode(), f"{self._name}:{next(self._orders)}".encode()

    async def look(self, asking: CallerHeaders, timeout_s: float | None = None) -> RouterResult:
        patience_s = self.patience_s if timeout_s is None else min(timeout_s, self.patience_s)
        return self._result(await self._all(LOOK, asking, patience_s))

    async def sleep(self, body: MemoryRequest, asking: CallerHeaders) -> RouterResult:
        return await self._move_memory(control_ops.SLEEP, "the fleet is being put to sleep", body, asking)

    async def wake(self, body: MemoryRequest, asking: CallerHeaders) -> RouterResult:
        return await self._move_memory(control_ops.WAKEUP, "the fleet is being woken", body, asking)

    async def flush(self, body: ControlBody, asking: CallerHeaders) -> RouterResult:
        call = call_of(control_ops.FLUSH_CACHE, encode(body), ControlReport)
        replies = await self._all(call, asking, body.timeout + SLACK_S)
        self.forget_prefixes(reply.worker for reply in replies if reply.ok)
        result = self._result(replies)
        result.blocks = sum(reply.told.result.blocks or 0 for reply in replies if reply.ok)
        return self._checked(result, replies)

    async def _move_memory(
        self, operation: Operation, what: str, body: MemoryRequest, asking: CallerHeaders
    ) -> RouterResult:
        async with self._move(what):
            call = call_of(operation, encode(body), ControlReport)
            replies = await self._all(call, asking, body.timeout + SLACK_S)
            self.forget_prefixes(reply.worker for reply in replies if reply.ok)
            return self._checked(self._result(replies), replies)

    # -- weights ----------------------------------------------------------------------

    async def update(self, body: FleetUpdate, asking: CallerHeaders) -> RouterResult:
        source_of(body)  # refused before anybody is asked
        if body.strategy == "rolling":
            async with self._move("the weights are being updated, worker by worker"):
                return await self._roll(body, asking)
        async with self._move("the weights are being updated"):
            return await self._update_all(body, asking)

    async def _update_all(self, body: FleetUpdate, asking: CallerHeaders) -> RouterResult:
        due_s = self._router.loop.time() + body.timeout
        look = await self.look(asking, body.timeout)
        if unpaused := [url for url, told in look.workers.items() if told.state in ("running", "pausing")]:
            raise Partial(
                f"pause the fleet before an update; not paused: {', '.join(unpaused)}",
                look,
                status=409,
                code="not_paused",
            )
        version = self._new_version(body, look)
        calls = await self._updates(body, version, asking, self._left_s(due_s))
        had = [WorkerReply(worker, 200) for worker, one in calls.items() if self._has(worker, one, version)]
        for reply in had:
            del calls[reply.worker]
        replies = await self._router.worker_calls.fan_out(calls, asking, self._left_s(due_s) + SLACK_S)
        for reply in replies:
            self.note_update(reply, calls[reply.worker].body, version)
        result = self._result([*replies, *had])
        self._checked(result, replies)
        self.settle(_plain(body, version) if body.path is not None else None, version)
        result.weight_version = version
        if body.verify_checksum:
            result.checksum = body.verify_checksum
        return result

    def _new_version(self, body: FleetUpdate, look: RouterResult) -> int:
        """One number for all of them, whatever each has counted to."""
        if body.version is not None:
            return body.version
        return 1 + max(look.weight_version, self._fleet.wanted_version or 0)

    def _has(self, worker: Worker, one: WorkerCall, version: int) -> bool:
        """It has followed this very update before, when others did not."""
        return worker.version == version and self._given.get(worker) == one.body

    def note_update(self, reply: WorkerReply, body: bytes, version: int) -> None:
        if reply.ok and reply.status != ACCEPTED:
            self._given[reply.worker] = body
            self._fleet.set_version(reply.worker, version)
            self.forget_prefixes([reply.worker])

    def settle(self, update: dict[str, Any] | None, version: int) -> None:
        """Every worker that could has these weights: from now on nobody is asked who has not."""
        self.update_asked = update
        self._fleet.wanted_version = version
        self._fleet.set_floor()

    async def _updates(
        self, body: FleetUpdate, version: int, asking: CallerHeaders, timeout_s: float
    ) -> dict[Worker, WorkerCall]:
        """What each worker is told; in a trainer's group each of its engines has a rank of its own."""
        workers = self._able()
        if body.group is None:
            return to_all(workers, update_call(_plain(body, version)))
        plain, calls = _plain(body, version), {}
        group = body.group
        ranks = await share_ranks(self._router, workers, asking, group.rank, group.world_size, timeout_s)
        for worker, rank in ranks.items():
            calls[worker] = update_call(plain | {"group": plain["group"] | {"rank": rank}})
        return calls

    async def _roll(self, body: FleetUpdate, asking: CallerHeaders) -> RouterResult:
        """One worker after another; what it has finishes, or goes on elsewhere."""
        if body.group is not None:
            raise RequestError("a group takes all workers at once; use strategy all, or path", param="strategy")
        look = await self.look(asking)
        if self._router.holding or any(told.state != "running" for told in look.workers.values()):
            raise Partial(
                "a rolling update needs a running fleet; resume it, or use strategy all",
                look,
                status=409,
                code="not_running",
            )
        version, replies = self._new_version(body, look), []
        self._fleet.rolling = True
        try:
            for worker in self._able():
                if worker not in self._fleet:
                    continue  # it has left before its turn
                replies.append(await self._roll_one(worker, body, version, asking))
                if not replies[-1].ok:
                    return self._stopped(replies)
            self.settle(_plain(body, version), version)
        finally:
            self._fleet.rolling = False
            self._fleet.set_floor()
        return self._checked(self._result(replies), replies)

    async def _roll_one(self, worker: Worker, body: FleetUpdate, version: int, asking: CallerHeaders) -> WorkerReply:
        """Its last reply: the first that is no success, or else that it runs again."""
        log.info("%s gets version %d", worker.name, version)
        update = update_call(_plain(body, version))
        self._fleet.set_state(worker, "draining")
        drain = encode({"mode": "drain", "timeout": body.drain_timeout})
        pause = self.ordered(control_ops.PAUSE, drain)
        try:
            paused = await self._router.worker_calls.ask(worker, pause, asking, body.drain_timeout + SLACK_S)
            if not paused.ok:
                return paused
            updated = await self._router.worker_calls.ask(worker, update, asking, body.timeout + SLACK_S)
            self.note_update(updated, update.body, version)
            resumed = await self.resume_one(worker, asking)
            return resumed if updated.ok else updated
        finally:
            if worker in self._fleet:  # or it was removed meanwhile, and is to leave
                self._fleet.set_state(worker, "paused")
                await self.probe(worker)

    async def resume_one(self, worker: Worker, asking: CallerHeaders, *only_if: tuple[bytes, bytes]) -> WorkerReply:
        call = self.ordered(control_ops.RESUME, b"", *only_if)
        reply = await self._router.worker_calls.ask(worker, call, asking, self.patience_s)
        self.owe(reply, call)
        return reply

    def _stopped(self, replies: Sequence[WorkerReply]) -> RouterResult:
        last = replies[-1]
        share = f"{len(replies) - 1} of {len(self._able())} workers have it"
        message = f"the update stopped at {last.worker.name}: {last.error} ({share})"
        raise Partial(message, self._result(replies), status=502 if len(replies) > 1 else last.status or 502)

    def check(self, replies: Sequence[WorkerReply]) -> None:
        """Raises unless everybody has followed who is not down."""
        self._checked(self._result(replies), replies)

    # -- what dialects share ------------------------------------------------------------

    @property
    def pause_asked(self) -> PauseRequest | None:
        """What the fleet was last asked; None if it is to run."""
        return self._asked[-1] if self._asked else None

    def hold(self, pause: PauseRequest) -> tuple[Exchange, ...]:
        """From now on nothing is placed; returns what was accepted before."""
        self._asked.append(pause)
        self.owed.clear()
        return self._router.hold(queue=pause.new_requests == "queue", mode=pause.mode)

    async def end_accepted(
        self, pause: PauseRequest, accepted: Sequence[Exchange], asking: CallerHeaders, due_s: float
    ) -> int:
        """Have a pause that ends what is in flight end what no worker has ended; how many those are.

        Only now, because a pause that every worker refuses ends nothing.
        """
        ended: set[Exchange] = set()
        if pause.mode == "abort" and self.pause_asked is pause:
            await self._end([each for each in _unended(accepted) if each.worker is None], due_s)
            ended = await self._end_at_leaving(_unended(accepted), asking, due_s)
            await self._over(_unended(accepted), min(due_s, self._router.loop.time() + pause.timeout))
            # The pause reached their workers first, which queue them, or does not reach their workers.
            await self._end([each for each in _unended(accepted) if self._is_unheard(each)], due_s)
        return sum(exchange.ended_by_pause or exchange in ended for exchange in accepted)

    async def _end_at_leaving(
        self, exchanges: Iterable[Exchange], asking: CallerHeaders, due_s: float
    ) -> set[Exchange]:
        """A worker that leaves the fleet is not paused with it, but knows the text of what it has."""
        leaving = [each for each in exchanges if each.worker is not None and each.worker not in self._fleet]
        timeout_s = min(due_s - SLACK_S - self._router.loop.time(), LAST_WORDS_S)
        if not leaving or timeout_s <= 0:
            return set()
        return await end_at_leaving(self._router, leaving, PAUSE, asking, timeout_s)

    def _is_unheard(self, exchange: Exchange) -> bool:
        """Whether no worker ends it. A worker has ended a request whose end waits for its client."""
        worker = exchange.worker
        if worker is None or exchange.is_untouched:
            return True
        return (worker not in self._fleet or is_down(worker)) and not exchange.full

    async def _end(self, exchanges: Sequence[Exchange], due_s: float) -> None:
        for exchange in exchanges:
            exchange.end(PAUSE)
        await self._over(exchanges, due_s)

    async def _over(self, exchanges: Iterable[Exchange], due_s: float) -> None:
        if ends := [exchange.when_over() for exchange in exchanges]:
            await asyncio.wait(ends, timeout=min(LAST_WORDS_S, self._left_s(due_s)))

    def judge_pause(self, pause: PauseRequest, replies: Sequence[WorkerReply]) -> bool:
        """Whether nobody has resumed or paused otherwise while that was asked. One that all refuse holds no longer."""
        latest = self.pause_asked is pause
        if not replies or all_refuse(replies):
            self.withdraw(pause)
        elif latest:
            self._asked = [pause]
            # Who has been started anew since it answered knows nothing of a pause.
            self.paused = {reply.worker for reply in replies if reply.ok and reply.worker.life == reply.life}
        return latest

    def withdraw(self, pause: PauseRequest) -> None:
        """What was asked before it is what holds, if anything was."""
        self._asked = [each for each in self._asked if each is not pause]
        if self.pause_asked is None:
            self.release()
        else:
            self._router.hold(queue=self.pause_asked.new_requests == "queue")

    def release(self) -> None:
        self._asked.clear()
        self.paused.clear()
        self._router.release()

    def refuse_while_moving(self) -> None:
        if self._moving is not None:
            raise Refusal(409, "updating", f"{self._moving}; try again when that is done")

    def forget_prefixes(self, workers: Iterable[Worker]) -> None:
        now_s = self._fleet.clock()
        for worker in workers:
            worker.horizon_s = max(worker.horizon_s, now_s)

    async def probe_all(self) -> None:
        await asyncio.gather(*(self.probe(worker) for worker in self._fleet))

    # -- parts ------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        return self._router.config.control_timeout_s

    def _left_s(self, due_s: float) -> float:
        """Of a call's time; a worker must have some."""
        return max(due_s - self._router.loop.time(), LEAST_S)

    @asynccontextmanager
    async def _alone(self, due_s: float) -> AsyncIterator[None]:
        """While the fleet is not being resumed."""
        try:
            async with asyncio.timeout_at(due_s):
                await self._resuming.acquire()
        except TimeoutError:
            raise Refusal(409, "resuming", "the fleet is being resumed; try again when that is done") from None
        try:
            yield
        finally:
            self._resuming.release()

    def _able(self) -> list[Worker]:
        return [worker for worker in self._fleet if worker.state != "down"]

    async def _all(self, one: WorkerCall, asking: CallerHeaders, timeout_s: float) -> list[WorkerReply]:
        self._refuse_if_empty()
        return await self._router.worker_calls.fan_out(to_all(self._fleet, one), asking, timeout_s)

    def _refuse_if_empty(self) -> None:
        if not len(self._fleet):
            raise NoWorker("there is no worker; POST /v1/workers adds one")

    async def probe(self, worker: Worker) -> None:
        assert self._router.probe is not None
        await self._router.probe(worker)

    @property
    def at_rest(self) -> bool:
        return not self._verbs

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._verbs += 1
        try:
            yield
        finally:
            self._verbs -= 1

    @asynccontextmanager
    async def _move(self, what: str) -> AsyncIterator[None]:
        self.refuse_while_moving()
        self._moving = what
        try:
            with self.busy():
                yield
        finally:
            self._moving = None

    def _result(self, replies: Sequence[WorkerReply]) -> RouterResult:
        """What they say together; states are taken over at once, so that nobody has to wait for a probe."""
        workers: dict[str, WorkerOutcome] = {}
        engines: list[EngineOutcome] = []
        told: list[FleetResult] = []
        for reply in replies:
            workers[reply.worker.url] = self._outcome(reply)
            if reply.told is not None:
                told.append(reply.told.result)
                engines += [EngineAt(**asdict(each), worker=reply.worker.url) for each in told[-1].engines]
        seen = {outcome.state for outcome in workers.values()} & STATES.keys()
        if not seen and self.pause_asked is not None:
            seen = {"pausing"}  # workers that come back are paused
        versions = [o.weight_version for o in workers.values() if isinstance(o.weight_version, int)]
        return RouterResult(
            is_paused=bool(seen) and not seen & {"running", "pausing"},
            state="draining" if self._router.draining else overall(seen),
            mode=next((result.mode for result in told if result.mode), None),
            weight_version=max(versions, default=0),
            asleep=list(dict.fromkeys(tag for result in told for tag in result.asleep)),
            engines=engines,
            workers=workers,
        )

    def _outcome(self, reply: WorkerReply) -> WorkerOutcome:
        worker = reply.worker
        if not reply.ok:
            code = reply.code if reply.status else "unreachable"
            return WorkerOutcome(state=self._state_without(reply), error=reply.error, code=code)
        told: FleetResult | None = None if reply.told is None else reply.told.result
        state = worker.state if told is None else told.state
        version = worker.version if told is None else told.weight_version
        if state in STATES and told is not None and worker.state not in ("down", "draining", "starting"):
            self._fleet.probed(worker, STATES[state])
        outcome = WorkerOutcome(state=state, weight_version=UNSET if version is None else version)
        if reply.status == ACCEPTED:
            outcome.error, outcome.code = "not all of its engines have followed yet", "accepted"
        return outcome

    def _state_without(self, reply: WorkerReply) -> str:
        """Of a worker that has not followed: one that did not answer may still do what it was asked."""
        if reply.status:
            return reply.worker.state
        return "down" if is_down(reply.worker) or self.pause_asked is None else "pausing"

    def _checked(self, result: RouterResult, replies: Sequence[WorkerReply]) -> RouterResult:
        """Raises unless everybody has followed who is not down."""
        failed = [reply for reply in replies if not reply.ok and reply.worker.state != "down"]
        followed = [reply for reply in replies if reply.ok]
        if not failed and followed:
            return result
        if not failed:
            raise Partial("no worker answers", result, status=503, code=NoWorker.code)
        message = "; ".join(f"{reply.worker.name}: {reply.error}" for reply in failed)
        same = {(reply.status, reply.code) for reply in failed}
        if not followed and len(same) == 1 and failed[0].status:
            raise Partial(message, result, status=failed[0].status, code=failed[0].code)
        raise Partial(f"{message} ({len(followed)} of {len(replies)} workers have followed)", result)


def _unended(accepted: Iterable[Exchange]) -> list[Exchange]:
    """What a pause is to end, and has not; a resume since then, and it is not to any more."""
    foreign = ("sglang", "vllm")
    held = [exchange for exchange in accepted if exchange.held == "abort" and not exchange.over]
    return [each for each in held if each.worker is None or each.worker.kind not in foreign]


async def share_ranks(
    router: Router, workers: Iterable[Worker], asking: CallerHeaders, first: int, world_size: int, timeout_s: float
) -> dict[Worker, int]:
    """The rank of each worker's first engine in a trainer's group; every engine has one of its own."""
    sizes = await router.worker_calls.fan_out(
        to_all(workers, SIZE), asking, min(timeout_s, router.config.control_timeout_s)
    )
    if silent := [reply.worker.name for reply in sizes if not reply.ok and not is_down(reply.worker)]:
        raise Refusal(
            502, "partial", f"nobody was asked, because {', '.join(silent)} did not say how many engines it has"
        )
    ranks, rank = {}, first
    for reply in sizes:
        if reply.ok:
            ranks[reply.worker] = rank
            rank += reply.told.world_size
    if rank > world_size:
        raise RequestError(f"there are ranks up to {rank - 1}, so world_size must be {rank}", param="group")
    return ranks


def _plain(body: FleetUpdate, version: int) -> dict[str, Any]:
    """An update as one worker is told it."""
    told: dict[str, Any] = msgspec.to_builtins(body)
    for name in ("strategy", "drain_timeout"):
        del told[name]
    return {name: value for name, value in told.items() if value is not None} | {"version": version}


def update_call(body: Mapping[str, Any]) -> WorkerCall:
    return call_of(control_ops.UPDATE_WEIGHTS, encode(body), ControlReport)
