"""What happened to a request on its way through the fleet: one stage for each worker that has had it.

Workers tell their own part, also when it is over. What the router alone knows, it notes when it happens: who has left an
answer unfinished, and why. Nothing is noted of requests that do not move, which are nearly all. Times are seconds after
the request came in; those that workers tell are by their clocks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headgate.router.exchange.attempt import Answered, Lost, Outcome, Withheld
from headgate.router.fleet.worker import Worker

KEPT = 1000  # requests that have moved, and ended


class Departure(msgspec.Struct, frozen=True):
    """A worker's try that another worker had to go on with."""

    worker: str
    role: str
    at_s: float
    why: str


class MovedRequest(msgspec.Struct, frozen=True):
    """What is remembered of a request that has moved, and ended."""

    began: float  # seconds since 1970
    departures: tuple[Departure, ...]


class Stage(msgspec.Struct, kw_only=True):
    """One worker's part of a request."""

    worker: str
    role: str
    part: Literal["prompt", "answer"]  # prompt: its KV was computed here for another worker
    began_s: float
    first_token_s: float | None = None
    ended_s: float | None = None  # None: it has it now
    left: str | None = None  # why another worker had to go on


Word = tuple[Worker, Literal["prompt", "answer"], Mapping[str, Any]]  # a worker's answer to GET /v1/requests/{id}


def departure(worker: Worker, outcome: Outcome, at_s: float) -> Departure:
    return Departure(worker.url, worker.role, round(at_s, 6), _why(outcome))


def _why(outcome: Outcome) -> str:
    match outcome:
        case Lost(why):
            return why
        case Withheld(rescheduled):
            return "it had no room for it" if rescheduled else "it was pausing or shutting down"
        case Answered(status):
            return f"it answered {status}"
    return "its answer was not complete"


class MovedRequests:
    """Requests that have moved, for those who ask later."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], MovedRequest] = OrderedDict()  # by tenant and id

    def keep(self, tenant: str, id: str, moved: MovedRequest) -> None:
        self._kept[tenant, id] = moved
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def get(self, id: str, tenant: str | None) -> MovedRequest | None:
        """One tenant's request of that id; without a tenant, the latest of all tenants'."""
        if tenant is not None:
            return self._kept.get((tenant, id))
        return next((moved for key, moved in reversed(self._kept.items()) if key[1] == id), None)


def stages(words: Iterable[Word], departures: Sequence[Departure] = (), began: float | None = None) -> list[Stage]:
    """In the order in which they began; without `began`, that is when the first of them did."""
    told = [_stage(*word) for word in words]
    origin = min([stage.began_s for stage in told] if began is None else [began], default=0.0)
    for stage in told:
        _shift(stage, -origin)
    before_s = 0.0
    for leaving in departures:
        _leave(told, leaving, before_s)
        before_s = leaving.at_s
    return sorted(told, key=lambda stage: (stage.began_s, stage.part != "prompt"))


def _stage(worker: Worker, part: Literal["prompt", "answer"], word: Mapping[str, Any]) -> Stage:
    """In seconds since 1970."""
    usage = word.get("usage")
    arrived = usage["arrived"] if usage else time.time() - word["request"]["age_s"]
    happened = {event["event"]: arrived + event["at_s"] for event in reversed(word["events"])}  # the first of each
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


def _leave(told: list[Stage], leaving: Departure, before_s: float) -> None:
    """Note on a stage how it ended; the worker may have died with all it could have told."""
    for stage in told:
        if (stage.worker, stage.part, stage.left) == (
            leaving.worker,
            "answer",
            None,
        ) and stage.began_s < leaving.at_s:
            break
    else:
        stage = Stage(worker=leaving.worker, role=leaving.role, part="answer", began_s=before_s)
        told.append(stage)
    stage.ended_s, stage.left = max(leaving.at_s, stage.began_s), leaving.why
