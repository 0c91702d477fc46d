"""Runs a coroutine as the router's process does, on uvloop, and fails on errors in the event loop."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine
from typing import Any

import uvloop


def run(main: Coroutine[Any, Any, None], timeout_s: float = 100.0) -> None:
    """Run `main`; fail if an exception was not retrieved, or if a task is left."""
    unheard: list[dict[str, Any]] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        async with asyncio.timeout(timeout_s):
            await main
        async with asyncio.timeout(60):
            while left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left)

    with warnings.catch_warnings():
        # A failed test leaves its sockets open, and uvloop crashes on the warning about them.
        warnings.simplefilter("ignore", ResourceWarning)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(watched())
    assert not unheard, [f"{context.get('message')}: {context.get('exception')!r}" for context in unheard]
