"""`do_remote_decode`: the KV of a prompt outlives the answer to its request, so that another server can generate the rest.

When the answer is complete, an export of the prompt is started (`export_kv`), which finds the KV in the prefix cache and is
granted a lease. The answer carries the ticket. The export runs until another server has fetched the KV or the lease has
ended, in the task of the request, whose client has its answer by then. An export without a ticket is never an error: the
other server computes the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from headgate.api.accounting.ledger import PREFILL, Record
from headgate.api.generate.generation import ChoiceJob, Emit, Piece, run, run_all
from headgate.api.state import Api
from headgate.contract.sampling import SamplingParams
from headgate.contract.schema import Generation, Sampled
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.request import Ticket

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 5.0  # how long an answer waits for its ticket; the export may have to wait for room
MOST_URGENT = -(2**31)  # the KV may leave the prefix cache while the export waits

Issued = asyncio.Future[Ticket | None]


def asks_to_keep(api: Api, body: Generation) -> bool:
    """Whether another server will generate the rest of the answer. Raises if the request cannot be split."""
    params = body.kv_transfer_params if isinstance(body, Sampled) else None
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return False
    if not api.engines.info.transfers_kv:
        raise RequestError(
            "kv_transfer_params is not supported: this server does not transfer KV; leave it out",
            param="kv_transfer_params",
            code="unsupported_parameter",
        )
    if params.do_remote_decode and params.do_remote_prefill:
        raise RequestError(
            "do_remote_decode and do_remote_prefill exclude each other: KV is computed here or fetched",
            param="kv_transfer_params",
        )
    if params.do_remote_decode and body.stream:
        raise RequestError("do_remote_decode needs stream to be false", param="kv_transfer_params.do_remote_decode")
    return bool(params.do_remote_decode) and not body.export_kv


class KvOffer:
    """Runs a request, and then offers the KV of its first prompt; `tasks` keeps the export after the answer."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    async def run(self, api: Api, record: Record, jobs: Sequence[ChoiceJob], emit: Emit) -> None:
        await run_all(api, record, jobs, emit)
        if record.completed and (ticket := await self._ticket(api, record, jobs[0])):
            await emit(jobs[0], Piece(ticket=ticket))

    async def _ticket(self, api: Api, record: Record, job: ChoiceJob) -> Ticket | None:
        issued: Issued = asyncio.get_running_loop().create_future()
        keeping = self._tasks.create_task(_keep(api, record, job, issued))
        await asyncio.wait([issued], timeout=OFFER_TIMEOUT_S)
        if issued.done():
            return issued.result()
        keeping.cancel()
        return None


async def _keep(api: Api, asked: Record, job: ChoiceJob, issued: Issued) -> None:
    """Export the prompt of `job` until its KV was fetched or dropped."""
    export = api.ledger.admit(
        tenant=asked.tenant,
        share=asked.share,
        label=f"{asked.label}#kv-{secrets.token_hex(4)}",
        kind=PREFILL,
        tags=asked.tags,
        trace=asked.trace,
    )
    try:
        async with export as record:
            await run(api, record, _export_of(job), partial(_note, issued))
    except HeadgateError as error:
        log.debug("%s: its KV is not kept: %s", asked.label, error)
    finally:
        if not issued.done():
            issued.set_result(None)


def _export_of(job: ChoiceJob) -> ChoiceJob:
    request = structs.replace(
        job.request,
        sampling=SamplingParams(),
        generated=(),
        priority=MOST_URGENT,
        timeout_s=None,
        export_kv=True,
        ticket=None,
    )
    return replace(job, index=0, request=request, stop=(), delivered_chars=0, prompt_text=None, resumed=None)


async def _note(issued: Issued, job: ChoiceJob, piece: Piece) -> None:
    if not issued.done() and (piece.ticket is not None or piece.finish is not None):
        issued.set_result(piece.ticket)
