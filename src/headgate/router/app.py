"""The control plane of a router: the handlers of its operations, and its background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from headgate.contract.abort import AbortRequest, abort_of
from headgate.contract.control import DRAIN_S, ControlBody, FleetUpdate, PauseRequest, memory_of
from headgate.contract.decoding import convert
from headgate.contract.errors import RETRY_AFTER_S, NotFound, error_body, error_headers
from headgate.contract.fleet import Joining, ScaleRequest
from headgate.contract.limits import Seconds
from headgate.contract.openapi import router_description
from headgate.contract.operations import control as control_ops
from headgate.contract.operations import fleet as fleet_ops
from headgate.contract.operations import pages
from headgate.contract.operations import sglang as sglang_ops
from headgate.contract.operations import status as status_ops
from headgate.contract.operations import trl as trl_ops
from headgate.contract.operations import vllm as vllm_ops
from headgate.contract.operations.operation import Operation, Relay
from headgate.contract.operations.table import ON_ROUTERS
from headgate.dashboard.feed import Feed
from headgate.edge.app import GatedApp
from headgate.edge.dashboard import show_page, watched
from headgate.edge.gate import Gate, caller_of
from headgate.edge.reading import read_control, read_object
from headgate.edge.responses import error_response, json_response
from headgate.edge.root import show_root
from headgate.edge.routing import Handler, routes_of
from headgate.errors import RequestError
from headgate.router.control import compat, fleet_status, membership, requests, scaling
from headgate.router.control.abort import RouterAbortResult, abort
from headgate.router.control.dashboard import RouterSource
from headgate.router.control.fan_out import CallerHeaders
from headgate.router.control.lifecycle import FleetControls
from headgate.router.control.metrics import render
from headgate.router.control.results import Partial, RouterResult
from headgate.router.control.sglang_workers import SglangWorkers
from headgate.router.control.weights import WeightUpdates
from headgate.router.fleet.catch_up import CatchUp

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode


class ControlPlane:
    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version
        self.controls = FleetControls(router)
        self.weights = WeightUpdates(router, self.controls)
        self.registry = membership.Registry(router)
        self._sglang_workers = SglangWorkers(router, self.registry)
        self._feed = Feed(RouterSource(router, version))
        self.app = GatedApp(self._routes(), partial(Gate, keys=router.keys, respond=_error_answer, cors=router.cors))

    async def run(self) -> None:
        """Bring returning workers up to date, and remove workers whose heartbeats stop, until cancelled."""
        catch_up = CatchUp(self._router, self.controls, self.weights)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(catch_up.run())
                tasks.create_task(self.registry.run())
        except Exception:
            log.exception("the task that brings returning workers up to date has failed")
            raise

    def _routes(self) -> Sequence[BaseRoute]:
        operations = [each for each in ON_ROUTERS if not isinstance(each.fan_out, Relay)]
        fanned_out = compat.handlers(self._router, self.controls, self.weights, operations)
        return routes_of(operations, {**self._handlers(), **fanned_out})

    def _handlers(self) -> dict[Operation, Handler]:
        return {
            **self._control_handlers(),
            status_ops.MODELS: self._models,
            status_ops.MODEL: self._model,
            status_ops.LIVE: self._live,
            status_ops.READY: self._ready,
            status_ops.HEALTH: self._health,
            status_ops.METRICS: self._metrics,
            status_ops.OPENAPI: self._openapi,
            sglang_ops.ABORT_REQUEST: self._abort_request,
            sglang_ops.LOADS: self._loads,
            sglang_ops.GET_LOAD: self._get_load,
            sglang_ops.HEALTH_GENERATE: self._ready,
            vllm_ops.ABORT_REQUESTS: self._abort_requests_vllm,
            vllm_ops.LIVENESS: self._live,
            vllm_ops.IS_PAUSED: self._is_paused_vllm,
            vllm_ops.IS_SLEEPING: self._is_sleeping,
            vllm_ops.VERSION: self._show_version,
            vllm_ops.GET_WORLD_SIZE: self._get_world_size,
            **self._sglang_workers.handlers(),
            trl_ops.HEALTH: self._health,
            trl_ops.GET_WORLD_SIZE: self._get_world_size,
            pages.ROOT: show_root,
            **dict.fromkeys(pages.ASSETS, show_page),
            pages.EVENTS: self._watch,
        }

    def _control_handlers(self) -> dict[Operation, Handler]:
        return {
            control_ops.ABORT_REQUESTS: self._abort,
            control_ops.LIST_REQUESTS: self._list_requests,
            control_ops.SHOW_REQUEST: self._show_request,
            control_ops.DELETE_REQUEST: self._delete_request,
            control_ops.PAUSE: self._pause,
            control_ops.RESUME: self._resume,
            control_ops.IS_PAUSED: self._is_paused,
            control_ops.UPDATE_WEIGHTS: self._update_weights,
            control_ops.SLEEP: self._sleep,
            control_ops.WAKEUP: self._wakeup,
            control_ops.FLUSH_CACHE: self._flush_cache,
            fleet_ops.LIST_WORKERS: self._list_workers,
            fleet_ops.ADD_WORKER: self._add_worker,
            fleet_ops.REMOVE_WORKER: self._remove_worker,
            fleet_ops.REMOVE_WORKER_BY_PATH: self._remove_worker,
            fleet_ops.SHOW_SCALE: self._show_scale,
            fleet_ops.SCALE: self._scale,
        }

    # -- requests ---------------------------------------------------------------------

    async def _abort(self, request: Request) -> Response:
        return await self._end(request, abort_of(await read_object(request)))

    async def _end(self, request: Request, body: AbortRequest) -> Response:
        result = await abort(self._router, body, caller_of(request), CallerHeaders.of(request))
        return _answer(request, result, done=body.wait and not result.errors)

    async def _list_requests(self, request: Request) -> Response:
        return json_response(
            await requests.list_requests(self._router, caller_of(request), CallerHeaders.of(request))
        )

    async def _show_request(self, request: Request) -> Response:
        name = request.path_params["id"]
        return json_response(
            await requests.show_request(self._router, caller_of(request), CallerHeaders.of(request), name)
        )

    async def _delete_request(self, request: Request) -> Response:
        name = request.path_params["id"]
        result = await abort(
            self._router, AbortRequest(req_ids=[name]), caller_of(request), CallerHeaders.of(request)
        )
        if result.not_found:
            raise NotFound(
                f"there is no request {name!r}, or it ended long ago", param="id", code="request_not_found"
            )
        return _answer(request, result, done=not result.errors)

    # -- the fleet --------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        body = await read_control(request, PauseRequest)
        return _control_answer(request, await self.controls.pause(body, CallerHeaders.of(request)))

    async def _resume(self, request: Request) -> Response:
        body = await read_control(request, ControlBody)
        return _control_answer(request, await self.controls.resume(body, CallerHeaders.of(request)))

    async def _is_paused(self, request: Request) -> Response:
        return _answer(request, await self.controls.status(CallerHeaders.of(request)), done=True)

    async def _update_weights(self, request: Request) -> Response:
        body = await read_control(request, FleetUpdate)
        return _control_answer(request, await self.weights.update(body, CallerHeaders.of(request)))

    async def _sleep(self, request: Request) -> Response:
        body = memory_of(await read_object(request), request.query_params)
        return _control_answer(request, await self.controls.sleep(body, CallerHeaders.of(request)))

    async def _wakeup(self, request: Request) -> Response:
        body = memory_of(await read_object(request), request.query_params)
        return _control_answer(request, await self.controls.wake(body, CallerHeaders.of(request)))

    async def _flush_cache(self, request: Request) -> Response:
        body = await read_control(request, ControlBody)
        return _control_answer(request, await self.controls.flush(body, CallerHeaders.of(request)))

    # -- workers ----------------------------------------------------------------------

    async def _list_workers(self, request: Request) -> Response:
        return JSONResponse({"workers": [membership.describe(worker) for worker in self._router.fleet.with_leaving]})

    async def _add_worker(self, request: Request) -> Response:
        worker = self.registry.join(await read_control(request, Joining))
        return JSONResponse(membership.describe(worker))

    async def _remove_worker(self, request: Request) -> Response:
        url = request.path_params.get("url") or request.query_params.get("url")
        if not url:
            raise RequestError("name the worker with ?url=http://HOST:PORT", param="url")
        timeout_s: float = convert(_number(request, "timeout", DRAIN_S), Seconds, "timeout")
        worker = await self.registry.leave(url, timeout_s)
        return JSONResponse(
            {"drained": not worker.in_flight, **membership.describe(worker)}, 202 if worker.in_flight else 200
        )

    async def _show_scale(self, request: Request) -> Response:
        return _answer(request, scaling.status(self._router), done=True)

    async def _scale(self, request: Request) -> Response:
        done, result = await scaling.scale(self._router, await read_control(request, ScaleRequest))
        return _answer(request, result, done=done)

    # -- status -----------------------------------------------------------------------

    async def _loads(self, request: Request) -> Response:
        return json_response(await fleet_status.loads(self._router, CallerHeaders.of(request)))

    async def _get_load(self, request: Request) -> Response:
        return json_response(await fleet_status.get_load(self._router, CallerHeaders.of(request)))

    async def _models(self, request: Request) -> Response:
        models = await fleet_status.models(self._router, CallerHeaders.of(request))
        return json_response({"object": "list", "data": list(models.values())})

    async def _model(self, request: Request) -> Response:
        return json_response(
            await fleet_status.model(self._router, CallerHeaders.of(request), request.path_params["model"])
        )

    async def _health(self, request: Request) -> Response:
        return _probe(*fleet_status.health(self._router))

    async def _ready(self, request: Request) -> Response:
        return _probe(*fleet_status.readiness(self._router))

    async def _live(self, request: Request) -> Response:
        return _probe(True, {"status": "ok"})

    async def _show_version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _metrics(self, request: Request) -> Response:
        return Response(render(self._router, self._version), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        return Response(router_description(self._version), media_type="application/json")

    async def _watch(self, request: Request) -> Response:
        return watched(request, self._feed)

    # -- compatible APIs --------------------------------------------------------------

    async def _abort_request(self, request: Request) -> Response:
        return await compat.abort_request(self._router, request, caller_of(request))

    async def _abort_requests_vllm(self, request: Request) -> Response:
        return await compat.abort_requests(self._router, request, caller_of(request))

    async def _is_paused_vllm(self, request: Request) -> Response:
        return await compat.is_paused(self.controls, request)

    async def _is_sleeping(self, request: Request) -> Response:
        return await compat.is_sleeping(self.controls, request)

    async def _get_world_size(self, request: Request) -> Response:
        return await compat.get_world_size(self._router, request)


# ---------------------------------------------------------------------------------------------------- bodies, answers


def _number(request: Request, name: str, default: float) -> float:
    given = request.query_params.get(name)
    try:
        return default if given is None else float(given)
    except ValueError:
        raise RequestError(f"{name} must be a number of seconds, not {given!r}", param=name) from None


def _control_answer(request: Request, result: RouterResult) -> Response:
    """Respond with 200 if all workers have carried out the call, with 202 if some have not yet."""
    done = all(outcome.error is msgspec.UNSET for outcome in result.workers.values())
    log.info("%s: %s: the fleet is now %s", request.state.request_id, request.url.path, result.state)
    return _answer(request, result, done=done)


def _answer(request: Request, result: RouterResult | RouterAbortResult | dict[str, Any], *, done: bool) -> Response:
    body = {"request_id": request.state.request_id, "status": "success" if done else "accepted", "result": result}
    return Response(encode(body), 200 if done else 202, media_type="application/json")


def _probe(ok: bool, body: dict[str, Any]) -> Response:
    return JSONResponse(body, 200 if ok else 503, None if ok else {"retry-after": str(RETRY_AFTER_S)})


def _error_answer(error: BaseException, request_id: str, path: str) -> Response:
    return (
        _partial_answer(error, request_id) if isinstance(error, Partial) else error_response(error, request_id, path)
    )


def _partial_answer(error: Partial, request_id: str) -> Response:
    """Respond with an error body that also has the outcome of each worker."""
    error_fields = msgspec.json.decode(error_body(error, request_id))
    body = {**error_fields, "request_id": request_id, "status": "failed", "result": error.result}
    return Response(encode(body), error.status, error_headers(error), media_type="application/json")
