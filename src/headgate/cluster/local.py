"""Servers on this machine, each a process of its own that is gone when we are.

A server ends when our end of its standard input closes, however we died. It is not in our process group, so Ctrl-C is ours
to pass on. One that is started again has its old port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from headgate.cluster.fleet import ROLES, Hooks, Recipe, ServerFleet, ServerProcess

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0  # beyond the time a server has to drain
LONGEST_LINE = 2**20
SAYS = "headgate: "

LocalWorker = ServerProcess


class LocalLauncher:
    keeps_address = True

    def __init__(self, recipes: Mapping[str, Recipe], *, drain_timeout_s: float = 30.0) -> None:
        self._recipes = dict(recipes)
        self._drain_timeout_s = drain_timeout_s

    async def __aenter__(self) -> LocalLauncher:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def live(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
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
            await _listen(server, process, on_ready)
            await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Let it drain, and end it if it does not."""
        if process.returncode is not None:
            return
        drained = asyncio.ensure_future(_drain(process))
        try:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(self._drain_timeout_s + LAST_WORDS_S):
                await process.wait()
        except (TimeoutError, ProcessLookupError):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            drained.cancel()


class LocalFleet(ServerFleet):
    """Servers here that are all started alike, for whoever only wants to hear that they take requests."""

    def __init__(
        self,
        arguments: Sequence[str],
        roles: Sequence[str],
        environ: Mapping[str, str],
        on_ready: Callable[[ServerProcess], None],
        *,
        drain_timeout_s: float = 30.0,
    ) -> None:
        recipes = dict.fromkeys(ROLES, Recipe(tuple(arguments), environ))
        launcher = LocalLauncher(recipes, drain_timeout_s=drain_timeout_s)
        super().__init__(launcher, Counter(roles), Hooks(on_ready, _nobody, _nobody))

    @property
    def workers(self) -> list[ServerProcess]:
        return self.servers


def _nobody(server: ServerProcess) -> None:
    pass


async def _listen(server: ServerProcess, process: asyncio.subprocess.Process, on_ready: Callable[[], None]) -> None:
    """Read what it logs, to the end."""
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # longer than any line of ours
            continue
        if not line:
            return
        if _heard(server, line.decode("utf-8", "replace").rstrip()):
            on_ready()


def _heard(server: ServerProcess, line: str) -> bool:
    """Pass a line on; True if it says that the server is ready."""
    if line.startswith(SAYS):
        server.sentence = line.removeprefix(SAYS)
    try:
        told = json.loads(line)
    except ValueError:
        log.debug("worker %d: %s", server.index, line)
        return False
    if not isinstance(told, dict) or told.get("message") != "ready" or "url" not in told:
        _log(server, told if isinstance(told, dict) else {})
        return False
    server.url = told["url"]
    return True


def _log(server: ServerProcess, told: Mapping[str, object]) -> None:
    level = logging.getLevelNamesMapping().get(str(told.get("level", "")).upper(), logging.INFO)
    who = f"worker {server.index}, {told.get('process')}"
    log.log(level, "%s: %s%s", who, told.get("message"), f"\n{trace}" if (trace := told.get("traceback")) else "")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """What it still says must go somewhere, or it would wait for a reader."""
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass
