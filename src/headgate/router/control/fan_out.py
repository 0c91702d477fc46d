"""One call to many workers at once: each has its own time, and what became of it is told for each.

What a worker answers is read here, as the type that its call names. An answer of another shape is an error of that
worker.

Whoever is known to be down is not asked, and one that goes down while it is asked is not waited for any longer, so that a
dead worker delays the others' answer by at most the timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request

from headgate.contract.control import BOOT_HEADER
from headgate.contract.operations.operation import Operation
from headgate.router.data_path.forwarding import Credentials
from headgate.router.data_path.request_info import UNREADABLE
from headgate.router.data_path.upstream import Headers, WorkerLost, call
from headgate.router.fleet.fleet import Workers
from headgate.router.fleet.worker import Worker

WENT_DOWN = "it went down before it had answered"
SLACK_S = 0.85  # after its timeout, for a call to be answered; servers take 0.7 s of it
LONGEST_MESSAGE = 1000  # of a worker's error, in characters
BAD_GATEWAY = 502
KEYS = (b"authorization", b"x-api-key")

Order = tuple[tuple[bytes, bytes], ...]  # headers


@dataclass(frozen=True, slots=True)
class CallerHeaders:
    """In whose name workers are asked: the caller's, as far as they check keys themselves."""

    tenant: str | None = None  # empty: a caller without a key; None: the router itself, or an admin of the fleet
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, request: Request) -> CallerHeaders:
        keys = tuple((name, value) for name, value in request.headers.raw if name in KEYS)
        return cls(None if request.state.admin else request.state.tenant, keys)


@dataclass(frozen=True, slots=True)
class WorkerCall:
    method: str
    path: str
    body: bytes = b""
    reads: Any = None  # the type of its answer; None: it is passed on as it is
    order: Order = ()  # among the pauses and resumes of this router


def call_of(operation: Operation, body: bytes = b"", reads: Any = None, order: Order = ()) -> WorkerCall:
    return WorkerCall(operation.method, operation.path, body, reads, order)


class Complaint(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class Failure(msgspec.Struct):
    """An error as workers tell it; some have no `error` around it."""

    error: Complaint | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """What a worker has answered, or why it has not."""

    worker: Worker
    status: int = 0  # 0: not at all
    body: bytes = b""
    why: str = ""  # it did not answer, or its answer cannot be read
    told: Any = None  # the answer, as the type that its call names
    life: str | None = None  # of the worker, as we knew it when that came

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def fields(self) -> dict[str, msgspec.Raw]:
        """An answer that was read, to be passed on with something added."""
        fields: dict[str, msgspec.Raw] = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        return fields

    def items(self, name: str) -> list[msgspec.Raw]:
        """The same, of one of its lists."""
        items: list[msgspec.Raw] = msgspec.json.decode(self.fields()[name], type=list[msgspec.Raw])
        return items

    @property
    def error(self) -> str:
        """In a sentence, what is wrong; empty if nothing is."""
        if self.ok:
            return ""
        failure = self._failure
        message = self.why or (failure.error.message if failure.error is not None else failure.message)
        return message[:LONGEST_MESSAGE] or f"it answered {self.status}"

    @property
    def code(self) -> str:
        error = self._failure.error
        return "worker_failed" if error is None else str(error.code)[:LONGEST_MESSAGE]

    @property
    def _failure(self) -> Failure:
        try:
            return msgspec.json.decode(self.body, type=Failure)
        except UNREADABLE:
            return Failure()


class WorkerCalls:
    """Control calls to workers of one fleet."""

    def __init__(
        self, fleet: Workers, credentials: Credentials, fleet_changed: Callable[[float], Coroutine[Any, Any, bool]]
    ) -> None:
        self._fleet = fleet
        self._credentials = credentials
        self._fleet_changed = fleet_changed

    async def fan_out(
        self, calls: Mapping[Worker, WorkerCall], asking: CallerHeaders, timeout_s: float
    ) -> list[WorkerReply]:
        """The replies of all workers that were called, in that order."""
        return await asyncio.gather(*(self.ask(worker, one, asking, timeout_s) for worker, one in calls.items()))

    async def ask(self, worker: Worker, one: WorkerCall, asking: CallerHeaders, timeout_s: float) -> WorkerReply:
        if is_down(worker):
            return WorkerReply(worker, why="it is down")
        asked = asyncio.ensure_future(self._call(worker, one, asking, timeout_s))
        try:
            while not asked.done() and not is_down(worker):
                change = asyncio.ensure_future(self._fleet_changed(timeout_s))
                await asyncio.wait({asked, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            return asked.result() if asked.done() else WorkerReply(worker, why=WENT_DOWN)
        finally:
            asked.cancel()

    async def _call(self, worker: Worker, one: WorkerCall, asking: CallerHeaders, timeout_s: float) -> WorkerReply:
        headers: Headers = [*self._credentials(worker, list(asking.headers), asking.tenant), *one.order]
        try:
            pool = self._fleet.pool(worker)
            answer = await call(pool, one.method, one.path, one.body, headers=headers, timeout_s=timeout_s)
        except (WorkerLost, KeyError) as error:  # KeyError: it has left meanwhile
            return WorkerReply(worker, why=str(error) if isinstance(error, WorkerLost) else "it has left the fleet")
        status, told, body = answer
        if (boot := told.get(BOOT_HEADER)) is not None:
            self._fleet.set_life(worker, boot)
        return _read(WorkerReply(worker, status, body, life=worker.life), one.reads)


def is_down(worker: Worker) -> bool:
    return worker.state == "down"


def _read(reply: WorkerReply, kind: Any) -> WorkerReply:
    if kind is None or not reply.ok:
        return reply
    try:
        reply.body.decode()  # also what nothing here reads: it may be passed on
        return replace(reply, told=msgspec.json.decode(reply.body, type=kind))
    except UNREADABLE as error:
        return WorkerReply(reply.worker, BAD_GATEWAY, why=f"its answer cannot be read: {error}", life=reply.life)


def all_refuse(replies: Iterable[WorkerReply]) -> bool:
    """Whether everybody who could be asked has said no, for whatever reason: what was asked does not hold."""
    asked = [reply for reply in replies if reply.status or reply.worker.state not in ("down", "starting")]
    return bool(asked) and all(reply.status >= 400 and not reply.why for reply in asked)


def to_all(workers: Iterable[Worker], one: WorkerCall) -> dict[Worker, WorkerCall]:
    return dict.fromkeys(workers, one)


def of_kind(workers: Iterable[Worker], kinds: Collection[str]) -> list[Worker]:
    """Those that may understand a call; of one that is not known yet that is worth a try."""
    return [worker for worker in workers if worker.kind in kinds or worker.kind == "unknown"]
