"""Runs tests without sockets on a simulated clock, so that the speed of the machine does not matter."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headgate.testing.sim.loop import SimLoop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(work)
