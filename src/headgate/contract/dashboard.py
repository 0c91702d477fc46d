"""GET /dashboard/numbers: the counts of one server. A router adds up those of its workers."""

from __future__ import annotations

import msgspec

from headgate.contract.control import overall
from headgate.dashboard.frame import HistogramBounds
from headgate.dashboard.meter import Counts

# Histogram bounds in seconds. All servers use the same, so that their counts can be added.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
BETWEEN_TOKENS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)

BOUNDS = HistogramBounds(FIRST_TOKEN_S, BETWEEN_TOKENS_S)


class EngineNumbers(msgspec.Struct, kw_only=True):
    engine: int
    state: str
    detail: str = ""
    version: int | None = None
    running: int = 0
    waiting: int = 0
    total: int = 0  # KV blocks
    held: int = 0
    leased: int = 0
    cached: int = 0
    counts: Counts = Counts()


class Numbers(msgspec.Struct, kw_only=True):
    engines: list[EngineNumbers]
    counts: Counts


def state_of(numbers: Numbers) -> str:
    answering = {engine.state for engine in numbers.engines} - {"down", "wedged"}
    return overall(answering) if answering else "down"
