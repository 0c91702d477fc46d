"""Sentences 61 to 75 of the lifecycle contract, as far as a run can break them. Each oracle yields complaints.

What an answer may contain is the business of `judge`; this is about time, about other clients, and about what control calls
say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from headgate.router.control.fan_out import WENT_DOWN
from headgate.router.exchange.prefill import PREFILL
from headgate.testing.sim.caller import ReceivedAnswer
from headgate.testing.sim.hosts import SimServer
from headgate.testing.sim.network import SimTransport
from headgate.testing.sim.script import PlannedRequest

REPEATED_S = 3.0  # in which a pause that was refused may be asked for again
SLACK_S = 1.0  # that an answer may be later than its deadline or timeout
NETWORK_S = 0.5  # the way there and back, in the worst weather
STALL_SLACK_S = 3.0  # a router looks at its connections once a second
DEFAULT_TIMEOUT_S = 30.0  # of control calls that name none
UPDATE_TIMEOUT_S = 300.0
MOST_COUNTED = 1_000_000  # tokens: no honest run comes near it
LONGEST_TEXT = 4_000  # characters; no prompt of the context's 160 tokens is longer


# ---------------------------------------------------------------------------------------------------------------- time


def timeout_of(path: str, body: Any) -> float:
    """The time that the caller of a control call has given it."""
    if isinstance(body, dict) and "timeout" in body:
        return float(body["timeout"])
    if "timeout=" in path:
        return float(path.partition("timeout=")[2])
    return UPDATE_TIMEOUT_S if path == "/v1/update_weights" else DEFAULT_TIMEOUT_S


def late_answer(what: str, reply: ReceivedAnswer, timeout_s: float, stopped_s: float) -> Iterator[str]:
    """61. `away_s`: how long the process that was called was itself stopped."""
    took_s = reply.ended_s - reply.began_s - stopped_s
    if took_s > timeout_s + SLACK_S + NETWORK_S:
        yield f"61: {what} with a timeout of {timeout_s:g} s was answered after {took_s:.2f} s"


def missed_deadline(request: PlannedRequest, stopped_s: float) -> Iterator[str]:
    """69. `away_s`: how long the process that was asked was itself stopped."""
    due_ms = request.body.get("deadline_ms")
    if due_ms is None or request.behaviour.slow_s or request.behaviour.stalls or request.disturbed:
        return
    if request.reply.broken.startswith("no connection"):
        return
    took_s = request.reply.ended_s - request.reply.began_s - stopped_s
    if took_s > due_ms / 1000 + SLACK_S + NETWORK_S:
        yield f"69: {request.name} had {due_ms} ms and ended after {took_s:.2f} s"


def is_stuck(transport: SimTransport, limit_s: float) -> bool:
    """62. Whether it has been full for too long without its peer taking a byte."""
    return not transport.lost and transport.stuck_s > limit_s + STALL_SLACK_S


# ------------------------------------------------------------------------------------------------------------- tenants


def implausible_counters(servers: Iterable[SimServer]) -> Iterator[str]:
    """68."""
    for server in servers:
        if server.ledger is None:
            continue
        for kind, number in server.ledger.metrics.tokens.items():
            if not 0 <= number < MOST_COUNTED:
                yield f"68: {server.name} has counted {number} {kind} tokens"


# ------------------------------------------------------------------------------------------------------ control answers


def lists_twice(path: str, told: Any, known: Counter[str]) -> Iterator[str]:
    """72. `known`: how many requests of the run have each id."""
    if not isinstance(told, dict):
        return
    if path == "/v1/requests":
        yield from _too_often("the list", Counter(str(each["request_id"]) for each in told["data"]), known)
    if path == "/v1/abort_requests":
        result = told["result"]
        for kind in ("aborted", "errors"):
            named = Counter(str(each["request_id"]) for each in result.get(kind, ()))
            yield from _too_often(kind, named, known)
        for kind in ("already_finished", "not_found", "accepted"):
            yield from _too_often(kind, Counter(map(str, result.get(kind) or ())), known)


def _too_often(kind: str, named: Counter[str], known: Counter[str]) -> Iterator[str]:
    for name, times in named.items():
        if name.endswith(PREFILL):
            yield f"72: {kind} names {name}, which no client has asked for"
        if times > max(known[name], 1):
            yield f"72: {kind} names {name} {times} times"


def overcounts(result: Any, requests: Collection[PlannedRequest], since_s: float) -> Iterator[str]:
    """72: a pause cannot have ended or finished more choices than there were. One that is repeated may count them again."""
    if not isinstance(result, dict):
        return
    there = [
        request
        for request in requests
        if request.reply.began_s and not (request.reply.whole and request.reply.ended_s < since_s - REPEATED_S)
    ]
    told, choices = result.get("aborted", 0) + result.get("finished", 0), sum(request.n for request in there)
    if told > choices:
        yield f"72: a pause tells of {told} choices that it has ended or that have finished, and there were {choices}"


def slanders(result: Any, others: Collection[str]) -> Iterator[str]:
    """70: what is said of workers that do not lie. `others`: their addresses."""
    workers = result.get("workers", {}) if isinstance(result, dict) else {}
    for url in others:
        said = workers.get(url)
        # An error with a code is the worker's own answer. A worker without engines is down.
        error = said.get("error") if isinstance(said, dict) and not said.get("code") else None
        if error and error != WENT_DOWN:
            yield f"70: {url} is said to have failed because another worker's answer was malformed: {said}"
