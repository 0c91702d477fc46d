"""Sends a control call to many workers at once, each with its own timeout, and returns one reply per worker.

A worker's answer is decoded here, as the type that the call names. An answer of another type is reported as an error
of that worker. Workers that are down are not asked, and the call stops waiting for a worker that goes down, so a
failed worker delays the result by at most the timeout.
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

IS_DOWN = "it is down"
WENT_DOWN = "it went down before it had answered"
SLACK_S = 0.85  # how much longer than its timeout a call may take; servers use 0.7 s of it
MAX_MESSAGE_CHARS = 1000  # longest error message of a worker that is passed on
BAD_GATEWAY = 502
KEYS = (b"authorization", b"x-api-key")

Order = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class CallerHeaders:
    """The caller's identity, passed on to workers that check keys themselves."""

    tenant: str | None = None  # empty for a caller without a key; None for the router itself or an admin
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
    reads: Any = None  # the type of the answer; None if the answer is passed on without decoding
    order: Order = ()  # headers that give its position among the calls of this router


def call_of(operation: Operation, body: bytes = b"", reads: Any = None, order: Order = ()) -> WorkerCall:
    return WorkerCall(operation.method, operation.path, body, reads, order)


class ErrorObject(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class WorkerErrorBody(msgspec.Struct):
    """A worker's error body. Some kinds of workers have no `error` object around it."""

    error: ErrorObject | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's answer, or the reason why there is none."""

    worker: Worker
    status: int = 0  # 0 if the worker did not answer
    body: bytes = b""
    why: str = ""  # why the worker did not answer, or why its answer cannot be read
    answer: Any = None  # the decoded answer, of the type that the call names
    boot_id: str | None = None  # the worker's boot id at the time of the answer

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def fields(self) -> dict[str, msgspec.Raw]:
        """The top-level fields of the answer, undecoded, so that they can be passed on with others added."""
        fields: dict[str, msgspec.Raw] = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        return fields

    def items(self, name: str) -> list[msgspec.Raw]:
        """Return the items of the list field `name` of the answer, undecoded."""
        items: list[msgspec.Raw] = msgspec.json.decode(self.fields()[name], type=list[msgspec.Raw])
        return items

    @property
    def error(self) -> str:
        """The error message; empty if there is none."""
        if self.ok:
            return ""
        body = self._error_body
        message = self.why or (body.error.message if body.error is not None else body.message)
        return message[:MAX_MESSAGE_CHARS] or f"it answered {self.status}"

    @property
    def code(self) -> str:
        error = self._error_body.error
        return "worker_failed" if error is None else str(error.code)[:MAX_MESSAGE_CHARS]

    @property
    def _error_body(self) -> WorkerErrorBody:
        try:
            return msgspec.json.decode(self.body, type=WorkerErrorBody)
        except UNREADABLE:
            return WorkerErrorBody()


class WorkerCalls:
    """Control calls to the workers of one fleet."""

    def __init__(
        self, fleet: Workers, credentials: Credentials, fleet_changed: Callable[[float], Coroutine[Any, Any, bool]]
    ) -> None:
        self._fleet = fleet
        self._credentials = credentials
        self._fleet_changed = fleet_changed

    async def fan_out(
        self, calls: Mapping[Worker, WorkerCall], caller: CallerHeaders, timeout_s: float
    ) -> list[WorkerReply]:
        """Return one reply per call, in the same order."""
        return await asyncio.gather(
            *(self.ask(worker, request, caller, timeout_s) for worker, request in calls.items())
        )

    async def ask(self, worker: Worker, request: WorkerCall, caller: CallerHeaders, timeout_s: float) -> WorkerReply:
        if is_down(worker):
            return WorkerReply(worker, why=IS_DOWN)
        answering = asyncio.ensure_future(self._call(worker, request, caller, timeout_s))
        try:
            while not answering.done() and not is_down(worker):
                change = asyncio.ensure_future(self._fleet_changed(timeout_s))
                await asyncio.wait({answering, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            return answering.result() if answering.done() else WorkerReply(worker, why=WENT_DOWN)
        finally:
            answering.cancel()

    async def _call(
        self, worker: Worker, request: WorkerCall, caller: CallerHeaders, timeout_s: float
    ) -> WorkerReply:
        headers: Headers = [*self._credentials(worker, list(caller.headers), caller.tenant), *request.order]
        try:
            pool = self._fleet.pool(worker)
            status, reply_headers, body = await call(
                pool, request.method, request.path, request.body, headers=headers, timeout_s=timeout_s
            )
        except (WorkerLost, KeyError) as error:  # KeyError: the worker was removed meanwhile
            return WorkerReply(worker, why=str(error) if isinstance(error, WorkerLost) else "it has left the fleet")
        if (boot := reply_headers.get(BOOT_HEADER)) is not None:
            self._fleet.set_boot_id(worker, boot)
        return read_reply(WorkerReply(worker, status, body, boot_id=worker.boot_id), request.reads)


def is_down(worker: Worker) -> bool:
    return worker.state == "down"


def read_reply(reply: WorkerReply, kind: Any) -> WorkerReply:
    """The reply with its answer decoded, or an error of the worker."""
    if kind is None or not reply.ok:
        return reply
    try:
        reply.body.decode()  # checks the whole body, because undecoded fields may be passed on
        return replace(reply, answer=msgspec.json.decode(reply.body, type=kind))
    except UNREADABLE as error:
        return WorkerReply(
            reply.worker, BAD_GATEWAY, why=f"its answer cannot be read: {error}", boot_id=reply.boot_id
        )


def all_refuse(replies: Iterable[WorkerReply]) -> bool:
    """Whether every worker that could be asked refused the call, so that the call has no effect."""
    asked = [reply for reply in replies if reply.status or reply.worker.state not in ("down", "starting")]
    return bool(asked) and all(reply.status >= 400 and not reply.why for reply in asked)


def to_all(workers: Iterable[Worker], request: WorkerCall) -> dict[Worker, WorkerCall]:
    return dict.fromkeys(workers, request)


def of_kind(workers: Iterable[Worker], kinds: Collection[str]) -> list[Worker]:
    """Return the workers of these kinds, and those whose kind is not known yet."""
    return [worker for worker in workers if worker.kind in kinds or worker.kind == "unknown"]
