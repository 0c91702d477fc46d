"""Checks the guarantees 61 to 75 of the lifecycle contract (docs/lifecycle.md) that a run can break.

Each check yields one string per violation. The content of answers is checked by `judge`; this module checks timing,
isolation between clients, and the answers of control calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from headgate.router.control.fan_out import IS_DOWN, WENT_DOWN
from headgate.router.exchange.attempt import Withheld
from headgate.router.exchange.prefill import PREFILL
from headgate.router.exchange.relay import Exchange
from headgate.testing.sim.caller import ReceivedAnswer
from headgate.testing.sim.hosts import SimServer
from headgate.testing.sim.network import SimTransport
from headgate.testing.sim.script import PlannedRequest

REPEATED_S = 3.0  # a refused pause may be requested again within this time
SLACK_S = 1.0  # how much later than its deadline or timeout an answer may come
NETWORK_S = 0.5  # round trip under the worst network conditions
STALL_SLACK_S = 3.0  # extra time to notice a stalled client, because a router checks connections once a second
DEFAULT_TIMEOUT_S = 30.0  # timeout of control calls that specify none
UPDATE_TIMEOUT_S = 300.0
MOST_COUNTED = 1_000_000  # tokens; far more than any run generates
PREEMPTED = "preempted"
LONGEST_TEXT = 4_000  # characters; no prompt that fits the context of 160 tokens is longer


# ---------------------------------------------------------------------------------------------------------------- time


def timeout_of(path: str, body: Any) -> float:
    """Return the timeout that the caller of a control call has set."""
    if isinstance(body, dict) and "timeout" in body:
        return float(body["timeout"])
    if "timeout=" in path:
        return float(path.partition("timeout=")[2])
    return UPDATE_TIMEOUT_S if path == "/v1/update_weights" else DEFAULT_TIMEOUT_S


def late_answer(called: str, reply: ReceivedAnswer, timeout_s: float, stopped_s: float) -> Iterator[str]:
    """Guarantee 61: a control call is answered in time.

    `stopped_s` is how long the called process was suspended (as by SIGSTOP); that time does not count.
    """
    took_s = reply.ended_s - reply.began_s - stopped_s
    if took_s > timeout_s + SLACK_S + NETWORK_S:
        yield f"61: {called} with a timeout of {timeout_s:g} s was answered after {took_s:.2f} s"


def missed_deadline(request: PlannedRequest, stopped_s: float) -> Iterator[str]:
    """Guarantee 69: a request ends at its deadline.

    `stopped_s` is how long the called process was suspended (as by SIGSTOP); that time does not count.
    """
    due_ms = request.body.get("deadline_ms")
    if due_ms is None or request.behaviour.slow_s or request.behaviour.stalls or request.disturbed:
        return
    if request.reply.broken.startswith("no connection"):
        return
    took_s = request.reply.ended_s - request.reply.began_s - stopped_s
    if took_s > due_ms / 1000 + SLACK_S + NETWORK_S:
        yield f"69: {request.name} had a deadline of {due_ms} ms and ended after {took_s:.2f} s"


def is_stuck(transport: SimTransport, limit_s: float) -> bool:
    """Guarantee 62: whether the write buffer has been full for too long without the peer reading a byte."""
    return not transport.lost and transport.stuck_s > limit_s + STALL_SLACK_S


# ------------------------------------------------------------------------------------------------------------- tenants


def implausible_counters(servers: Iterable[SimServer]) -> Iterator[str]:
    """Guarantee 68: clients cannot raise the token counters with forged progress."""
    for server in servers:
        if server.ledger is None:
            continue
        for kind, number in server.ledger.metrics.tokens.items():
            if not 0 <= number < MOST_COUNTED:
                yield f"68: {server.name} counts {number} {kind} tokens"


# --------------------------------------------------------------------------------------------------------- rescheduling


def is_given_up(exchange: Exchange) -> bool:
    """Guarantee 74: whether the rules allow no further attempt at an answer that a worker has returned.

    If the last attempt was preempted, there is no such rule: the last permitted worker recomputes the answer.
    """
    out_of_time = exchange.left_s is not None and exchange.left_s <= 0
    outcome = None if exchange.last_attempt is None else exchange.last_attempt[1]
    preempted = isinstance(outcome, Withheld) and outcome.cause == PREEMPTED
    config = exchange.router.config
    return out_of_time or (not preempted and exchange.moves >= min(config.retries, config.preempt_retry_count))


# ------------------------------------------------------------------------------------------------------ control answers


def listed_twice(path: str, answer: Any, known: Counter[str]) -> Iterator[str]:
    """Guarantee 72: an answer lists each request once. `known` counts the run's requests and choices that use each id."""
    if not isinstance(answer, dict):
        return
    if path == "/v1/requests":
        yield from _duplicates("the list", Counter(str(each["request_id"]) for each in answer["data"]), known)
    if path == "/v1/abort_requests":
        result = answer["result"]
        for kind in ("aborted", "errors"):
            named = Counter(str(each["request_id"]) for each in result.get(kind, ()))
            yield from _duplicates(kind, named, known)
        for kind in ("already_finished", "not_found", "accepted"):
            yield from _duplicates(kind, Counter(map(str, result.get(kind) or ())), known)


def _duplicates(kind: str, named: Counter[str], known: Counter[str]) -> Iterator[str]:
    for name, times in named.items():
        if name.endswith(PREFILL):
            yield f"72: {kind} names {name}, which no client has sent"
        if times > max(known[name], 1):
            yield f"72: {kind} names {name} {times} times"


def overcounted(result: Any, requests: Collection[PlannedRequest], since_s: float) -> Iterator[str]:
    """Guarantee 72: a pause cannot end or finish more requests than exist. A repeated pause may count them again."""
    if not isinstance(result, dict):
        return
    sent = [
        request
        for request in requests
        if request.reply.began_s and not (request.reply.whole and request.reply.ended_s < since_s - REPEATED_S)
    ]
    reported = result.get("aborted", 0) + result.get("finished", 0)
    if reported > len(sent):
        yield f"72: a pause reports {reported} ended or finished requests, but only {len(sent)} existed"


def false_blame(result: Any, others: Collection[str], *, faults: bool) -> Iterator[str]:
    """Guarantee 70: workers are not blamed for another worker's false answers. `others` are the honest workers' addresses.

    With `faults`, the run has faults that a router tolerates. A worker whose engines were killed is down.
    """
    excused = (IS_DOWN, WENT_DOWN) if faults else ()
    workers = result.get("workers", {}) if isinstance(result, dict) else {}
    for url in others:
        outcome = workers.get(url)
        # An error with a code is the worker's own answer.
        error = outcome.get("error") if isinstance(outcome, dict) and not outcome.get("code") else None
        if error and error not in excused:
            yield f"70: {url} is reported as failed because another worker's answer was malformed: {outcome}"
