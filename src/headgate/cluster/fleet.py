"""Servers that are kept running: started, watched, started again, more of them or fewer while they serve.

A `Launcher` knows how a server lives, here or on another machine; this knows how many there should be. One that never came
up is given up with what it said; one that has been ready once is started again for as long as it is wanted, later each time
it does not become ready. What leaves is first taken from whoever sends it requests, then told to end, which it does when
its requests have, or somebody else has gone on with them.
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
    """The first start of a server failed, and this is what it said."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a server of one role is started, and what it takes of a machine."""

    arguments: tuple[str, ...]  # of `headgate serve`
    environ: Mapping[str, str] = field(repr=False)
    cpus: float = 1.0
    gpus: float = 0.0
    exchanges_kv: bool = True  # with servers on other machines


@dataclass(eq=False)
class ServerProcess:
    index: int
    role: str
    url: str = ""  # once it has been ready
    pid: int | None = None
    node: str = ""  # that it is on, or is meant for, if not here
    starts: int = 0
    ready: bool = False
    proven: bool = False  # it has been ready once
    leaving: bool = False
    sentence: str = ""  # the last that it said about why it cannot start
    failure: Exception | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2]) if self.url else 0


class Launcher(Protocol):
    """How a server lives. Entered before the fleet, and left after it."""

    keeps_address: bool  # a server that is started again has the address that it had

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def live(self, server: ServerProcess, on_ready: Callable[[], None]) -> None:
        """One life of it, to its end; cancelled, let it finish what it has, for a while, and end it."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whoever sends requests to the servers."""

    on_ready: Callable[[ServerProcess], None]  # each time that it takes requests
    on_leave: Callable[[ServerProcess], None]  # it shall get nothing more; what it has may finish
    on_gone: Callable[[ServerProcess], None]  # it has died, and its address with it


class ServerFleet:
    """Use as `async with`: at the end all servers have ended."""

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
        self._lives: dict[ServerProcess, asyncio.Task[None]] = {}
        self._retiring: dict[ServerProcess, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reconcile()
        return self

    async def __aexit__(self, *exc: object) -> None:
        lives, retiring = dict(self._lives), tuple(self._retiring.values())
        for server, life in lives.items():
            if not server.leaving:  # those have been told, and have their time to end
                life.cancel()
        await asyncio.gather(*lives.values(), *retiring, return_exceptions=True)

    # -- how many ---------------------------------------------------------------------

    @property
    def wanted(self) -> dict[str, int]:
        return dict(self._wanted)

    @property
    def running(self) -> dict[str, int]:
        """Those that take requests, by role."""
        return {role: sum(server.ready for server in self._here(role)) for role in ROLES}

    async def ready(self) -> None:
        """Return when all that were asked for are; raises what the first one says that cannot start."""
        await self._until_ready(self.servers)

    def want(self, counts: Mapping[str, int]) -> list[ServerProcess]:
        """From now on have so many of these roles; returns the servers that were started for it."""
        self._check(counts)
        self._wanted.update(counts)
        return self._reconcile()

    async def scale(self, counts: Mapping[str, int], timeout_s: float) -> bool:
        """As `want`; True when it is so, False if that takes longer. Raises what a server says that cannot start."""
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
                raise RequestError(f"there are servers for {', '.join(ROLES)}, not for {role!r}", param=role)
            if number < 0:
                raise RequestError(f"{role} must be at least 0, not {number}", param=role)
            bounds = self._bounds.get(role)
            if bounds is not None and not bounds.least <= number <= bounds.most:
                between = f"between {bounds.least} and {bounds.most}"
                raise RequestError(f"{role} is scaled by itself {between}; {number} is outside", param=role)
        after = self._wanted | dict(counts)
        if not after["mixed"] and not after["decode"]:
            raise RequestError(
                "somebody must be left for the answers: at least one of mixed or decode", param="mixed"
            )

    # -- servers come and go ------------------------------------------------------------

    def _here(self, role: str) -> list[ServerProcess]:
        return [server for server in self.servers if server.role == role and not server.leaving]

    def _reconcile(self) -> list[ServerProcess]:
        started = []
        for role, number in self._wanted.items():
            here = self._here(role)
            started += [self._start(role) for _ in range(number - len(here))]
            # Who is not up yet goes first, then who came last.
            spare = sorted(here, key=lambda server: (server.ready, -server.index))
            for server in spare[: max(0, len(here) - number)]:
                self._retire(server)
        return started

    def _start(self, role: str) -> ServerProcess:
        server = ServerProcess(next(self._numbers), role)
        self.servers.append(server)
        self._lives[server] = asyncio.create_task(self._keep(server))
        return server

    def _retire(self, server: ServerProcess) -> None:
        server.leaving = True
        log.info("worker %d (%s) leaves", server.index, server.role)
        if server.url:
            self._hooks.on_leave(server)
        self._retiring[server] = asyncio.create_task(self._end(server))

    async def _end(self, server: ServerProcess) -> None:
        life = self._lives[server]
        life.cancel()
        await asyncio.wait({life})
        self._forget(server)

    def _forget(self, server: ServerProcess) -> None:
        self.servers.remove(server)
        self._lives.pop(server)
        self._retiring.pop(server, None)
        self._tell()

    # -- one server -----------------------------------------------------------------------

    async def _keep(self, server: ServerProcess) -> None:
        try:
            await self._live_on(server)
        except Exception as error:
            server.failure = error
            # Who grew the fleet hears of it, and those that serve are left in peace.
            if not server.leaving:
                self._wanted[server.role] -= 1
                ours = isinstance(error, HeadgateError)
                log.error("worker %d (%s) is given up: %s", server.index, server.role, error, exc_info=not ours)
                self._forget(server)

    async def _live_on(self, server: ServerProcess) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._live_once(server)
            if not server.proven:
                raise CannotStartServer(server.sentence or f"worker {server.index} ended before it was ready")
            backoff_s = FIRST_BACKOFF_S if was_ready else min(2 * backoff_s, LONGEST_BACKOFF_S)
            why = f" ({server.sentence})" if server.sentence else ""
            log.warning("worker %d has died%s; starting it again in %g s", server.index, why, backoff_s)
            await asyncio.sleep(backoff_s)

    async def _live_once(self, server: ServerProcess) -> bool:
        """Whether it was ever ready."""
        server.starts += 1
        server.sentence = ""
        try:
            await self._launcher.live(server, lambda: self._became_ready(server))
        except Exception as error:
            if not server.proven:
                raise
            server.sentence = f"{type(error).__name__}: {error}"  # where it lives may be well again later
        finally:
            was_ready, server.ready = server.ready, False
        if was_ready and not self._launcher.keeps_address:
            self._hooks.on_gone(server)
            server.url = ""
        return was_ready

    def _became_ready(self, server: ServerProcess) -> None:
        server.ready = server.proven = True
        if not server.leaving:
            self._hooks.on_ready(server)
        self._tell()

    # -- waiting --------------------------------------------------------------------------

    async def _until_ready(self, servers: list[ServerProcess]) -> None:
        servers = list(servers)
        while True:
            for server in servers:
                if server.failure is not None:
                    raise server.failure
            if all(server.proven or server.leaving for server in servers):
                return
            await self._change()

    async def _change(self) -> None:
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
