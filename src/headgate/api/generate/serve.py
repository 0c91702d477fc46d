"""The path of every generating request: identified, admitted, prepared, run, and written in the answer format of its API.

This module handles engines and connections; it does not depend on any answer format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.ledger import NO_TRACE, PREFILL, Record
from headgate.api.bodies import Charge
from headgate.api.generate.answer_format import AnswerFormat, ResumableFormat
from headgate.api.generate.export import ExportFormat
from headgate.api.generate.generation import ChoiceJob, Piece, Run, collect, run_all
from headgate.api.generate.idempotency import replays_of
from headgate.api.generate.journal import StreamJournal, WholeJournal, asked_at, seed_of
from headgate.api.generate.kept_kv import KvOffer, asks_to_keep
from headgate.api.generate.load_header import LoadHeader, load_header_of
from headgate.api.state import Api, api_of
from headgate.contract.control import LEAST_VERSION_HEADER, version_in
from headgate.contract.error_answers import error_event_at
from headgate.contract.errors import WARNING_HEADER, NotFound
from headgate.contract.journal import HEADER
from headgate.contract.sampling import set_if_absent
from headgate.contract.schema import Generation
from headgate.contract.trace_context import PARENT, STATE, TraceContext, trace_context
from headgate.edge.sse import ResponseWriter, WriterResponse, innermost
from headgate.engine.moving_stream import DEADLINE_GRACE_S
from headgate.errors import EngineDead, HeadgateError, RequestError
from headgate.protocol.keys import tenant_salt
from headgate.protocol.output import Cause

ON_PREEMPT = "x-headgate-on-preempt"  # `recompute`: like `--on-preempt recompute`, for this request
PREFILL_HEADER = "x-headgate-prefill"  # sent by routers: the request is the prefill request of another one
encode = msgspec.json.Encoder().encode


class Overdue(RequestError):
    status = 409
    code = "deadline"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The caller, the id and the options of a request."""

    tenant: str
    share: str  # the share of the server's capacity that it uses
    charge: Charge  # memory of its body
    request_id: str
    stream: bool
    strict: bool  # use only values that OpenAI's API has
    created: int
    path: str = ""  # of its API
    tags: Mapping[str, str] = field(default_factory=dict)
    journal: bool = False  # write a journal, so that another server can continue
    recompute: bool = False  # recompute after a preemption instead of returning the request once more
    client: str = ""  # address
    least_version: int = 0  # the oldest weight version that may answer it
    timeout_s: float | None = None  # from arrival
    load_header: LoadHeader | None = None  # if the client requests it
    trace: TraceContext = NO_TRACE
    keeps_kv: bool = False  # another server will generate the rest of the answer
    warnings: list[str] = field(default_factory=list)  # for the header of the answer

    def id(self, prefix: str) -> str:
        return prefix + self.request_id.removeprefix("req-")


Prepare = Callable[[RequestContext], Awaitable[tuple[list[ChoiceJob], AnswerFormat]]]


def exchange(request: Request, body: Generation, kind: str, choices: int, prepare: Prepare) -> Response:
    """The response to `request`: `prepare` makes the jobs and the answer format once the request is admitted."""
    api = api_of(request)
    check_model(api, body.model)
    if body.request_id is not None:
        request.state.request_id = body.request_id  # the gate (`edge/gate.py`) returns it as X-Request-Id
    # Whatever the caller's salt, it matches only cached prefixes of its own tenant.
    body.cache_salt = tenant_salt(request.state.tenant, body.cache_salt or "")
    set_if_absent(body, "logprobs_mode", api.settings.logprobs_mode)
    asked_s = asked_at(request)
    if asked_s is None and body.resume is not None:
        raise RequestError(f"resume needs the header {HEADER}", param="resume", code="unknown_parameter")
    context = RequestContext(
        request.state.tenant,
        request.state.share,
        request.state.charge,
        request.state.request_id,
        stream=bool(body.stream),
        strict=request.headers.get("x-openai-strict", "").lower() == "true",
        created=int(time.time()) if asked_s is None else asked_s,
        path=request.scope["path"],
        tags=body.tags or {},
        journal=asked_s is not None,
        recompute=request.headers.get(ON_PREEMPT) == "recompute",
        client=f"{request.client.host}:{request.client.port}" if request.client else "",
        timeout_s=None if body.deadline_ms is None else body.deadline_ms / 1000,
        least_version=_least_version(request.headers.get(LEAST_VERSION_HEADER)),
        load_header=load_header_of(request),
        keeps_kv=asks_to_keep(api, body),
        trace=trace_context(request.headers.getlist(PARENT), request.headers.getlist(STATE)),
    )
    if request.headers.get(PREFILL_HEADER) is not None and body.export_kv:
        kind = PREFILL
    work = partial(_serve, api, context, kind, choices, prepare)
    if key := request.headers.get("idempotency-key"):
        response = replays_of(request).exchange(request, key, _asked(body, kind, journal=context.journal), work)
    else:
        response = WriterResponse(work)
    if context.journal:
        # After the fingerprint for retries was computed: a retry has another id and therefore another seed.
        set_if_absent(body, "seed", seed_of(context.request_id))
    return response


def _asked(body: Generation, kind: str, *, journal: bool) -> str:
    """The fingerprint by which a retry is recognised, without the fields that a router rewrites: ticket and deadline."""
    meant = msgspec.structs.replace(body, kv_ticket=None, deadline_ms=None) if journal else body
    return f"{kind}{' journal' if journal else ''} {encode(meant)!r}"


def _least_version(value: str | None) -> int:
    return 0 if value is None else version_in(value, LEAST_VERSION_HEADER)


def check_model(api: Api, name: str | None) -> None:
    if name and name != api.model_name:
        raise NotFound(
            f"the model {name!r:.300} is not served here; ask for {api.model_name!r}",
            param="model",
            code="model_not_found",
        )


async def _serve(
    api: Api, context: RequestContext, kind: str, choices: int, prepare: Prepare, writer: ResponseWriter
) -> None:
    if not context.keeps_kv:
        return await _answer(api, context, kind, choices, prepare, writer, run_all)
    try:
        async with asyncio.TaskGroup() as tasks:  # ends when the KV was fetched or dropped
            await _answer(api, context, kind, choices, prepare, writer, KvOffer(tasks).run)
    except BaseExceptionGroup as failures:
        raise innermost(failures) from None


async def _answer(
    api: Api, context: RequestContext, kind: str, choices: int, prepare: Prepare, writer: ResponseWriter, run: Run
) -> None:
    try:
        if api.engines.version < context.least_version:
            raise EngineDead(
                f"this server has weights of version {api.engines.version}, and the request requires "
                f"{context.least_version} or later"
            )
        async with api.ledger.admit(
            tenant=context.tenant,
            share=context.share,
            label=context.request_id,
            kind=kind,
            choices=choices,
            tags=context.tags,
            trace=context.trace,
        ) as record:
            record.writer, writer.on_left = writer, partial(_left, api, context, record)
            jobs, answer_format = await _prepared(prepare, context, record)
            if context.recompute:
                jobs = [replace(job, request=structs.replace(job.request, recompute=True)) for job in jobs]
            context.charge.release()
            writer.headers += [(WARNING_HEADER, warning.encode()) for warning in context.warnings]
            if context.stream or context.journal:
                await _add_load(context, writer)
            if jobs[0].request.export_kv:
                await _stream(api, record, jobs, ExportFormat(), writer)
            elif context.journal and (not context.stream or isinstance(answer_format, ResumableFormat)):
                await _journal(api, context, record, jobs, answer_format, writer, run)
            elif any(job.resumed for job in jobs):
                raise RequestError("streams of this endpoint cannot be resumed; leave it out", param="resume")
            elif context.stream:
                await _stream(api, record, jobs, answer_format, writer)
            else:
                answer = answer_format.whole(jobs, await collect(api, record, jobs, run))
                await _add_load(context, writer)
                await writer.send_json(answer)
    except HeadgateError:
        if not writer.ended:
            raise
    finally:
        writer.on_left = None  # breaks a reference cycle, which would last until the next garbage collection


async def _prepared(
    prepare: Prepare, context: RequestContext, record: Record
) -> tuple[list[ChoiceJob], AnswerFormat]:
    """Run `prepare` within the request's deadline. There is no answer yet, so an overdue request is refused."""
    left_s = None if context.timeout_s is None else max(context.timeout_s - record.age_s, 0) + DEADLINE_GRACE_S
    try:
        async with asyncio.timeout(left_s):
            return await prepare(context)
    except TimeoutError:
        raise Overdue("the deadline of this request passed before its prompt was tokenised") from None


async def _add_load(context: RequestContext, writer: ResponseWriter) -> None:
    if context.load_header is not None:
        writer.headers += await context.load_header.now()


def _left(api: Api, context: RequestContext, record: Record, cause: Cause) -> None:
    """The client has disconnected."""
    if record.open and not record.finished:
        record.client_left(cause)
        if context.stream:
            api.departures.note(context.client, record.label, record.output_tokens, cause)


async def _stream(
    api: Api, record: Record, jobs: Sequence[ChoiceJob], answer_format: AnswerFormat, writer: ResponseWriter
) -> None:
    try:
        async with writer.kept_alive(api.settings.keep_alive_s):
            await run_all(api, record, jobs, partial(_send_piece, writer, answer_format))
        await writer.end(answer_format.closing())
    except HeadgateError as error:
        if writer.started:  # the status can no longer report the error
            await writer.end(answer_format.failure(error))
        raise


async def _journal(
    api: Api,
    context: RequestContext,
    record: Record,
    jobs: Sequence[ChoiceJob],
    answer_format: AnswerFormat,
    writer: ResponseWriter,
    run: Run,
) -> None:
    writer.headers.append((HEADER.lower().encode(), b"1"))
    journal = (
        StreamJournal(answer_format, writer, jobs)
        if context.stream
        else WholeJournal(
            answer_format, writer, jobs, partial(error_event_at, context.path, request_id=context.request_id)
        )
    )
    try:
        async with writer.kept_alive(api.settings.keep_alive_s):
            await run(api, record, jobs, journal.send)
        await journal.close()
    except HeadgateError as error:
        if writer.started:
            await journal.fail(error)
        raise


async def _send_piece(writer: ResponseWriter, answer_format: AnswerFormat, job: ChoiceJob, piece: Piece) -> None:
    if event := answer_format.event(job, piece):
        await writer.send_event(event)
