"""Merges the workers' answers to a control call into the router's answer.

A call succeeds or fails as a whole: it succeeds if every worker that is up has carried it out, and otherwise raises
an error that names the workers that have not. Workers that are down follow when they come back (`fleet/catch_up.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from headgate.contract.control import EngineOutcome, FleetResult, RequestName, overall
from headgate.errors import RequestError
from headgate.router.control.fan_out import WorkerReply, is_down
from headgate.router.exchange.relay import NoWorker
from headgate.router.fleet.monitor import STATES

if TYPE_CHECKING:
    from headgate.router.fleet.fleet import Workers
    from headgate.router.router import Router

ACCEPTED = 202  # some engines of the worker have not carried out the call yet


class ControlReport(msgspec.Struct):
    """A worker's answer to a control call."""

    result: FleetResult


class WorkerOutcome(msgspec.Struct, kw_only=True):
    state: str  # the worker's state, or "down"
    weight_version: int | UnsetType = UNSET
    error: str | UnsetType = UNSET
    code: str | UnsetType = UNSET


class WorkerEngine(EngineOutcome, kw_only=True):
    worker: str


class RouterResult(FleetResult, kw_only=True):
    workers: dict[str, WorkerOutcome]


class Partial(RequestError):
    """Some workers have not carried out a control call."""

    status = 502
    code = "partial"

    def __init__(self, message: str, result: RouterResult, *, status: int = 502, code: str = "partial") -> None:
        super().__init__(message, code=code)
        self.status = status
        self.result = result


def merge(router: Router, replies: Sequence[WorkerReply], *, pause_wanted: bool) -> RouterResult:
    """Merge the answers. The fleet takes over the reported states at once, without waiting for a probe."""
    workers: dict[str, WorkerOutcome] = {}
    engines: list[EngineOutcome] = []
    results: list[FleetResult] = []
    for reply in replies:
        workers[reply.worker.url] = _outcome(router.fleet, reply, pause_wanted)
        if reply.answer is not None:
            results.append(reply.answer.result)
            engines += [WorkerEngine(**asdict(each), worker=reply.worker.url) for each in results[-1].engines]
    seen = {outcome.state for outcome in workers.values()} & STATES.keys()
    if not seen and pause_wanted:
        seen = {"pausing"}  # no worker is up; each will be paused when it comes back
    versions = [o.weight_version for o in workers.values() if isinstance(o.weight_version, int)]
    newest = max(versions, default=0)
    return RouterResult(
        is_paused=bool(seen) and not seen & {"running", "pausing"},
        state="draining" if router.draining else overall(seen),
        mode=next((result.mode for result in results if result.mode), None),
        weight_version=newest,
        weight_label=next((r.weight_label for r in results if r.weight_version == newest), "") or str(newest),
        asleep=list(dict.fromkeys(tag for result in results for tag in result.asleep)),
        engines=engines,
        workers=workers,
    )


def count_requests(results: Iterable[FleetResult], ended_here: Iterable[RequestName]) -> tuple[int, int]:
    """How many requests a pause aborted, and how many finished during it.

    Several workers may name one request: it moved when its connection broke, which the first worker has not noticed.
    """
    aborted, finished, unnamed = set(ended_here), set[RequestName](), [0, 0]
    for result in results:
        if isinstance(result.aborted_requests, UnsetType) or isinstance(result.finished_requests, UnsetType):
            unnamed[0] += result.aborted or 0
            unnamed[1] += result.finished or 0
        else:
            aborted.update(result.aborted_requests)
            finished.update(result.finished_requests)
    return len(aborted) + unnamed[0], len(finished - aborted) + unnamed[1]


def _outcome(fleet: Workers, reply: WorkerReply, pause_wanted: bool) -> WorkerOutcome:
    worker = reply.worker
    if not reply.ok:
        code = reply.code if reply.status else "unreachable"
        return WorkerOutcome(state=_state_without(reply, pause_wanted), error=reply.error, code=code)
    result: FleetResult | None = None if reply.answer is None else reply.answer.result
    state = worker.state if result is None else result.state
    version = worker.version if result is None else result.weight_version
    if state in STATES and result is not None and worker.state not in ("down", "draining", "starting"):
        fleet.probed(worker, STATES[state])
    outcome = WorkerOutcome(state=state, weight_version=UNSET if version is None else version)
    if reply.status == ACCEPTED:
        outcome.error, outcome.code = "not all of its engines have followed yet", "accepted"
    return outcome


def _state_without(reply: WorkerReply, pause_wanted: bool) -> str:
    """The state to report for a worker that has not carried out the call. If it did not answer, it still may."""
    if reply.status:
        return reply.worker.state
    return "down" if is_down(reply.worker) or not pause_wanted else "pausing"


def require_all(result: RouterResult, replies: Sequence[WorkerReply]) -> RouterResult:
    """Return `result` if every worker that is up has carried out the call; otherwise raise `Partial`."""
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
