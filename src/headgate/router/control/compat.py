"""Control operations of the SGLang and vLLM APIs: passed on unchanged to every worker, answered as by one worker.

Headgate workers translate these calls themselves. During a pause through these APIs, new requests wait in the router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headgate.contract import sglang, vllm
from headgate.contract.abort import AbortRequest
from headgate.contract.control import LONG_S, UPDATE_TIMEOUT_S, PauseRequest
from headgate.contract.decoding import convert, decode
from headgate.contract.operations import sglang as sglang_ops
from headgate.contract.operations import vllm as vllm_ops
from headgate.contract.operations.operation import AskAll, AskOne, Operation
from headgate.contract.sglang import AbortBody, Checked, FromDisk, combined
from headgate.edge.reading import read_control
from headgate.edge.routing import Handler
from headgate.errors import RequestError
from headgate.protocol.command import DEFAULT_TIMEOUT_S, PauseMode
from headgate.router.control.abort import abort
from headgate.router.control.fan_out import (
    SLACK_S,
    CallerHeaders,
    Order,
    WorkerCall,
    WorkerReply,
    of_kind,
    read_reply,
    to_all,
)
from headgate.router.control.lifecycle import MIN_TIMEOUT_S, FleetControls
from headgate.router.control.weights import GET_WORLD_SIZE, WeightUpdates, assign_ranks
from headgate.router.exchange.relay import NoWorker
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.contract.keys import Caller
    from headgate.router.router import Router


COMPATIBLE_KINDS = ("headgate", "sglang", "vllm")


def handlers(
    router: Router, controls: FleetControls, weights: WeightUpdates, operations: Iterable[Operation]
) -> dict[Operation, Handler]:
    """Handlers of the operations that are only passed on."""
    found: dict[Operation, Handler] = {}
    for operation in operations:
        match operation.fan_out:
            case AskAll() as effects:
                found[operation] = FanOutHandler(router, controls, weights, operation, effects)
            case AskOne():
                found[operation] = partial(ask_one, router)
    return found


@dataclass(frozen=True, slots=True)
class FanOutHandler:
    """The handler of an operation that all workers carry out."""

    router: Router
    controls: FleetControls
    weights: WeightUpdates
    operation: Operation
    effects: AskAll

    async def __call__(self, request: Request) -> Response:
        self.controls.refuse_while_exclusive()
        with self.controls.in_progress(), _held(self.router, self.controls, self.effects.holds_requests):
            replies = await self._pause_or_ask(request)
            if self.effects.resumes and not any(worker.state == "paused" for worker in self.router.fleet):
                self.controls.release()  # workers stay paused while a part of their memory sleeps
            if self.effects.drops_prefixes:
                self.controls.forget_prefixes(reply.worker for reply in replies if reply.ok)
            if replies and all(reply.ok for reply in replies):
                self._keep(await request.body())
        if self.operation is sglang_ops.WEIGHTS_CHECKER:
            replies = _with_all_ranks(replies)
        return _merged(self.controls, replies)

    def _keep(self, body: bytes) -> None:
        """Keep what workers that come back later need: the files of the new weights, or their new label."""
        if self.effects.names_weights:
            self.weights.relabel(decode(body, vllm.NewVersion).new_version)
        elif self.operation is sglang_ops.UPDATE_WEIGHTS_FROM_DISK:
            update = decode(body, FromDisk)
            _set_wanted(self.router, self.weights, update.model_path, update.weight_version)
        elif self.operation is vllm_ops.UPDATE_WEIGHTS:
            info: vllm.Parameters = convert(decode(body, vllm.UpdateTransfer).info, vllm.Parameters, "update_info")
            if info.file is not None:
                _set_wanted(self.router, self.weights, info.file, info.weight_version)

    async def _pause_or_ask(self, request: Request) -> list[WorkerReply]:
        if await self._pauses(request):
            return await self._pause(request)
        replies = await self._ask(request)
        await self.controls.probe_all()
        return replies

    async def _pauses(self, request: Request) -> bool:
        if self.operation is sglang_ops.WEIGHTS_CHECKER:  # one of its actions releases the weights
            return decode(await request.body() or b"{}", dict[str, Any]).get("action") == "reset_tensors"
        return self.effects.pauses

    async def _pause(self, request: Request) -> list[WorkerReply]:
        pause = PauseRequest(mode=await self._mode_of(request), new_requests="queue", timeout=LONG_S)
        accepted = self.controls.hold(pause)
        replies = await self._ask(request)
        await self.controls.probe_all()
        self.controls.conclude_pause(pause, replies)
        due_s = self.router.loop.time() + DEFAULT_TIMEOUT_S
        await self.controls.end_accepted(pause, accepted, CallerHeaders.of(request), due_s)
        return replies

    async def _mode_of(self, request: Request) -> PauseMode:
        """The mode that headgate workers read from this call; returning workers are paused with it.

        An unknown mode counts as `freeze`, which aborts nothing.
        """
        match self.operation:
            case sglang_ops.PAUSE_GENERATION:
                body = decode(await request.body() or b"{}", dict[str, Any])
                return sglang.MODES.get(str(body.get("mode", "abort")), "freeze")
            case sglang_ops.RELEASE_MEMORY_OCCUPATION:
                return "drain"
            case vllm_ops.PAUSE | vllm_ops.SLEEP:
                with suppress(RequestError):
                    return vllm.mode_of(request.query_params)
        return "freeze"

    async def _ask(self, request: Request) -> list[WorkerReply]:
        ordered = self.effects.resumes or await self._pauses(request)
        order: Order = (self.controls.next_order(),) if ordered else ()
        if self.effects.updates_weights:
            order += (self.weights.new_version_header(),)
        call = WorkerCall(request.method, _target(request), await request.body(), order=order)
        calls = to_all(of_kind(self.router.fleet, COMPATIBLE_KINDS), call)
        if self.effects.assigns_ranks:
            calls = await _with_ranks(self.router, calls, CallerHeaders.of(request))
        timeout_s = await self._timeout_s(request) + SLACK_S
        return await self.router.worker_calls.fan_out(calls, CallerHeaders.of(request), timeout_s)

    async def _timeout_s(self, request: Request) -> float:
        """The sum of a worker's documented timeouts for its consecutive steps. These calls carry no timeout."""
        if self.effects.pauses and await self._mode_of(request) == "drain":
            return LONG_S + UPDATE_TIMEOUT_S
        if self.effects.moves_memory:
            return UPDATE_TIMEOUT_S + 2 * DEFAULT_TIMEOUT_S
        return 2 * DEFAULT_TIMEOUT_S


@contextmanager
def _held(router: Router, controls: FleetControls, update: bool) -> Iterator[None]:
    """Let new requests wait while an update holds running workers."""
    if not update or router.holding:
        yield
        return
    pause = PauseRequest(mode="freeze", new_requests="queue")
    controls.hold(pause)
    try:
        yield
    finally:
        controls.withdraw(pause)


def _set_wanted(router: Router, weights: WeightUpdates, path: str, label: str | None) -> None:
    """Keep these weights for workers that come back later."""
    version = max((worker.version for worker in router.fleet if worker.version is not None), default=None)
    if version is not None:
        named = {} if label is None else {"label": label}
        weights.set_wanted({"path": path, "version": version, **named}, version)


async def _with_ranks(
    router: Router, calls: dict[Worker, WorkerCall], caller: CallerHeaders
) -> dict[Worker, WorkerCall]:
    """The same call, with the rank of each worker's first engine."""
    call = next(iter(calls.values()), WorkerCall("POST", "/"))
    body: dict[str, Any] = decode(call.body or b"{}", dict[str, Any])
    info = body.get("init_info", body)
    if not isinstance(info, dict) or "world_size" not in info:
        return calls  # no group is formed, or the workers report what is wrong
    first: int = convert(info.get("rank_offset", 1), int, "rank_offset")
    size: int = convert(info["world_size"], int, "world_size")
    ranks = await assign_ranks(router, calls, caller, first, size, router.config.control_timeout_s)
    return {worker: replace(call, body=msgspec.json.encode(_with_rank(body, rank))) for worker, rank in ranks.items()}


def _with_rank(body: dict[str, Any], rank: int) -> dict[str, Any]:
    if "init_info" in body:
        return body | {"init_info": body["init_info"] | {"rank_offset": rank}}
    return body | {"rank_offset": rank}


def _merged(controls: FleetControls, replies: Sequence[WorkerReply]) -> Response:
    """One worker's answer if all workers that are up have given it; otherwise an error that names the others."""
    if (refusal := _common_refusal(replies)) is not None:
        return _passed_on(refusal)
    controls.check(replies)
    return _passed_on(next(reply for reply in replies if reply.ok))


def _with_all_ranks(replies: list[WorkerReply]) -> list[WorkerReply]:
    """Give every successful reply the checksums of all workers. A reply that cannot be read is an error of its worker."""
    read = [read_reply(reply, Checked) for reply in replies]
    ranks = [rank for reply in read if reply.ok for rank in reply.answer.ranks or ()]
    body = msgspec.json.encode(combined(ranks) if ranks else Checked())
    return [replace(reply, body=body, answer=None) if reply.ok else reply for reply in read]


def _common_refusal(replies: Sequence[WorkerReply]) -> WorkerReply | None:
    """The caller's mistake, if all workers that are up report the same one."""
    asked = [reply for reply in replies if reply.status or reply.worker.state != "down"]
    same = len({(reply.status, reply.body) for reply in asked}) == 1
    return asked[0] if same and _is_refusal(asked[0]) else None


def _is_refusal(reply: WorkerReply) -> bool:
    return 400 <= reply.status < 500


def _passed_on(reply: WorkerReply) -> Response:
    return Response(reply.body, reply.status, media_type=_media_type(reply.body))


def _media_type(body: bytes) -> str | None:
    return None if not body else "application/json" if body[:1] in (b"{", b"[") or body == b"null" else "text/plain"


async def ask_one(router: Router, request: Request) -> Response:
    """The first successful answer. Workers are asked in turn, each with its share of the remaining time."""
    workers = [
        worker for worker in of_kind(router.fleet, COMPATIBLE_KINDS) if worker.state not in ("down", "starting")
    ]
    workers.sort(key=lambda worker: worker.state == "outdated")  # these last: they report older weights
    due_s, call = router.loop.time() + router.config.control_timeout_s, WorkerCall("GET", _target(request))
    refusal: WorkerReply | None = None
    for i, worker in enumerate(workers):
        share_s = (due_s - router.loop.time()) / (len(workers) - i)
        reply = await router.worker_calls.ask(worker, call, CallerHeaders.of(request), max(share_s, MIN_TIMEOUT_S))
        if reply.ok:
            return _passed_on(reply)
        if _is_refusal(reply) and worker.kind == "headgate":  # other systems may lack the call
            refusal = reply
    if refusal is not None:
        return _passed_on(refusal)
    raise NoWorker("no worker that supports this call has answered")


def _target(request: Request) -> str:
    """The path and the query of a request."""
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


async def abort_request(router: Router, request: Request, caller: Caller) -> Response:
    body = await read_control(request, AbortBody)
    if body.abort_all:
        await abort(router, AbortRequest(abort_all=True, wait=False), caller, CallerHeaders.of(request))
    elif body.rid:
        await abort(router, AbortRequest(req_ids=[body.rid], wait=False), caller, CallerHeaders.of(request))
    else:
        router.counters.aborts_ignored += 1
    return Response()


async def abort_requests(router: Router, request: Request, caller: Caller) -> Response:
    result = await abort(router, vllm.abort_ids(await request.body()), caller, CallerHeaders.of(request))
    return JSONResponse({"status": "aborted", "aborted": len(result.aborted)})


async def is_paused(controls: FleetControls, request: Request) -> Response:
    return JSONResponse({"is_paused": (await controls.status(CallerHeaders.of(request))).is_paused})


async def is_sleeping(controls: FleetControls, request: Request) -> Response:
    return JSONResponse({"is_sleeping": bool((await controls.status(CallerHeaders.of(request))).asleep)})


async def get_world_size(router: Router, request: Request) -> Response:
    """The number of engines that take part in a weight update."""
    workers = of_kind(router.fleet, ("headgate",))
    replies = await router.worker_calls.fan_out(
        to_all(workers, GET_WORLD_SIZE), CallerHeaders.of(request), router.config.control_timeout_s
    )
    return JSONResponse({"world_size": sum(reply.answer.world_size for reply in replies if reply.ok)})
