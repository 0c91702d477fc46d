"""Runs servers as child processes on this machine.

A server exits when the parent's end of its standard input closes, so it never outlives the parent, even if the parent
is killed. It is not in the parent's process group, so Ctrl-C reaches only the parent, which then stops the server. A
restarted server keeps its port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from headgate.cluster.fleet import Recipe, ServerProcess

log = logging.getLogger(__name__)

EXIT_MARGIN_S = 5.0  # how long a server may take to exit after its drain timeout
LONGEST_LINE = 2**20
ERROR_PREFIX = "headgate: "


class LocalLauncher:
    keeps_address = True

    def __init__(self, recipes: Mapping[str, Recipe], *, drain_timeout_s: float = 30.0) -> None:
        self._recipes = dict(recipes)
        self._drain_timeout_s = drain_timeout_s

    async def __aenter__(self) -> LocalLauncher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def run(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        recipe = self._recipes[server.role]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headgate.cli", "serve", *recipe.arguments),
            *("--port", str(server.port), "--log-format", "json", "--with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=dict(recipe.environ),
            limit=LONGEST_LINE,
            start_new_session=True,
        )
        server.pid = process.pid
        try:
            await _read_logs(server, process, on_ready)
            await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Let the server drain and exit; kill it after the timeout."""
        if process.returncode is not None:
            return
        discarded = asyncio.ensure_future(_discard_logs(process))
        try:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(self._drain_timeout_s + EXIT_MARGIN_S):
                await process.wait()
        except (TimeoutError, ProcessLookupError):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            discarded.cancel()


async def _read_logs(
    server: ServerProcess, process: asyncio.subprocess.Process, on_ready: Callable[[], None]
) -> None:
    """Read the server's log lines until it closes the stream; call `on_ready` when a line says that it is ready."""
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # longer than LONGEST_LINE
            continue
        if not line:
            return
        if _handle_line(server, line.decode("utf-8", "replace").rstrip()):
            on_ready()


def _handle_line(server: ServerProcess, line: str) -> bool:
    """Log a line of the server; returns whether the line reports that the server is ready."""
    if line.startswith(ERROR_PREFIX):
        server.error = line.removeprefix(ERROR_PREFIX)
    try:
        record = json.loads(line)
    except ValueError:
        log.debug("worker %d: %s", server.index, line)
        return False
    if not isinstance(record, dict) or record.get("message") != "ready" or "url" not in record:
        _log(server, record if isinstance(record, dict) else {})
        return False
    server.url = record["url"]
    return True


def _log(server: ServerProcess, record: Mapping[str, object]) -> None:
    level = logging.getLevelNamesMapping().get(str(record.get("level", "")).upper(), logging.INFO)
    name = f"worker {server.index}, {record.get('process')}"
    trace = f"\n{trace}" if (trace := record.get("traceback")) else ""
    log.log(level, "%s: %s%s", name, record.get("message"), trace)


async def _discard_logs(process: asyncio.subprocess.Process) -> None:
    """Read and discard the server's output; otherwise the server would block on a full pipe."""
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass
