"""Supervision of servers: starts and restarts them, and changes their number while they serve.

A `Launcher` runs one server, on this machine or another; the fleet decides how many there are. A server that fails
before it was ever ready is dropped, and its error is reported. A server that was ready once is restarted as long as
it is wanted, with a growing delay while it does not become ready. To remove a server, the router first stops sending
it requests, then it is stopped; it exits when its requests have finished or were resumed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, Self

from headgate.cluster.autoscale import ScaleBounds
from headgate.errors import HeadgateError, RequestError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
ROLES = ("mixed", "prefill", "decode")


class CannotStartServer(HeadgateError):
    """The first start of a server failed; the message is the server's own error."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments and environment of a server of one role, and the resources it needs."""

    arguments: tuple[str, ...]  # arguments of `headgate serve`
    environ: Mapping[str, str] = field(repr=False)
    cpus: float = 1.0
    gpus: float = 0.0
    exchanges_kv: bool = True  # transfers KV to and from servers on other machines


@dataclass(eq=False)
class ServerProcess:
    index: int
    role: str
    url: str = ""  # known once the server has been ready
    pid: int | None = None
    node: str = ""  # the machine it runs on or is meant for, if not this one
    starts: int = 0
    ready: bool = False
    ever_ready: bool = False
    leaving: bool = False
    error: str = ""  # the last error that it reported before it exited
    failure: Exception | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2]) if self.url else 0


class Launcher(Protocol):
    """Starts and stops servers. An async context manager, entered before the fleet and exited after it."""

    keeps_address: bool  # a restarted server has its old address

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def run(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        """Run the server once, until it exits. When cancelled, let it drain for a limited time, then stop it."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks for the router."""

    on_ready: Callable[[ServerProcess], None]  # the server accepts requests; called after every start
    on_leave: Callable[[ServerProcess], None]  # the server is to get no more requests; those it has may finish
    on_gone: Callable[[ServerProcess], None]  # the server has exited and its address is no longer valid


class ServerFleet:
    """The servers that this process starts. An async context manager; on exit it has stopped all servers."""

    def __init__(
        self,
        launcher: Launcher,
        counts: Mapping[str, int],
        hooks: Hooks,
        bounds: Mapping[str, ScaleBounds] | None = None,
    ) -> None:
        self.servers: list[ServerProcess] = []
        self._launcher = launcher
        self._hooks = hooks
        self._bounds = dict(bounds or {})
        self._wanted = {**counts, **{role: 0 for role in ROLES if role not in counts}}  # started in this order
        self._numbers = count()
        self._tasks: dict[ServerProcess, asyncio.Task[None]] = {}
        self._retiring: dict[ServerProcess, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reconcile()
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks, retiring = dict(self._tasks), tuple(self._retiring.values())
        for server, task in tasks.items():
            if not server.leaving:  # leaving servers are already draining
                task.cancel()
        await asyncio.gather(*tasks.values(), *retiring, return_exceptions=True)

    # -- number of servers --------------------------------------------------------------

    @property
    def wanted(self) -> dict[str, int]:
        return dict(self._wanted)

    @property
    def running(self) -> dict[str, int]:
        """The number of servers that accept requests, by role."""
        return {role: sum(server.ready for server in self._staying(role)) for role in ROLES}

    async def ready(self) -> None:
        """Wait until all servers are ready; raises the error of the first one that cannot start."""
        await self._until_ready(self.servers)

    def want(self, counts: Mapping[str, int]) -> list[ServerProcess]:
        """Set the number of servers of these roles; returns the servers that were started."""
        self._check(counts)
        self._wanted.update(counts)
        return self._reconcile()

    async def scale(self, counts: Mapping[str, int], timeout_s: float) -> bool:
        """Call `want` and wait until the servers are ready; returns False after the timeout.

        Raises the error of a server that cannot start.
        """
        started = self.want(counts)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until_ready(started)
                while self._retiring:
                    await self._change()
                return True
        return False

    def _check(self, counts: Mapping[str, int]) -> None:
        for role, number in counts.items():
            if role not in ROLES:
                raise RequestError(f"the roles are {', '.join(ROLES)}, not {role!r}", param=role)
            if number < 0:
                raise RequestError(f"{role} must be at least 0, not {number}", param=role)
            bounds = self._bounds.get(role)
            if bounds is not None and not bounds.least <= number <= bounds.most:
                between = f"between {bounds.least} and {bounds.most}"
                raise RequestError(f"{role} must be {between} (the limits of --autoscale), not {number}", param=role)
        after = self._wanted | dict(counts)
        if not after["mixed"] and not after["decode"]:
            raise RequestError("at least one mixed or decode server must remain", param="mixed")

    # -- adding and removing servers -------------------------------------------------------

    def _staying(self, role: str) -> list[ServerProcess]:
        return [server for server in self.servers if server.role == role and not server.leaving]

    def _reconcile(self) -> list[ServerProcess]:
        started = []
        for role, number in self._wanted.items():
            staying = self._staying(role)
            started += [self._start(role) for _ in range(number - len(staying))]
            # Remove servers that are not ready first, then the newest.
            candidates = sorted(staying, key=lambda server: (server.ready, -server.index))
            for server in candidates[: max(0, len(staying) - number)]:
                self._retire(server)
        return started

    def _start(self, role: str) -> ServerProcess:
        server = ServerProcess(next(self._numbers), role)
        self.servers.append(server)
        self._tasks[server] = asyncio.create_task(self._supervise(server))
        return server

    def _retire(self, server: ServerProcess) -> None:
        server.leaving = True
        log.info("removing worker %d (%s)", server.index, server.role)
        if server.url:
            self._hooks.on_leave(server)
        self._retiring[server] = asyncio.create_task(self._end(server))

    async def _end(self, server: ServerProcess) -> None:
        task = self._tasks[server]
        task.cancel()
        await asyncio.wait({task})
        self._forget(server)

    def _forget(self, server: ServerProcess) -> None:
        self.servers.remove(server)
        self._tasks.pop(server)
        self._retiring.pop(server, None)
        self._notify()

    # -- one server -----------------------------------------------------------------------

    async def _supervise(self, server: ServerProcess) -> None:
        try:
            await self._run_with_restarts(server)
        except Exception as error:
            server.failure = error
            # The caller of `scale` gets the error; the other servers keep running.
            if not server.leaving:
                self._wanted[server.role] -= 1
                expected = isinstance(error, HeadgateError)
                log.error("worker %d (%s) cannot start: %s", server.index, server.role, error, exc_info=not expected)
                self._forget(server)

    async def _run_with_restarts(self, server: ServerProcess) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._run_once(server)
            if not server.ever_ready:
                raise CannotStartServer(server.error or f"worker {server.index} exited before it was ready")
            backoff_s = FIRST_BACKOFF_S if was_ready else min(2 * backoff_s, LONGEST_BACKOFF_S)
            reason = f" ({server.error})" if server.error else ""
            log.warning("worker %d has exited%s; restarting it in %g s", server.index, reason, backoff_s)
            await asyncio.sleep(backoff_s)

    async def _run_once(self, server: ServerProcess) -> bool:
        """Run the server until it exits; returns whether it became ready."""
        server.starts += 1
        server.error = ""
        try:
            await self._launcher.run(server, lambda: self._became_ready(server))
        except Exception as error:
            if not server.ever_ready:
                raise
            server.error = f"{type(error).__name__}: {error}"  # its machine may recover later
        finally:
            was_ready, server.ready = server.ready, False
        if was_ready and not self._launcher.keeps_address:
            self._hooks.on_gone(server)
            server.url = ""
        return was_ready

    def _became_ready(self, server: ServerProcess) -> None:
        server.ready = server.ever_ready = True
        if not server.leaving:
            self._hooks.on_ready(server)
        self._notify()

    # -- waiting --------------------------------------------------------------------------

    async def _until_ready(self, servers: list[ServerProcess]) -> None:
        servers = list(servers)
        while True:
            for server in servers:
                if server.failure is not None:
                    raise server.failure
            if all(server.ever_ready or server.leaving for server in servers):
                return
            await self._change()

    async def _change(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
