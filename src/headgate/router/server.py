"""Runs a router process from start to end: listens, probes the workers, relays requests, drains, exits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop

from headgate.allocator import keep_freed_memory
from headgate.collector import spare_the_collector
from headgate.compiling import NotCompiled
from headgate.config import RouteConfig, WorkerAddress
from headgate.edge.certificates import renew
from headgate.errors import HeadgateError, RequestError
from headgate.listening import StopSignals, url_of
from headgate.router.app import ControlPlane
from headgate.router.data_path.bridge import Bridge
from headgate.router.data_path.fast_path import PYTHON, FastPath, compiled
from headgate.router.fleet.monitor import Monitor
from headgate.router.fleet.worker import Worker
from headgate.router.router import Router
from headgate.tls import server_context

log = logging.getLogger(__name__)

BACKLOG = 4096
REMEDY = "install gcc and the headers of Python, and set XDG_CACHE_HOME if the cache folder cannot be written"
FIRST_PROBE_S = 1.0  # wait for the first probes of the workers before accepting requests

Announce = Callable[[str, list[str]], None]


def run_router(config: RouteConfig, listener: socket.socket, version: str, announce: Announce) -> None:
    """Run a router until a signal arrives."""
    fast_path = prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(route(config, listener, version, announce, fast_path))


def prepare_process() -> FastPath:
    """Set up this process, once. Returns the compiled fast path, or the Python one if there is no compiler."""
    keep_freed_memory()
    chosen = compiled()
    if isinstance(chosen, NotCompiled):
        log.warning(
            "the router will use twice the CPU time, because its fast path runs in Python: %s. To compile it: %s",
            chosen.reason,
            REMEDY,
        )
        return PYTHON
    return chosen


async def route(
    config: RouteConfig, listener: socket.socket, version: str, announce: Announce, fast_path: FastPath
) -> None:
    with StopSignals() as signals:
        router = Router(config, fast_path=fast_path)
        async with serving(router, listener, version) as url:
            spare_the_collector()
            announce(url, [f"{worker.url} ({worker.role}, {worker.state})" for worker in router.fleet])
            signals.on_stop = router.hurry
            await signals.first()
            await router.drain()


class serving:  # noqa: N801 - reads as `async with serving(router, ...)`
    """Runs a router: listens, probes the workers and serves the control plane."""

    def __init__(self, router: Router, listener: socket.socket, version: str) -> None:
        self._router = router
        self._listener = listener
        self._version = version
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        router, loop = self._router, asyncio.get_running_loop()
        config = router.config
        tls = None if config.tls is None else server_context(config.tls)
        monitor = Monitor(router)
        router.probe = monitor.probe
        plane = ControlPlane(router, self._version)
        router.bridge = Bridge(plane.app)
        for address in config.workers:
            add_worker(router, address)
        if config.workers_file is not None:
            apply_file(router, config.workers_file)
        self._tasks = [loop.create_task(work) for work in (monitor.run(), router.sweep(), plane.run())]
        if config.workers_file is not None:
            self._tasks.append(loop.create_task(watch_file(router, config.workers_file)))
        for context, files in ((tls, config.tls), (router.worker_tls, config.worker_tls)):
            if context is not None and files is not None:
                self._tasks.append(loop.create_task(renew(context, files)))
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_S):
                while any(worker.state == "starting" for worker in router.fleet):
                    await router.fleet_changed(FIRST_PROBE_S)
        self._server = await loop.create_server(router.connections, sock=self._listener, backlog=BACKLOG, ssl=tls)
        return url_of(self._listener, tls=tls is not None)

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._router.close()


def add_worker(router: Router, address: WorkerAddress) -> Worker:
    worker = router.fleet.add(address.url, address.role)  # type: ignore[arg-type]
    worker.key = address.key
    return worker


# --------------------------------------------------------------------------------------------------- the workers file


async def watch_file(router: Router, path: Path) -> None:
    """Update the fleet whenever the file changes."""
    stamp = _stamp(path)
    while True:
        await asyncio.sleep(1.0)
        if (now := _stamp(path)) != stamp:
            stamp = now
            try:
                apply_file(router, path)
            except HeadgateError as error:
                log.warning("the workers are unchanged: %s", error)


def apply_file(router: Router, path: Path) -> None:
    listed = {address.url: address for address in read_workers(path)}
    for worker in router.fleet:
        if worker.listed and worker.url not in listed:
            router.fleet.remove(worker)
    for address in listed.values():
        add_worker(router, address).listed = True


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def read_workers(path: Path) -> list[WorkerAddress]:
    """Read lines of `URL [role]`. Empty lines and those that start with # are skipped."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"the workers in {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"the workers in {path} cannot be read: the file is not UTF-8 text") from None
    return [_parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if _is_entry(line)]


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse_line(line: str, where: str) -> WorkerAddress:
    url, *rest = line.split()
    if len(rest) > 1:
        raise RequestError(f"{where}: a worker is URL or URL ROLE, not {line.strip()}")
    return worker_address(url, *rest, where=f"{where}: ")


def parse_worker(argument: str) -> WorkerAddress:
    """Read an argument `URL` or `URL=ROLE`."""
    url, equals, role = argument.partition("=")
    return worker_address(url, role) if equals else worker_address(url)


def worker_address(url: str, role: str = "mixed", *, where: str = "") -> WorkerAddress:
    from headgate.contract.fleet import ROLES
    from headgate.router.fleet.fleet import checked_url

    if role not in ROLES:
        raise RequestError(
            f"{where}the role of worker {url} must be one of {', '.join(ROLES)}, not {role or 'empty'}"
        )
    return WorkerAddress(url=checked_url(url), role=role)
