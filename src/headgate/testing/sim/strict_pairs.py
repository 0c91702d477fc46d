"""Guarantee 73: a header that changes the presentation of an answer does not change its scheduling.

Some seeds also run a variant of their plan twice: once with `X-OpenAI-Strict` on every request, and once with an unknown
header in its place. In both runs the network has no jitter and splits no data, and no client reads slowly. The content
of a message then does not affect the time of any event, so both runs must place the requests at the same workers in the
same order, and clients must receive the same tokens. Engines have few blocks and return preempted answers to the
router, which continues them at other workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from headgate.testing.sim.caller import ReceivedAnswer
from headgate.testing.sim.judge import read
from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.script import PlannedRequest, SimulationPlan

SHARE = 0.1  # of all seeds
BLOCKS = 32
STRICT, UNKNOWN = "x-openai-strict", "x-openai-unknown"

Placements = dict[tuple[str, str], list[str]]  # (router, id) -> addresses of workers


@dataclass(frozen=True, slots=True)
class PlanResult:
    requests: list[PlannedRequest]
    placements: Placements
    report: SimulationReport


def is_drawn(seed: int) -> bool:
    return random.Random(f"strict pair {seed}").random() < SHARE


def add_pair(report: SimulationReport, plan: SimulationPlan, run: Callable[[SimulationPlan], PlanResult]) -> None:
    """Run both variants of the plan, which has not been run yet, and add the result to the report of the seed."""
    results = [run(_variant(plan, header)) for header in (UNKNOWN, STRICT)]
    failures = [f"in a strict pair: {failure}" for result in results for failure in result.report.failures]
    failures += _differences(*results)
    report.failures += failures
    report.counts["strict pairs"] += 1
    report.counts["moves in strict pairs"] += sum(len(urls) - 1 for urls in results[0].placements.values())
    if failures:
        for result in results:
            report.trace += result.report.trace


def _differences(usual: PlanResult, strict: PlanResult) -> Iterator[str]:
    for one, other in zip(usual.requests, strict.requests, strict=True):
        places = [result.placements.get((one.to, one.id)) for result in (usual, strict)]
        if places[0] != places[1]:
            yield f"73: {one.name} was placed at {places[1]} for a strict client, but at {places[0]} for another"
        elif _content(one) != _content(other):
            yield f"73: {one.name} was answered {_content(other)} for a strict client, but {_content(one)} for another"


def _variant(plan: SimulationPlan, header: str) -> SimulationPlan:
    network = replace(plan.network, jitter_s=0.0, splits=0.0, high_water=1 << 20)
    profile = replace(plan.profile, reschedules=True, blocks=BLOCKS)
    requests = [_sent_with(header, request) for request in plan.requests]
    return replace(plan, requests=requests, network=network, profile=profile)


def _sent_with(header: str, request: PlannedRequest) -> PlannedRequest:
    headers = {name: value for name, value in request.headers.items() if name != STRICT} | {header: "true"}
    behaviour = replace(request.behaviour, slow_s=0.0)
    return replace(deepcopy(request), headers=headers, behaviour=behaviour, reply=ReceivedAnswer())


def _content(request: PlannedRequest) -> tuple[Any, ...]:
    """Return what the client received, regardless of its presentation."""
    reply = request.reply
    if reply.status != 200 or not reply.whole:
        return reply.status, reply.whole
    answer = read(request)
    choices = {index: (each.ids, each.text, each.cause, each.finish) for index, each in answer.choices.items()}
    return answer.usage, choices
