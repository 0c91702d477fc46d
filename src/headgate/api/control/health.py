"""The three probes.

/live: does this process respond? /ready: would it accept a request now? /health: do its engines make progress? An engine in
a long step is busy, not dead: it answers, and reports that a step is on the device. An engine is wedged if its process is
stopped and does not answer, or if its loop hangs without a step on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.metrics import EngineView, query_engines
from headgate.api.host import host_of
from headgate.contract.errors import RETRY_AFTER_S
from headgate.contract.status import EngineHealth, Health, Readiness

PING_TIMEOUT_S = 2.0
QUIET_S = 5.0  # an idle loop iterates at least once a second
BUSY_S = 600.0  # longer than any step


_encoder = msgspec.json.Encoder()


async def live(request: Request) -> Response:
    return _answer({"status": "ok"}, ok=True)


async def ready(request: Request) -> Response:
    host = host_of(request)
    if host.ledger.closing:
        readiness = Readiness(False, "shutting down")
    else:
        readiness = judge_readiness(await query_engines(host.replicas, PING_TIMEOUT_S))
    return _answer(readiness, ok=readiness.ready)


def judge_readiness(views: Sequence[EngineView]) -> Readiness:
    """Ready if the engines that answer would all accept a request: none of them is paused, and at least one answers."""
    answering = [view.pong.status.state for view in views if view.pong is not None and not view.outdated]
    if not answering:
        return Readiness(False, "outdated" if any(view.outdated for view in views) else "no engine is ready")
    held = [state for state in answering if state != "running"]
    return Readiness(False, held[0]) if held else Readiness(True)


async def health(request: Request) -> Response:
    host = host_of(request)
    engines = [judge(view) for view in await query_engines(host.replicas, PING_TIMEOUT_S)]
    status = overall({engine.state for engine in engines})
    report = Health(status, round(host.ledger.oldest_without_progress_s, 3), engines)
    return _answer(report, ok=status != "unhealthy")


def judge(view: EngineView) -> EngineHealth:
    if view.info is None:
        return EngineHealth(view.index, "down", view.restarts)
    if view.pong is None:
        return EngineHealth(view.index, "wedged", view.restarts)
    quiet_s = view.pong.quiet_s
    state = "ok" if quiet_s < QUIET_S else "busy" if view.pong.status.busy and quiet_s < BUSY_S else "wedged"
    if view.outdated and state != "wedged":
        state = "outdated"
    return EngineHealth(view.index, state, view.restarts, round(quiet_s, 3))


def overall(states: set[str]) -> str:
    """An engine that is down is being restarted; a wedged or outdated one stays so until an operator acts."""
    if "wedged" in states or not states & {"ok", "busy"}:
        return "unhealthy"
    return "degraded" if states & {"down", "outdated"} else "ok"


def _answer(body: object, *, ok: bool) -> Response:
    headers = None if ok else {"retry-after": str(RETRY_AFTER_S)}
    return Response(_encoder.encode(body), 200 if ok else 503, headers, media_type="application/json")
