"""What workers really found in their caches, beside what the index expected of them.

Read once an answer, from what it says of itself: the journal of our own workers, the usage of others if they tell it. Both
are counted in the worker's own tokens, of attempts that began with the prompt and computed it themselves.
"""

from __future__ import annotations

import re
from math import inf
from typing import Final

from headgate.router.data_path.request_info import RequestInfo
from headgate.router.exchange.attempt import Answered, Outcome, Streamed
from headgate.router.exchange.journal import Journal
from headgate.router.exchange.placement import Placement
from headgate.router.fleet.prefix_index import WorkerPrefix
from headgate.router.fleet.worker import Worker

USAGE_BYTES: Final = 4096  # at the end of an answer, where its usage is looked for
LEAST_TOKENS: Final = 128  # expected, before a worker is believed to have lost them

# Neither can stand inside a string, which would escape its quotes.
CACHED = re.compile(rb'"cached_tokens": ?(\d{1,12})')
PROMPT = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,12})')


def note(ask: RequestInfo, journal: Journal, placement: Placement, outcome: Outcome) -> None:
    """Count what the worker of an attempt that has ended had of its prompt, if it says so."""
    if placement.prefill is not None or placement.reason == "resume":
        return
    told = _told(ask, journal, outcome)
    if told is None:
        return
    prompt, cached = told
    worker, found = placement.worker, placement.found
    expected = 0 if found is None else int(prompt * found.size / len(ask.prompt))
    worker.prompt_tokens += prompt
    worker.cached_tokens += cached
    worker.expected_tokens += expected
    if found is not None and worker.kind != "headgate":
        _learn(worker, found, expected, cached)


def _learn(worker: Worker, found: WorkerPrefix, expected: int, cached: int) -> None:
    """One that does not tell its horizon has shown it: what it had used so long ago is gone."""
    if expected >= LEAST_TOKENS and cached < expected / 2 and found.last_s < inf:
        worker.horizon_s = max(worker.horizon_s, found.last_s)


def _told(ask: RequestInfo, journal: Journal, outcome: Outcome) -> tuple[int, int] | None:
    """Tokens of the prompt, and how many of them were cached."""
    if isinstance(outcome, Streamed):
        return journal.cached(ask.n) or usage_in(outcome.tail)
    if isinstance(outcome, Answered) and outcome.status == 200:
        return outcome.usage or journal.cached(ask.n) or usage_in(outcome.body)
    return None


def usage_in(answer: bytes) -> tuple[int, int] | None:
    end = answer[-USAGE_BYTES:]
    if b'"cached_tokens"' not in end:
        return None
    prompts, cached = PROMPT.findall(end), CACHED.findall(end)
    return (int(prompts[-1]), int(cached[-1])) if prompts and cached else None
