"""Starts and stops an engine process. The process ends when its standard input closes, even if its parent crashed."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from headgate.engine.start import CANNOT_START, EngineStart
from headgate.errors import CannotStart, EngineDead

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0


@asynccontextmanager
async def engine_process(start: EngineStart) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process that runs an engine; leaving the context stops it."""
    argument = msgspec.json.encode(start).decode()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headgate.engine.process", argument),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
        )
    except OSError as error:
        raise EngineDead(f"the engine process cannot be started: {error}") from error
    try:
        yield process
    finally:
        await _stop(process)


async def raise_at_exit(process: asyncio.subprocess.Process) -> None:
    await process.wait()
    if process.returncode == CANNOT_START:
        raise CannotStart("the engine could not start; its log above has the reason")
    raise EngineDead(_exit_reason(process))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the engine's standard input, which ends it; kill it if that takes too long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        log.warning("engine process %d did not end in %g s; killing it", process.pid, STOP_TIMEOUT_S)
        process.kill()
        await process.wait()


def _exit_reason(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"the engine process was killed by signal {-code}"
    return f"the engine process ended with exit code {code}"
