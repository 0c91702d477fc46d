"""The processes under test: servers and a router, and their resource usage.

A `ServerFleet` starts and restarts the servers, as in `headgate up`. There is a `FaultProxy` between the router and
each server. The router is a separate process that ends with this one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headgate.cluster.fleet import Hooks, Recipe, ServerFleet, ServerProcess
from headgate.cluster.local import LocalLauncher
from headgate.errors import HeadgateError
from headgate.httpclient import HttpAddress, HttpFailure, call
from headgate.listening import take_port
from headgate.testing.chaos.client import clock
from headgate.testing.chaos.proxy import FaultProxy

log = logging.getLogger(__name__)

# API keys of two tenants, which must be isolated from each other, of the admin, and of the router at its servers.
LOAD_KEY, HOSTILE_KEY, ADMIN_KEY, WORKER_KEY = "key-of-polite", "key-of-rude", "key-of-operators", "key-of-router"
ROUTER_KEYS = {
    "HEADGATE_API_KEYS": f"polite:{LOAD_KEY},rude:{HOSTILE_KEY}",
    "HEADGATE_ADMIN_KEY": ADMIN_KEY,
    "HEADGATE_WORKER_KEY": WORKER_KEY,
}
SERVER_KEYS = {"HEADGATE_WORKER_KEY": WORKER_KEY}

START_S = 180.0
DRAIN_S = 5.0
GET_S = 10.0
PATIENCE_S = 60.0
POLL_S = 0.1
NO_ANSWER = (OSError, EOFError, TimeoutError, ValueError, HttpFailure)  # no answer, or an unreadable one


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """Resource usage of a process, from /proc."""

    rss_mb: float
    fds: int
    threads: int


def process_stats(pid: int) -> ProcessStats | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmRSS" not in facts:
            return None  # a zombie
        rss_mb, threads = int(facts["VmRSS"].split()[0]) / 1024, int(facts["Threads"])
        return ProcessStats(round(rss_mb, 1), len(os.listdir(f"/proc/{pid}/fd")), threads)
    except OSError:
        return None


def engines_of(pid: int | None) -> list[int]:
    """Return the pids of a server's engine processes."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"engine-" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return []


def send(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def get(url: str, path: str) -> bytes:
    """Return the body of the answer; raises OSError if its status is not 200."""
    async with asyncio.timeout(GET_S), call(HttpAddress.of(url), "GET", path, api_key=ADMIN_KEY) as answer:
        body = await answer.body()
        if answer.status != 200:
            raise OSError(f"GET {path} answered {answer.status}")
        return body


async def metrics(url: str) -> dict[str, float]:
    """Return the samples of /metrics, by name and labels. Retries, because a busy machine may delay a process."""
    until_s = clock() + PATIENCE_S
    while True:
        try:
            page = (await get(url, "/metrics")).decode()
            break
        except NO_ANSWER:
            if clock() > until_s:
                raise
            await asyncio.sleep(POLL_S)
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class RouterProcess:
    """A process that runs `headgate route`. An async context manager."""

    def __init__(self, workers: Sequence[str], environ: Mapping[str, str]) -> None:
        with take_port("127.0.0.1", 0) as taken:
            self.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        self._workers, self._environ = workers, environ

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def __aenter__(self) -> RouterProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headgate.cli", "route", *self._workers, "--port", self.url.rpartition(":")[2]),
            *("--log-format", "json", "--drain-timeout", "5", "--with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**self._environ, **ROUTER_KEYS},
            start_new_session=True,
        )
        self._log_reader = asyncio.create_task(self._read_log())
        return self

    async def __aexit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            async with asyncio.timeout(15):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._log_reader

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            try:
                record = json.loads(line)
            except ValueError:
                record = {"message": line.decode("utf-8", "replace").rstrip(), "level": "warning"}
            level = logging.getLevelNamesMapping().get(str(record.get("level", "")).upper(), logging.INFO)
            trace = record.get("traceback")
            log.log(level, "router: %s%s", record.get("message"), f"\n{trace}" if trace else "")


def local_servers(
    arguments: Sequence[str],
    counts: Mapping[str, int],
    environ: Mapping[str, str],
    on_ready: Callable[[ServerProcess], None],
) -> ServerFleet:
    """Return servers as in `headgate up`: they restart at the same addresses, and end with this process."""
    recipe = Recipe(tuple(arguments), environ)
    launcher = LocalLauncher(dict.fromkeys(counts, recipe), drain_timeout_s=DRAIN_S)
    return ServerFleet(launcher, counts, Hooks(on_ready, on_leave=_ignore, on_gone=_ignore))


def _ignore(server: ServerProcess) -> None:
    """Ignore a removed or moved server: servers are not removed here, and addresses do not change."""


class ChaosFleet:
    """The fleet under test. An async context manager; entering waits until every server gets requests."""

    def __init__(self, arguments: Sequence[str], counts: Mapping[str, int], environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self.proxies = [FaultProxy() for _ in range(sum(counts.values()))]
        self._local = local_servers(arguments, counts, {**environ, **SERVER_KEYS}, self._on_ready)
        self.seen: set[int] = set()  # pids of all processes that ever ran

    @property
    def workers(self) -> list[ServerProcess]:
        return self._local.servers

    @property
    def url(self) -> str:
        return self.router.url

    async def __aenter__(self) -> ChaosFleet:
        async with AsyncExitStack() as stack:
            for proxy in self.proxies:
                await stack.enter_async_context(proxy)
            await stack.enter_async_context(self._local)
            async with asyncio.timeout(START_S):
                await self._local.ready()
            known = [f"{self.proxies[server.index].url}={server.role}" for server in self.workers]
            self.router = await stack.enter_async_context(RouterProcess(known, self._environ))
            await self.all_ready(START_S)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.note_processes()
        await self._stack.aclose()

    def _on_ready(self, worker: ServerProcess) -> None:
        self.proxies[worker.index].target = ("127.0.0.1", worker.port)
        self.note_processes()

    # -- state --------------------------------------------------------------------------

    async def states(self) -> list[str]:
        """Return the state of each server, as reported by the router."""
        answer = msgspec.json.decode(await get(self.url, "/v1/workers"))
        by_url = {worker["url"]: str(worker["state"]) for worker in answer["workers"]}
        return [by_url.get(proxy.url, "unknown") for proxy in self.proxies]

    async def all_ready(self, timeout_s: float) -> None:
        until_s, states = clock() + timeout_s, ["unknown"]
        while set(states) != {"ready"}:
            if clock() > until_s:
                raise HeadgateError(f"not every server is ready after {timeout_s:g} s: {', '.join(states)}")
            if self.router.ended:
                raise HeadgateError("the router has ended")
            await asyncio.sleep(POLL_S)
            with suppress(*NO_ANSWER):
                states = await self.states()

    def processes(self) -> dict[str, int]:
        """Return the pids of the running processes, by name."""
        found: dict[str, int] = {"router": self.router.pid} if hasattr(self, "router") else {}
        for worker in self.workers:
            if worker.pid is None:
                continue
            found[f"server {worker.index}"] = worker.pid
            for engine in engines_of(worker.pid):
                found[f"engine {worker.index}"] = engine
        return found

    def note_processes(self) -> None:
        self.seen |= set(self.processes().values())

    async def leftover_processes(self) -> list[int]:
        """Return processes that outlive the fleet. An engine that gets no CPU time may take a while to end."""
        until_s = clock() + PATIENCE_S
        while True:
            left = [pid for pid in sorted(self.seen) if process_stats(pid) is not None and _is_ours(pid)]
            if not left or clock() > until_s:
                return left
            await asyncio.sleep(POLL_S)


def _is_ours(pid: int) -> bool:
    """Whether the pid still belongs to the fleet, and was not reused."""
    with suppress(OSError):
        return b"headgate" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def control(
    url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> tuple[int, dict[str, Any]]:
    """Make a control call; returns its status and body."""
    data = msgspec.json.encode(body or {})
    async with asyncio.timeout(timeout_s), call(HttpAddress.of(url), "POST", path, data, ADMIN_KEY) as answer:
        return answer.status, msgspec.json.decode(await answer.body())
