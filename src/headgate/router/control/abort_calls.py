"""Abort calls to workers."""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.contract.abort import AbortResult
from headgate.contract.operations.control import ABORT_REQUESTS
from headgate.router.control.fan_out import KEYS, CallerHeaders, WorkerCall, WorkerCalls, call_of
from headgate.router.data_path.upstream import Headers
from headgate.router.fleet.worker import Worker

FORMER_S = 5.0  # timeout of the call that ends a former attempt

encode = msgspec.json.Encoder().encode


class WorkerAborts(msgspec.Struct):
    result: AbortResult


def abort_call(body: dict[str, Any]) -> WorkerCall:
    return call_of(ABORT_REQUESTS, encode(body), WorkerAborts)


async def end_former(calls: WorkerCalls, worker: Worker, id: str, tenant: str, headers: Headers) -> None:
    """End a former attempt, which its worker would otherwise complete if the request has an `Idempotency-Key`."""
    keys = tuple(header for header in headers if header[0] in KEYS)
    call = abort_call({"req_ids": [id], "wait": True, "timeout": FORMER_S, "cause": "superseded"})
    await calls.ask(worker, call, CallerHeaders(tenant, keys), FORMER_S + 1)
