"""Scaling of the fleet: GET and POST /v1/scale.

A router uses workers, but cannot start them. `headgate up` starts a router together with its workers and gives it a
`Scaler`; a router that was started alone has none and refuses these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.contract.fleet import ROLES, ScaleRequest
from headgate.errors import HeadgateError, RequestError
from headgate.router.fleet.scaler import Scaler
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.exchange.relay import Exchange
    from headgate.router.router import Router


class NoFleet(RequestError):
    status = 501
    code = "no_fleet"


class ScaleFailed(RequestError):
    status = 502
    code = "scale_failed"


def scaler_of(router: Router) -> Scaler:
    if router.scaler is None:
        raise NoFleet("this router has no servers of its own to scale; only the router of `headgate up` has")
    return router.scaler


def status(router: Router) -> dict[str, Any]:
    scaler = scaler_of(router)
    return {"wanted": dict(scaler.wanted), "ready": dict(scaler.running)}


async def scale(router: Router, body: ScaleRequest) -> tuple[bool, dict[str, Any]]:
    """Change the number of servers; returns whether the wanted counts are reached, and the current counts."""
    scaler = scaler_of(router)
    if not body.counts:
        raise RequestError(
            f"give the wanted number of servers for at least one role of {', '.join(ROLES)}", param="mixed"
        )
    try:
        done = await scaler.scale(body.counts, body.timeout)
    except RequestError:
        raise
    except HeadgateError as error:
        raise ScaleFailed(f"a server could not be started: {error}") from None
    return done, status(router)


# --------------------------------------------------------------------------------------------------------------- load


class RoleLoad(NamedTuple):
    """The load of the workers of one role."""

    queue_s: float  # age of the oldest request that waits behind others for its first token
    kv_usage: float  # share of KV blocks that are held
    busy: float  # running requests, as a share of those that may run


def load_of(router: Router, role: str) -> RoleLoad | None:
    """Return the load of a role; None while the fleet is paused, updated or shut down, so that it means nothing."""
    if router.holding or router.fleet.rolling or router.draining:
        return None
    workers = [worker for worker in router.fleet if worker.role == role and worker.available]
    blocks = sum(worker.total_blocks for worker in workers)
    places = sum(worker.max_running for worker in workers)
    return RoleLoad(
        queue_s=_longest_wait_s(router, role),
        kv_usage=1 - sum(worker.free_blocks for worker in workers) / blocks if blocks else 0.0,
        busy=sum(worker.running for worker in workers) / places if places else 0.0,
    )


def _longest_wait_s(router: Router, role: str) -> float:
    now_s = router.loop.time()
    waits = (now_s - exchange.began_s for exchange in router.live.values() if _waits_for(exchange, role))
    return max(waits, default=0.0)


def _waits_for(exchange: Exchange, role: str) -> bool:
    if exchange.moves or exchange.unresumable or exchange.journal.tokens:
        return False  # the request has its first token, or had an attempt
    worker: Worker | None = exchange.worker or (
        exchange.prefill_request.worker if exchange.prefill_request is not None else None
    )
    if worker is None:
        return role != "prefill"  # the request waits for a worker that answers
    # A request with a long prompt is not in a queue: the worker must have waiting requests.
    return worker.role == role and worker.waiting > 0
