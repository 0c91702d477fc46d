"""Counts cache hits that workers report, and the hits that the prefix index expected.

Each answer is read once: the journal of Headgate workers, and the usage field of others, if it reports cached tokens.
All counts are in the worker's own tokens. Only attempts that started from the prompt and computed it themselves
count.
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

USAGE_BYTES: Final = 4096  # how many bytes at the end of an answer are searched for usage
MIN_EXPECTED_TOKENS: Final = 128  # if fewer tokens were expected, a miss says nothing about eviction

# Neither pattern can match inside a JSON string, where the quotes would be escaped.
CACHED_FIELD = re.compile(rb'"cached_tokens": ?(\d{1,12})')
PROMPT_FIELD = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,12})')


def record_hits(info: RequestInfo, journal: Journal, placement: Placement, outcome: Outcome) -> None:
    """Count how much of the prompt was cached at the worker of a finished attempt, if the answer reports it."""
    if placement.prefill is not None or placement.reason == "resume":
        return
    usage = _reported_usage(info, journal, outcome)
    if usage is None:
        return
    prompt, cached = usage
    worker, found = placement.worker, placement.found
    expected = 0 if found is None else int(prompt * found.size / len(info.prompt))
    worker.prompt_tokens += prompt
    worker.cached_tokens += cached
    worker.expected_tokens += expected
    if found is not None and worker.kind != "headgate":
        _learn_horizon(worker, found, expected, cached)


def _learn_horizon(worker: Worker, found: WorkerPrefix, expected: int, cached: int) -> None:
    """Infer the horizon of a worker that reports none: blocks that it last used at `found.last_s` were evicted."""
    if expected >= MIN_EXPECTED_TOKENS and cached < expected / 2 and found.last_s < inf:
        worker.horizon_s = max(worker.horizon_s, found.last_s)


def _reported_usage(info: RequestInfo, journal: Journal, outcome: Outcome) -> tuple[int, int] | None:
    """Return the number of prompt tokens, and how many of them were cached; None if they are not reported."""
    if isinstance(outcome, Streamed):
        return journal.cached(info.n) or usage_in(outcome.tail)
    if isinstance(outcome, Answered) and outcome.status == 200:
        return outcome.usage or journal.cached(info.n) or usage_in(outcome.body)
    return None


def usage_in(answer: bytes) -> tuple[int, int] | None:
    end = answer[-USAGE_BYTES:]
    if b'"cached_tokens"' not in end:
        return None
    prompts, cached = PROMPT_FIELD.findall(end), CACHED_FIELD.findall(end)
    return (int(prompts[-1]), int(cached[-1])) if prompts and cached else None
