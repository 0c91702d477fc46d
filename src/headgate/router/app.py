"""The control plane of a router: which path is answered by what, and everything that runs beside the data path for it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headgate.contract.abort import AbortRequest, abort_of
from headgate.contract.control import ControlBody, MemoryRequest, PauseRequest
from headgate.contract.decoding import convert
from headgate.contract.errors import RETRY_AFTER_S, NotFound, error_body, error_headers
from headgate.contract.keys import Keys
from headgate.contract.limits import Seconds
from headgate.contract.openapi import ERRORS, POSTED
from headgate.contract.openapi import describe as describe_server
from headgate.dashboard import page
from headgate.dashboard.feed import Feed
from headgate.edge.dashboard import show_page, watched
from headgate.edge.gate import Gate
from headgate.edge.reading import read_control, read_object
from headgate.edge.responses import error_response, json_response
from headgate.errors import RequestError
from headgate.router import dialects, looking, requests, scaling, workers
from headgate.router.abort import RouterAbortResult, Scope, abort
from headgate.router.control import FleetControls, FleetUpdate, Partial, RouterResult
from headgate.router.dashboard import RouterSource
from headgate.router.fanout import Asking
from headgate.router.following import Follower
from headgate.router.metrics import render

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

encode = msgspec.json.Encoder().encode


class ControlPlane:
    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version
        self.controls = FleetControls(router)
        self.registry = workers.Registry(router)
        self._feed = Feed(RouterSource(router, version))
        self.app = App(self._routes(), router.keys)

    async def run(self) -> None:
        """Look after workers that come back, and those whose heartbeats stop."""
        follower = Follower(self._router, self.controls)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follower.run())
                tasks.create_task(self.registry.run())
        except Exception:
            log.exception("nobody looks after workers that come back any more")
            raise

    def _routes(self) -> list[BaseRoute]:
        return [
            _route("/v1/abort_requests", POST=self._abort),
            _route("/v1/requests", GET=self._list_requests),
            _route("/v1/requests/{id:path}", GET=self._show_request, DELETE=self._delete_request),
            _route("/v1/pause", POST=self._pause),
            _route("/v1/resume", POST=self._resume),
            _route("/v1/is_paused", GET=self._is_paused),
            _route("/v1/update_weights", POST=self._update_weights),
            _route("/v1/sleep", POST=self._sleep),
            _route("/v1/wakeup", POST=self._wakeup),
            _route("/v1/flush_cache", POST=self._flush_cache),
            _route("/v1/workers", GET=self._list_workers, POST=self._add_worker, DELETE=self._remove_worker),
            _route("/v1/workers/{url:path}", DELETE=self._remove_worker),
            _route("/v1/scale", GET=self._show_scale, POST=self._scale),
            _route("/v1/loads", GET=self._loads),
            _route("/v1/models", GET=self._models),
            _route("/v1/models/{model:path}", GET=self._model),
            _route("/health", GET=self._health),
            _route("/health_generate", GET=self._ready),
            _route("/ready", GET=self._ready),
            _route("/live", GET=self._live),
            _route("/version", GET=self._tell_version),
            _route("/metrics", GET=self._metrics),
            _route("/openapi.json", GET=self._openapi),
            _route("/abort_request", POST=self._abort_request),
            _route("/is_paused", GET=self._is_paused_there),
            _route("/is_sleeping", GET=self._is_sleeping),
            _route("/get_world_size", GET=self._get_world_size),
            *(_route(path, **dict.fromkeys(methods, self._for_all)) for path, methods in dialects.FOR_ALL),
            *(_route(path, GET=self._of_one) for path in dialects.OF_ONE),
            *(_route(path, GET=show_page) for path in page.ASSETS),
            _route(page.EVENTS, GET=self._watch),
        ]

    # -- requests ---------------------------------------------------------------------

    async def _abort(self, request: Request) -> Response:
        return await self._end(request, abort_of(await read_object(request)))

    async def _end(self, request: Request, body: AbortRequest) -> Response:
        result = await abort(self._router, body, _scope(request), Asking.of(request))
        return _answer(request, result, done=body.wait and not result.errors)

    async def _list_requests(self, request: Request) -> Response:
        return json_response(await requests.list_requests(self._router, _scope(request), Asking.of(request)))

    async def _show_request(self, request: Request) -> Response:
        name = request.path_params["id"]
        return json_response(await requests.show_request(self._router, _scope(request), Asking.of(request), name))

    async def _delete_request(self, request: Request) -> Response:
        name = request.path_params["id"]
        result = await abort(self._router, AbortRequest(req_ids=[name]), _scope(request), Asking.of(request))
        if result.not_found:
            raise NotFound(
                f"there is no request {name!r}, or it ended long ago", param="id", code="request_not_found"
            )
        return _answer(request, result, done=not result.errors)

    # -- the fleet --------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        body = await read_control(request, PauseRequest)
        return _told(request, await self.controls.pause(body, Asking.of(request)))

    async def _resume(self, request: Request) -> Response:
        body = await read_control(request, ControlBody)
        return _told(request, await self.controls.resume(body, Asking.of(request)))

    async def _is_paused(self, request: Request) -> Response:
        return _answer(request, await self.controls.look(Asking.of(request)), done=True)

    async def _update_weights(self, request: Request) -> Response:
        body = await read_control(request, FleetUpdate)
        return _told(request, await self.controls.update(body, Asking.of(request)))

    async def _sleep(self, request: Request) -> Response:
        body = await read_control(request, MemoryRequest)
        return _told(request, await self.controls.sleep(body, Asking.of(request)))

    async def _wakeup(self, request: Request) -> Response:
        body = await read_control(request, MemoryRequest)
        return _told(request, await self.controls.wake(body, Asking.of(request)))

    async def _flush_cache(self, request: Request) -> Response:
        body = await read_control(request, ControlBody)
        return _told(request, await self.controls.flush(body, Asking.of(request)))

    # -- workers ----------------------------------------------------------------------

    async def _list_workers(self, request: Request) -> Response:
        return JSONResponse({"workers": [workers.describe(worker) for worker in self._router.fleet.everyone]})

    async def _add_worker(self, request: Request) -> Response:
        worker = self.registry.join(await read_control(request, workers.Joining))
        return JSONResponse(workers.describe(worker))

    async def _remove_worker(self, request: Request) -> Response:
        url = request.path_params.get("url") or request.query_params.get("url")
        if not url:
            raise RequestError("say which worker with ?url=http://HOST:PORT", param="url")
        timeout_s: float = convert(_number(request, "timeout", workers.DRAIN_S), Seconds, "timeout")
        worker = await self.registry.leave(url, timeout_s)
        return JSONResponse(
            {"drained": not worker.in_flight, **workers.describe(worker)}, 202 if worker.in_flight else 200
        )

    async def _show_scale(self, request: Request) -> Response:
        return _answer(request, scaling.look(self._router), done=True)

    async def _scale(self, request: Request) -> Response:
        done, result = await scaling.scale(self._router, await read_control(request, scaling.ScaleRequest))
        return _answer(request, result, done=done)

    # -- looking ----------------------------------------------------------------------

    async def _loads(self, request: Request) -> Response:
        return json_response(await looking.loads(self._router, Asking.of(request)))

    async def _models(self, request: Request) -> Response:
        models = await looking.models(self._router, Asking.of(request))
        return json_response({"object": "list", "data": list(models.values())})

    async def _model(self, request: Request) -> Response:
        return json_response(await looking.model(self._router, Asking.of(request), request.path_params["model"]))

    async def _health(self, request: Request) -> Response:
        return _probe(*looking.health(self._router))

    async def _ready(self, request: Request) -> Response:
        return _probe(*looking.readiness(self._router))

    async def _live(self, request: Request) -> Response:
        return _probe(True, {"status": "ok"})

    async def _tell_version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _metrics(self, request: Request) -> Response:
        return Response(render(self._router, self._version), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(_description(self._version, self.app))

    async def _watch(self, request: Request) -> Response:
        return watched(request, self._feed)

    # -- other systems' names -----------------------------------------------------------

    async def _for_all(self, request: Request) -> Response:
        return await dialects.for_all(self._router, self.controls, request)

    async def _of_one(self, request: Request) -> Response:
        return await dialects.of_one(self._router, request)

    async def _abort_request(self, request: Request) -> Response:
        return await dialects.abort_request(self._router, request, _scope(request))

    async def _is_paused_there(self, request: Request) -> Response:
        return await dialects.is_paused(self.controls, request)

    async def _is_sleeping(self, request: Request) -> Response:
        return await dialects.is_sleeping(self.controls, request)

    async def _get_world_size(self, request: Request) -> Response:
        return await dialects.get_world_size(self._router, request)


# ------------------------------------------------------------------------------------------------------ bodies, answers


def _scope(request: Request) -> Scope:
    return Scope(request.state.tenant, request.state.admin)


def _number(request: Request, name: str, default: float) -> float:
    given = request.query_params.get(name)
    try:
        return default if given is None else float(given)
    except ValueError:
        raise RequestError(f"{name} must be a number of seconds, not {given!r}", param=name) from None


def _told(request: Request, result: RouterResult) -> Response:
    """200 if all is done, 202 if a worker is still to follow."""
    done = all(outcome.error is msgspec.UNSET for outcome in result.workers.values())
    log.info("%s: %s leaves the fleet %s", request.state.request_id, request.url.path, result.state)
    return _answer(request, result, done=done)


def _answer(request: Request, result: RouterResult | RouterAbortResult | dict[str, Any], *, done: bool) -> Response:
    told = {"request_id": request.state.request_id, "status": "success" if done else "accepted", "result": result}
    return Response(encode(told), 200 if done else 202, media_type="application/json")


def _probe(ok: bool, body: dict[str, Any]) -> Response:
    return JSONResponse(body, 200 if ok else 503, None if ok else {"retry-after": str(RETRY_AFTER_S)})


def _explained(error: BaseException, request_id: str) -> Response:
    return _partial(error, request_id) if isinstance(error, Partial) else error_response(error, request_id)


def _partial(error: Partial, request_id: str) -> Response:
    """An error like any other, and what became of each worker."""
    told = msgspec.json.decode(error_body(error, request_id))
    body = {**told, "request_id": request_id, "status": "failed", "result": error.result}
    return Response(encode(body), error.status, error_headers(error), media_type="application/json")


def _description(version: str, app: App) -> dict[str, Any]:
    """A server's own description, as far as the router has the same calls, and what only a router has."""
    from headgate.router.router import RELAYED

    described = describe_server(version)
    ours = {route.path.replace(":path", ""): route for route in app.routes if isinstance(route, Route)}
    paths = {path: told for path, told in described["paths"].items() if path in ours or path in RELAYED}
    for path, route in ours.items():
        if path.startswith(page.PATH):
            continue  # for people with a browser, and no part of the API
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {}).setdefault(method.lower(), _own_call(method, path))
    error = described["paths"]["/v1/models"]["get"]["responses"]["500"]["content"]
    for call in (call for told in paths.values() for call in told.values()):
        for status in (*call.pop("errors", ()), 502, 503):  # any call may find no worker, or lose it
            call["responses"].setdefault(str(status), {"description": ERRORS[status], "content": error})
    described["info"]["title"] = "Headgate router"
    return {**described, "paths": paths}


def _own_call(method: str, path: str) -> dict[str, Any]:
    """A call that only a router has, in the words of its description; `errors` are described later."""
    names = re.findall(r"{(\w+)}", path)
    return {
        "summary": f"See docs/router.md: {method} {path}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ],
        "responses": {"200": {"description": "Done"}, "202": {"description": "Accepted, and not all of it is done"}},
        "errors": (*POSTED, 409),
    }


# ------------------------------------------------------------------------------------------------------------------ app


def _route(path: str, **handlers: Handler) -> Route:
    """One path, several methods."""

    async def choose(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, choose, methods=list(handlers), name=path)


class App(Starlette):
    """Starlette's router and state, with our gate in place of its middleware."""

    def __init__(self, routes: list[BaseRoute], keys: Keys) -> None:
        super().__init__(routes=routes)
        self.router.redirect_slashes = False
        self._gate = Gate(self.router, keys, respond=_explained)

    def build_middleware_stack(self) -> ASGIApp:
        return self._gate
