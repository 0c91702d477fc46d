"""Membership of the fleet with the calls of SGLang's router, where slime registers its engines.

A worker's id is derived from its address. Removing a worker drains it, as in our own API (`membership.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headgate.contract.control import DRAIN_S
from headgate.contract.fleet import Joining
from headgate.contract.operations import sglang as sglang_ops
from headgate.contract.operations.operation import Operation
from headgate.contract.sglang import ROLES, WorkerSpec
from headgate.edge.reading import read_control
from headgate.edge.routing import Handler
from headgate.errors import RequestError
from headgate.router.control.fleet_status import ANSWERING
from headgate.router.control.membership import Registry
from headgate.router.fleet.fleet import NoSuchWorker
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

ACCEPTED = 202
TYPES = {role: name for name, role in ROLES.items()}


class SglangWorkers:
    def __init__(self, router: Router, registry: Registry) -> None:
        self._fleet = router.fleet
        self._registry = registry

    def handlers(self) -> dict[Operation, Handler]:
        return {
            sglang_ops.LIST_WORKERS: self._list,
            sglang_ops.ADD_WORKER: self._add,
            sglang_ops.SHOW_WORKER: self._show,
            sglang_ops.REMOVE_WORKER: self._remove,
            sglang_ops.ADD_WORKER_URL: self._add_url,
            sglang_ops.REMOVE_WORKER_URL: self._remove_url,
            sglang_ops.LIST_WORKER_URLS: self._list_urls,
        }

    async def _list(self, request: Request) -> Response:
        workers = tuple(self._fleet)
        return JSONResponse({"workers": [*map(describe, workers)], "total": len(workers), "stats": stats(workers)})

    async def _add(self, request: Request) -> Response:
        return self._join((await read_control(request, WorkerSpec)).joining())

    async def _show(self, request: Request) -> Response:
        return JSONResponse(describe(self._find(request.path_params["id"])))

    async def _remove(self, request: Request) -> Response:
        return await self._leave(self._find(request.path_params["id"]))

    async def _add_url(self, request: Request) -> Response:
        return self._join(Joining(url=_url(request)))

    async def _remove_url(self, request: Request) -> Response:
        return await self._leave(self._fleet.find(_url(request)))

    async def _list_urls(self, request: Request) -> Response:
        return JSONResponse({"urls": [worker.url for worker in self._fleet]})

    def _find(self, name: str) -> Worker:
        """A worker by its id or, as in older versions of SGLang's router, by its address."""
        if "://" in name:
            return self._fleet.find(name)
        for worker in self._fleet:
            if id_of(worker) == name:
                return worker
        raise NoSuchWorker(f"there is no worker with the id {name!r}; GET /workers lists all", param="id")

    def _join(self, joining: Joining) -> Response:
        worker = self._registry.join(joining)
        more = {"location": f"/workers/{id_of(worker)}", "worker": describe(worker)}
        return JSONResponse(_outcome(worker, "added; it gets requests when it is ready") | more, ACCEPTED)

    async def _leave(self, worker: Worker) -> Response:
        worker = await self._registry.leave(worker.url, DRAIN_S)
        if worker.in_flight:
            return JSONResponse(_outcome(worker, f"removed; {worker.in_flight} requests are in flight"), ACCEPTED)
        return JSONResponse(_outcome(worker, "removed"))


def id_of(worker: Worker) -> str:
    return str(uuid5(NAMESPACE_URL, worker.url))


def describe(worker: Worker) -> dict[str, Any]:
    return {
        "id": id_of(worker),
        "url": worker.url,
        "model_id": next(iter(sorted(worker.models)), "unknown"),
        "priority": 50,
        "cost": 1.0,
        "worker_type": TYPES[worker.role],
        "is_healthy": worker.state in ANSWERING,
        "load": worker.load,
        "connection_mode": "http",
        "runtime_type": worker.kind,
    }


def stats(workers: Sequence[Worker]) -> dict[str, Any]:
    types = Counter(TYPES[worker.role] for worker in workers)
    return {
        "total_workers": len(workers),
        "healthy_workers": sum(worker.state in ANSWERING for worker in workers),
        "total_models": len({model for worker in workers for model in worker.models}),
        "total_load": sum(worker.load for worker in workers),
        "by_type": {name: types[name] for name in ROLES},
    }


def _outcome(worker: Worker, what: str) -> dict[str, Any]:
    return {
        "status": "accepted",
        "success": True,
        "message": f"{worker.url} is {what}",
        "worker_id": id_of(worker),
        "url": worker.url,
    }


def _url(request: Request) -> str:
    url = request.query_params.get("url")
    if not url:
        raise RequestError("name the worker with ?url=http://HOST:PORT", param="url")
    return url
