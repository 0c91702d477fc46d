"""Status of a fleet: health, readiness, models and load."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.contract.errors import NotFound
from headgate.contract.operations.sglang import GET_LOAD, LOADS
from headgate.contract.operations.status import MODELS
from headgate.router.control.fan_out import CallerHeaders, call_of, of_kind, to_all
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

ANSWERING = ("ready", "paused", "outdated", "draining", "stopping")


def health(router: Router) -> tuple[bool, dict[str, Any]]:
    """Return whether the fleet is healthy, and details. It is if a worker answers, even if the fleet is paused."""
    answering = [worker for worker in router.fleet if worker.state in ANSWERING]
    status = "unhealthy" if not answering else "ok" if len(answering) == len(router.fleet) else "degraded"
    workers = [{"url": worker.url, "state": worker.state} for worker in router.fleet]
    return bool(answering), {"status": status, "workers": workers}


def readiness(router: Router) -> tuple[bool, dict[str, Any]]:
    """Return whether the router would accept a request now, and details."""
    states = Counter(worker.state for worker in router.fleet)
    if router.draining:
        reason = "shutting down"
    elif router.holding:
        reason = "paused"
    elif states["ready"]:
        reason = ""
    else:
        reason = f"no worker is ready ({', '.join(f'{n} {state}' for state, n in sorted(states.items())) or 'none'})"
    return not reason, {"ready": not reason, "reason": reason}


class EngineAge(msgspec.Struct):
    cache_horizon_age_s: float | None = None


class EngineAges(msgspec.Struct):
    loads: list[EngineAge]


class ModelName(msgspec.Struct):
    id: str


class ModelNames(msgspec.Struct):
    data: list[ModelName]


async def loads(router: Router, caller: CallerHeaders) -> dict[str, Any]:
    workers = of_kind(router.fleet, ("headgate",))
    call = to_all(workers, call_of(LOADS, reads=EngineAges))
    replies = await router.worker_calls.fan_out(call, caller, router.config.probe_timeout_s)
    merged = [
        msgspec.json.decode(load, type=dict[str, msgspec.Raw]) | {"worker": reply.worker.url}
        for reply in replies
        if reply.ok
        for load in reply.items("loads")
    ]
    ages = [load.cache_horizon_age_s for reply in replies if reply.ok for load in reply.answer.loads]
    return {
        "timestamp": time.time(),
        "dp_rank_count": len(merged),
        "loads": merged,
        "cache_horizon_age_s": min((age_s for age_s in ages if age_s is not None), default=None),
        "unreachable": [reply.worker.url for reply in replies if not reply.ok],
    }


async def get_load(router: Router, caller: CallerHeaders) -> list[dict[str, Any]]:
    """One entry per engine of the fleet, numbered throughout."""
    workers = of_kind(router.fleet, ("headgate", "sglang"))
    call = to_all(workers, call_of(GET_LOAD, reads=list[dict[str, Any]]))
    replies = await router.worker_calls.fan_out(call, caller, router.config.probe_timeout_s)
    engines = [load | {"worker": reply.worker.url} for reply in replies if reply.ok for load in reply.answer]
    return [load | {"dp_rank": rank} for rank, load in enumerate(engines)]


async def models(router: Router, caller: CallerHeaders) -> dict[str, msgspec.Raw]:
    """Return the models of all workers, each once."""
    workers: list[Worker] = [worker for worker in router.fleet if worker.state != "starting"]
    call = to_all(workers, call_of(MODELS, reads=ModelNames))
    found: dict[str, msgspec.Raw] = {}
    for reply in await router.worker_calls.fan_out(call, caller, router.config.probe_timeout_s):
        for model, raw in zip(reply.answer.data, reply.items("data"), strict=True) if reply.ok else ():
            found.setdefault(model.id, raw)
    return found


async def model(router: Router, caller: CallerHeaders, name: str) -> msgspec.Raw:
    if (found := (await models(router, caller)).get(name)) is not None:
        return found
    raise NotFound(f"the model {name!r} is not served here", param="model", code="model_not_found")
