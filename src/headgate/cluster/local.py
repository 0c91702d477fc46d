"""Servers on this machine, each a process of its own: started, watched, started again, and gone when we are.

A server ends when our end of its standard input closes, however we died. It is not in our process group, so Ctrl-C is ours
to pass on. One that dies is started again on its old port, later each time it does not become ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headgate.errors import HeadgateError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
LAST_WORDS_S = 5.0  # beyond the time a server has to drain
LONGEST_LINE = 2**20
SAYS = "headgate: "


class CannotStartWorker(HeadgateError):
    """The first start of a server failed, and this is what it said."""


@dataclass(eq=False)
class LocalWorker:
    index: int
    role: str
    url: str = ""  # once it has been ready
    pid: int | None = None
    starts: int = 0
    sentence: str = ""  # the last that it said about why it cannot start
    process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2]) if self.url else 0


class LocalFleet:
    """Use as `async with`; `on_ready` is called each time a server takes requests."""

    def __init__(
        self,
        arguments: Sequence[str],
        roles: Sequence[str],
        environ: Mapping[str, str],
        on_ready: Callable[[LocalWorker], None],
        *,
        drain_timeout_s: float = 30.0,
    ) -> None:
        self.workers = [LocalWorker(index, role) for index, role in enumerate(roles)]
        self._arguments = list(arguments)
        self._environ = dict(environ)
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._unready = set(range(len(roles)))

    async def __aenter__(self) -> LocalFleet:
        self._tasks = [asyncio.create_task(self._supervise(worker)) for worker in self.workers]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(worker) for worker in self.workers))

    async def ready(self) -> None:
        """Return when all of them are; raises what the first one says that cannot start."""
        waiting = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({waiting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            waiting.cancel()

    # -- one server ---------------------------------------------------------------------

    async def _supervise(self, worker: LocalWorker) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._run(worker)
            if not worker.url:
                raise CannotStartWorker(worker.sentence or f"worker {worker.index} ended before it was ready")
            backoff_s = FIRST_BACKOFF_S if was_ready else min(2 * backoff_s, LONGEST_BACKOFF_S)
            log.warning("worker %d at %s has died; starting it again in %g s", worker.index, worker.url, backoff_s)
            await asyncio.sleep(backoff_s)

    async def _run(self, worker: LocalWorker) -> bool:
        """One life of it; whether it was ever ready."""
        worker.starts += 1
        worker.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headgate.cli", "serve", *self._arguments),
            *("--port", str(worker.port), "--log-format", "json", "--with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            limit=LONGEST_LINE,
            start_new_session=True,
        )
        worker.pid = worker.process.pid
        was_ready = await self._listen(worker, worker.process)
        await worker.process.wait()
        return was_ready

    async def _listen(self, worker: LocalWorker, process: asyncio.subprocess.Process) -> bool:
        """Read what it logs, to the end."""
        assert process.stderr is not None
        was_ready = False
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than any line of ours
                continue
            if not line:
                return was_ready
            if self._heard(worker, line.decode("utf-8", "replace").rstrip()):
                was_ready = True

    def _heard(self, worker: LocalWorker, line: str) -> bool:
        """Pass a line on; True if it says that the server is ready."""
        if line.startswith(SAYS):
            worker.sentence = line.removeprefix(SAYS)
        try:
            told = json.loads(line)
        except ValueError:
            log.debug("worker %d: %s", worker.index, line)
            return False
        if not isinstance(told, dict) or told.get("message") != "ready" or "url" not in told:
            self._log(worker, told if isinstance(told, dict) else {})
            return False
        worker.url = told["url"]
        self._unready.discard(worker.index)
        self._on_ready(worker)
        if not self._unready:
            self._ready.set()
        return True

    def _log(self, worker: LocalWorker, told: Mapping[str, object]) -> None:
        level = logging.getLevelNamesMapping().get(str(told.get("level", "")).upper(), logging.INFO)
        who = f"worker {worker.index}, {told.get('process')}"
        log.log(level, "%s: %s%s", who, told.get("message"), f"\n{trace}" if (trace := told.get("traceback")) else "")

    async def _stop(self, worker: LocalWorker) -> None:
        """Let it drain, and end it if it does not."""
        process = worker.process
        if process is None or process.returncode is not None:
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


async def _drain(process: asyncio.subprocess.Process) -> None:
    """What it still says must go somewhere, or it would wait for a reader."""
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass
