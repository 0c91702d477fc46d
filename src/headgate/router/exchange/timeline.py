"""The timeline of a request in the fleet: one stage per worker that has had it.

Each worker reports its own stage, even after the stage has ended. The router records which workers left an answer
unfinished, and why; it records nothing for requests that do not move, which are nearly all. Times are seconds since
the request arrived; times reported by workers come from the workers' clocks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headgate.router.exchange.attempt import Answered, Lost, Outcome, Withheld
from headgate.router.fleet.worker import Worker

KEPT = 1000  # how many ended requests are remembered


class Departure(msgspec.Struct, frozen=True):
    """An attempt that another worker had to continue."""

    worker: str
    role: str
    at_s: float
    why: str


class MovedRequest(msgspec.Struct, frozen=True):
    """A request that has moved and ended."""

    began: float  # seconds since 1970
    ended_s: float  # on the router's clock
    departures: tuple[Departure, ...]


class Stage(msgspec.Struct, kw_only=True):
    """One worker's part of a request."""

    worker: str
    role: str
    part: Literal["prompt", "answer"]  # "prompt": the worker computed the prompt's KV for another worker
    began_s: float
    first_token_s: float | None = None
    ended_s: float | None = None  # None: the stage is in progress
    left: str | None = None  # why another worker had to continue


WorkerReport = tuple[
    Worker, Literal["prompt", "answer"], Mapping[str, Any]
]  # a worker's answer to GET /v1/requests/{id}


def departure(worker: Worker, outcome: Outcome, at_s: float) -> Departure:
    return Departure(worker.url, worker.role, round(at_s, 6), _why(outcome))


def _why(outcome: Outcome) -> str:
    match outcome:
        case Lost(why):
            return why
        case Withheld(rescheduled):
            return "it had too little KV memory" if rescheduled else "it was pausing or shutting down"
        case Answered(status):
            return f"it answered {status}"
    return "its answer was not complete"


class MovedRequests:
    """Ended requests that have moved, for later queries."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], MovedRequest] = OrderedDict()  # (tenant, id) -> request

    def keep(self, tenant: str, id: str, moved: MovedRequest) -> None:
        self._kept[tenant, id] = moved
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def get(self, id: str, tenant: str | None) -> MovedRequest | None:
        """Return the request of a tenant with that id; without a tenant, the latest one of any tenant."""
        if tenant is not None:
            return self._kept.get((tenant, id))
        return next((moved for key, moved in reversed(self._kept.items()) if key[1] == id), None)


def stages(
    reports: Iterable[WorkerReport], departures: Sequence[Departure] = (), began: float | None = None
) -> list[Stage]:
    """Return the stages in the order of their start. Times count from `began`, or from the first stage."""
    found = [_stage(*report) for report in reports]
    origin = min([stage.began_s for stage in found] if began is None else [began], default=0.0)
    for stage in found:
        _shift(stage, -origin)
    before_s = 0.0
    for leaving in departures:
        _leave(found, leaving, before_s)
        before_s = leaving.at_s
    return sorted(found, key=lambda stage: (stage.began_s, stage.part != "prompt"))


def _stage(worker: Worker, part: Literal["prompt", "answer"], report: Mapping[str, Any]) -> Stage:
    """Return a stage with times in seconds since 1970."""
    usage = report.get("usage")
    arrived = usage["arrived"] if usage else time.time() - report["request"]["age_s"]
    happened = {event["event"]: arrived + event["at_s"] for event in reversed(report["events"])}  # the first of each
    return Stage(
        worker=worker.url,
        role=worker.role,
        part=part,
        began_s=arrived,
        first_token_s=happened.get("first_token"),
        ended_s=arrived + usage["elapsed_s"] if usage else None,
    )


def _shift(stage: Stage, by_s: float) -> None:
    stage.began_s = max(round(stage.began_s + by_s, 6), 0.0)
    for name in ("first_token_s", "ended_s"):
        if (at_s := getattr(stage, name)) is not None:
            setattr(stage, name, max(round(at_s + by_s, 6), stage.began_s))


def _leave(stages: list[Stage], leaving: Departure, before_s: float) -> None:
    """Record why a stage ended. A stage is added for a worker that can no longer report its own."""
    for stage in stages:
        if (stage.worker, stage.part, stage.left) == (
            leaving.worker,
            "answer",
            None,
        ) and stage.began_s < leaving.at_s:
            break
    else:
        stage = Stage(worker=leaving.worker, role=leaving.role, part="answer", began_s=before_s)
        stages.append(stage)
    stage.ended_s, stage.left = max(leaving.at_s, stage.began_s), leaving.why
