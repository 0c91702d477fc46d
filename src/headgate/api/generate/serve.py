"""The way of every generating request: named, admitted, prepared, run, and told in a dialect of the API.

A dialect turns pieces into bytes and knows nothing of engines or connections; this module knows nothing of formats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import PREFILL
from headgate.api.bodies import Charge
from headgate.api.generate.export import ExportFormat
from headgate.api.generate.generation import ChoiceJob, Piece, collect, run_all
from headgate.api.generate.idempotency import replays_of
from headgate.api.generate.journal import Resumable, StreamJournal, WholeJournal, asked_at, seed_of
from headgate.api.state import Api, api_of
from headgate.contract.control import LEAST_VERSION_HEADER
from headgate.contract.errors import NotFound
from headgate.contract.journal import HEADER
from headgate.contract.sampling import set_if_absent
from headgate.contract.schema import Generation
from headgate.edge.sse import ResponseWriter, WriterResponse
from headgate.engine.replicas import DEADLINE_GRACE_S
from headgate.errors import EngineDead, HeadgateError, RequestError
from headgate.protocol.keys import tenant_salt
from headgate.protocol.output import Cause

if TYPE_CHECKING:
    from headgate.api.accounting.ledger import Record


ON_PREEMPT = "x-headgate-on-preempt"  # with `recompute`: as `--on-preempt recompute`, for this request
PREFILL_HEADER = "x-headgate-prefill"  # a router's: the request is the prefill part of another
encode = msgspec.json.Encoder().encode


class Overdue(RequestError):
    status = 409
    code = "deadline"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Who asks, under which name, and how."""

    tenant: str
    share: str  # whose places it takes
    charge: Charge  # for its body
    request_id: str
    stream: bool
    strict: bool  # only values that OpenAI has
    created: int
    tags: Mapping[str, str] = field(default_factory=dict)
    journal: bool = False  # another server may have to go on
    recompute: bool = False  # it must not be given back for want of room once more
    client: str = ""  # its address
    least_version: int = 0  # of the weights that may answer it
    timeout_s: float | None = None  # from its arrival

    def id(self, prefix: str) -> str:
        return prefix + self.request_id.removeprefix("req-")


class AnswerFormat(Protocol):
    """One request's answer, in one API's words: `whole`, or as events and then `closing` or `failure`."""

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        """Nothing, if the piece says nothing."""

    def closing(self) -> bytes: ...

    def failure(self, error: HeadgateError) -> bytes: ...

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes: ...


Prepare = Callable[[RequestContext], Awaitable[tuple[list[ChoiceJob], AnswerFormat]]]


def exchange(request: Request, body: Generation, kind: str, choices: int, prepare: Prepare) -> Response:
    """The response to `request`: `prepare` makes jobs and their dialect, once the request is admitted."""
    api = api_of(request)
    check_model(api, body.model)
    if body.request_id is not None:
        request.state.request_id = body.request_id  # the response's header follows it
    # Whatever salt a caller names, it finds the prefixes of its own tenant alone.
    body.cache_salt = tenant_salt(request.state.tenant, body.cache_salt or "")
    asked_s = asked_at(request)
    if asked_s is None and body.resume is not None:
        raise RequestError(f"resume needs the header {HEADER}", param="resume", code="unknown_parameter")
    call = RequestContext(
        request.state.tenant,
        request.state.share,
        request.state.charge,
        request.state.request_id,
        stream=bool(body.stream),
        strict=request.headers.get("x-openai-strict", "").lower() == "true",
        created=int(time.time()) if asked_s is None else asked_s,
        tags=body.tags or {},
        journal=asked_s is not None,
        recompute=request.headers.get(ON_PREEMPT) == "recompute",
        client=f"{request.client.host}:{request.client.port}" if request.client else "",
        timeout_s=None if body.deadline_ms is None else body.deadline_ms / 1000,
        least_version=_least_version(request.headers.get(LEAST_VERSION_HEADER)),
    )
    if request.headers.get(PREFILL_HEADER) is not None and body.export_kv:
        kind = PREFILL
    work = partial(_serve, api, call, kind, choices, prepare)
    if key := request.headers.get("idempotency-key"):
        response = replays_of(request).exchange(request, key, _asked(body, kind, journal=call.journal), work)
    else:
        response = WriterResponse(work)
    if call.journal:
        # After the retry's key was computed: the seed is not part of the question, and a retry has another id.
        set_if_absent(body, "seed", seed_of(call.request_id))
    return response


def _asked(body: Generation, kind: str, *, journal: bool) -> str:
    """What a client meant, by which its retry is known: a router writes tickets and what is left of the time anew."""
    meant = msgspec.structs.replace(body, kv_ticket=None, deadline_ms=None) if journal else body
    return f"{kind}{' journal' if journal else ''} {encode(meant)!r}"


def _least_version(value: str | None) -> int:
    if value is None:
        return 0
    if not (value.isascii() and value.isdecimal() and len(value) < 20):
        raise RequestError(f"must be the number of a weight version, not {value!r:.100}", param=LEAST_VERSION_HEADER)
    return int(value)


def check_model(api: Api, name: str | None) -> None:
    if name and name != api.model_name:
        raise NotFound(
            f"the model {name!r:.300} is not served here; ask for {api.model_name!r}",
            param="model",
            code="model_not_found",
        )


async def _serve(
    api: Api, call: RequestContext, kind: str, choices: int, prepare: Prepare, reply: ResponseWriter
) -> None:
    try:
        if api.engines.version < call.least_version:
            raise EngineDead(
                f"this server has weights of version {api.engines.version}, and the request asks for "
                f"{call.least_version} or later"
            )
        async with api.ledger.admit(
            tenant=call.tenant,
            share=call.share,
            label=call.request_id,
            kind=kind,
            choices=choices,
            tags=call.tags,
        ) as record:
            record.reply, reply.on_left = reply, partial(_left, api, call, record)
            jobs, dialect = await _prepared(prepare, call, record)
            if call.recompute:
                jobs = [replace(job, request=structs.replace(job.request, recompute=True)) for job in jobs]
            call.charge.release()
            if jobs[0].request.export_kv:
                await _stream(api, record, jobs, ExportFormat(), reply)
            elif call.journal and (not call.stream or isinstance(dialect, Resumable)):
                await _journal(api, call, record, jobs, dialect, reply)
            elif any(job.resumed for job in jobs):
                raise RequestError("streams of this endpoint cannot be resumed; leave it out", param="resume")
            elif call.stream:
                await _stream(api, record, jobs, dialect, reply)
            else:
                await reply.send_json(dialect.whole(jobs, await collect(api, record, jobs)))
    except HeadgateError:
        if not reply.ended:
            raise
    finally:
        reply.on_left = None  # which would keep reply and record alive until the collector comes


async def _prepared(prepare: Prepare, call: RequestContext, record: Record) -> tuple[list[ChoiceJob], AnswerFormat]:
    """A deadline holds also while a prompt waits for its turn to be read; there is no answer yet that could say so."""
    left_s = None if call.timeout_s is None else max(call.timeout_s - record.age_s, 0) + DEADLINE_GRACE_S
    try:
        async with asyncio.timeout(left_s):
            return await prepare(call)
    except TimeoutError:
        raise Overdue("the deadline of this request has passed before its prompt was read") from None


def _left(api: Api, call: RequestContext, record: Record, cause: Cause) -> None:
    """Its client is gone."""
    if record.open and not record.finished:
        record.client_left(cause)
        if call.stream:
            api.departures.note(call.client, record.label, record.output_tokens, cause)


async def _stream(
    api: Api, record: Record, jobs: Sequence[ChoiceJob], dialect: AnswerFormat, reply: ResponseWriter
) -> None:
    try:
        async with reply.kept_alive(api.settings.keep_alive_s):
            await run_all(api, record, jobs, partial(_tell, reply, dialect))
        await reply.end(dialect.closing())
    except HeadgateError as error:
        if reply.started:  # and there is no status left to say it with
            await reply.end(dialect.failure(error))
        raise


async def _journal(
    api: Api,
    call: RequestContext,
    record: Record,
    jobs: Sequence[ChoiceJob],
    dialect: AnswerFormat,
    reply: ResponseWriter,
) -> None:
    reply.headers.append((HEADER.lower().encode(), b"1"))
    journal = StreamJournal(dialect, reply, jobs) if call.stream else WholeJournal(dialect, reply, jobs)
    try:
        async with reply.kept_alive(api.settings.keep_alive_s):
            await run_all(api, record, jobs, journal.tell)
        await journal.close()
    except HeadgateError as error:
        if reply.started:
            await journal.fail(error)
        raise


async def _tell(reply: ResponseWriter, dialect: AnswerFormat, job: ChoiceJob, piece: Piece) -> None:
    if event := dialect.event(job, piece):
        await reply.send_event(event)
