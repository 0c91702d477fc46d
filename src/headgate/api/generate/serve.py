"""The way of every generating request: named, admitted, prepared, run, and told in a answer_format of the API.

A answer_format turns pieces into bytes and knows nothing of engines or connections; this module knows nothing of formats.
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

from headgate.api.accounting.ledger import PREFILL, Record
from headgate.api.bodies import Charge
from headgate.api.generate.answer_format import AnswerFormat, ResumableFormat
from headgate.api.generate.export import ExportFormat
from headgate.api.generate.generation import ChoiceJob, Piece, collect, run_all
from headgate.api.generate.idempotency import replays_of
from headgate.api.generate.journal import StreamJournal, WholeJournal, asked_at, seed_of
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


Prepare = Callable[[RequestContext], Awaitable[tuple[list[ChoiceJob], AnswerFormat]]]


def exchange(request: Request, body: Generation, kind: str, choices: int, prepare: Prepare) -> Response:
    """The response to `request`: `prepare` makes jobs and their answer_format, once the request is admitted."""
    api = api_of(request)
    check_model(api, body.model)
    if body.request_id is not None:
        request.state.request_id = body.request_id  # the response's header follows it
    # Whatever salt a caller names, it finds the prefixes of its own tenant alone.
    body.cache_salt = tenant_salt(request.state.tenant, body.cache_salt or "")
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
        tags=body.tags or {},
        journal=asked_s is not None,
        recompute=request.headers.get(ON_PREEMPT) == "recompute",
        client=f"{request.client.host}:{request.client.port}" if request.client else "",
        timeout_s=None if body.deadline_ms is None else body.deadline_ms / 1000,
        least_version=_least_version(request.headers.get(LEAST_VERSION_HEADER)),
    )
    if request.headers.get(PREFILL_HEADER) is not None and body.export_kv:
        kind = PREFILL
    work = partial(_serve, api, context, kind, choices, prepare)
    if key := request.headers.get("idempotency-key"):
        response = replays_of(request).exchange(request, key, _asked(body, kind, journal=context.journal), work)
    else:
        response = WriterResponse(work)
    if context.journal:
        # After the retry's key was computed: the seed is not part of the question, and a retry has another id.
        set_if_absent(body, "seed", seed_of(context.request_id))
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
    api: Api, context: RequestContext, kind: str, choices: int, prepare: Prepare, writer: ResponseWriter
) -> None:
    try:
        if api.engines.version < context.least_version:
            raise EngineDead(
                f"this server has weights of version {api.engines.version}, and the request asks for "
                f"{context.least_version} or later"
            )
        async with api.ledger.admit(
            tenant=context.tenant,
            share=context.share,
            label=context.request_id,
            kind=kind,
            choices=choices,
            tags=context.tags,
        ) as record:
            record.writer, writer.on_left = writer, partial(_left, api, context, record)
            jobs, answer_format = await _prepared(prepare, context, record)
            if context.recompute:
                jobs = [replace(job, request=structs.replace(job.request, recompute=True)) for job in jobs]
            context.charge.release()
            if jobs[0].request.export_kv:
                await _stream(api, record, jobs, ExportFormat(), writer)
            elif context.journal and (not context.stream or isinstance(answer_format, ResumableFormat)):
                await _journal(api, context, record, jobs, answer_format, writer)
            elif any(job.resumed for job in jobs):
                raise RequestError("streams of this endpoint cannot be resumed; leave it out", param="resume")
            elif context.stream:
                await _stream(api, record, jobs, answer_format, writer)
            else:
                await writer.send_json(answer_format.whole(jobs, await collect(api, record, jobs)))
    except HeadgateError:
        if not writer.ended:
            raise
    finally:
        writer.on_left = None  # which would keep writer and record alive until the collector comes


async def _prepared(
    prepare: Prepare, context: RequestContext, record: Record
) -> tuple[list[ChoiceJob], AnswerFormat]:
    """A deadline holds also while a prompt waits for its turn to be read; there is no answer yet that could say so."""
    left_s = None if context.timeout_s is None else max(context.timeout_s - record.age_s, 0) + DEADLINE_GRACE_S
    try:
        async with asyncio.timeout(left_s):
            return await prepare(context)
    except TimeoutError:
        raise Overdue("the deadline of this request has passed before its prompt was read") from None


def _left(api: Api, context: RequestContext, record: Record, cause: Cause) -> None:
    """Its client is gone."""
    if record.open and not record.finished:
        record.client_left(cause)
        if context.stream:
            api.departures.note(context.client, record.label, record.output_tokens, cause)


async def _stream(
    api: Api, record: Record, jobs: Sequence[ChoiceJob], answer_format: AnswerFormat, writer: ResponseWriter
) -> None:
    try:
        async with writer.kept_alive(api.settings.keep_alive_s):
            await run_all(api, record, jobs, partial(_tell, writer, answer_format))
        await writer.end(answer_format.closing())
    except HeadgateError as error:
        if writer.started:  # and there is no status left to say it with
            await writer.end(answer_format.failure(error))
        raise


async def _journal(
    api: Api,
    context: RequestContext,
    record: Record,
    jobs: Sequence[ChoiceJob],
    answer_format: AnswerFormat,
    writer: ResponseWriter,
) -> None:
    writer.headers.append((HEADER.lower().encode(), b"1"))
    journal = (
        StreamJournal(answer_format, writer, jobs) if context.stream else WholeJournal(answer_format, writer, jobs)
    )
    try:
        async with writer.kept_alive(api.settings.keep_alive_s):
            await run_all(api, record, jobs, journal.tell)
        await journal.close()
    except HeadgateError as error:
        if writer.started:
            await journal.fail(error)
        raise


async def _tell(writer: ResponseWriter, answer_format: AnswerFormat, job: ChoiceJob, piece: Piece) -> None:
    if event := answer_format.event(job, piece):
        await writer.send_event(event)
