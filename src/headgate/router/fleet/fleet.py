"""The fleet: its workers, their health, and the load that this router has placed on each.

A worker is marked down after several consecutive failures and is used again after several good probes. Each time it
goes down without having answered a request in between, it stays unused for longer. Load that was added to a worker is
subtracted exactly once, whatever happens to the request or to the worker.
"""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Callable, Collection, Iterator
from typing import Literal
from urllib.parse import urlsplit

from headgate.contract.fleet import ROLES, Role
from headgate.errors import RequestError
from headgate.router.data_path.fast_path import PYTHON, FastPath
from headgate.router.data_path.outbox import Outbox
from headgate.router.data_path.upstream import Pool
from headgate.router.fleet.worker import Kind, Worker, WorkerState

log = logging.getLogger(__name__)

FAILURES = 3  # consecutive failures that mark a worker down
SUCCESSES = 2  # consecutive good probes that bring a worker back
FIRST_COOLDOWN_S, MAX_COOLDOWN_S = 0.5, 30.0

WantedRole = Literal["prefill", "decode", "mixed", "any"]  # "any": every ready worker


class NoSuchWorker(RequestError):
    status = 404
    code = "unknown_worker"


class LoadShare:
    """One request's share of a worker's load: one until it ends, and its prompt tokens until the first token."""

    __slots__ = ("_fleet", "_released", "pending", "worker")

    def __init__(self, fleet: Workers, worker: Worker, tokens: int) -> None:
        self._fleet = fleet
        self.pending = tokens  # prompt tokens, until the first token of the answer
        self._released = False
        self.worker = worker
        worker.in_flight += 1
        worker.pending_tokens += tokens

    def first_token(self) -> None:
        self.worker.pending_tokens -= self.pending
        self.pending = 0

    def give_back(self) -> None:
        if self._released:
            self._fleet.double_releases += 1
            return
        self._released = True
        worker = self.worker
        worker.pending_tokens -= self.pending
        self.pending = 0
        worker.in_flight -= 1
        if worker.state == "draining":
            self._fleet.load_released(worker)


class Workers:
    def __init__(
        self,
        *,
        connect_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        fast_path: FastPath = PYTHON,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.clock = clock
        self._tls = tls  # for workers with https://
        self._fast_path = fast_path
        self.outbox = Outbox()  # collects all writes to workers and clients
        self.double_releases = 0
        self.disaggregated = False  # a prefill worker and a worker of another role are ready
        self.rolling = False  # a rolling update is in progress, so workers may have different versions
        self.floor_version: int | None = None  # workers with older weights get no requests
        self.wanted_version: int | None = None  # weight version set by the last update through this router
        self._connect_timeout_s = connect_timeout_s
        self._workers: dict[str, Worker] = {}
        self._leaving: dict[
            Worker, None
        ] = {}  # removed workers with requests in flight; may contain an address more than once
        self._pools: dict[Worker, Pool] = {}
        self._candidates: dict[tuple[WantedRole, str | None], tuple[Worker, ...]] = {}
        self._random = random.Random(seed)
        self.on_lost: Callable[[Worker, str], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_restart: Callable[[Worker], None] | None = None

    # -- membership -----------------------------------------------------------------

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def with_leaving(self) -> list[Worker]:
        """The members, and workers that left the fleet and still have requests."""
        return [*self._workers.values(), *self._leaving]

    def add(self, url: str, role: Role = "mixed", *, pid: int | None = None, managed: bool = False) -> Worker:
        """Add a worker, or change the role of a known one."""
        url = checked_url(url)
        if role not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}, not {role!r}", param="role")
        worker = self._workers.get(url)
        if worker is None:
            worker = Worker(url, role)
            self._pools[worker] = Pool(url, self._connect_timeout_s, self.outbox, self._fast_path, self._tls)
            self._workers[url] = worker
            log.info("%s joins as %s", worker.name, role)
        worker.role, worker.managed = role, managed
        worker.pid = pid if pid is not None else worker.pid
        self._changed()
        return worker

    def find(self, url: str) -> Worker:
        worker = self._workers.get(checked_url(url))
        if worker is None:
            raise NoSuchWorker(f"there is no worker at {url!r}; GET /v1/workers lists them")
        return worker

    def remove(self, worker: Worker) -> None:
        """Send the worker no more requests. Those in flight may finish."""
        if self._workers.pop(worker.url, None) is not None:
            self._leaving[worker] = None
            self.set_state(worker, "draining")
            self.load_released(worker)

    def pool(self, worker: Worker) -> Pool:
        return self._pools[worker]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def sweep(self) -> None:
        now_s = self.clock()
        for pool in self._pools.values():
            pool.sweep(now_s)

    def load_released(self, worker: Worker) -> None:
        if worker.in_flight or worker.state != "draining":
            return
        if worker in self._leaving:
            del self._leaving[worker]
            self._pools.pop(worker).close()
            log.info("%s has left", worker.name)
        self._changed()  # a caller may be waiting for the last request to end

    # -- candidates -------------------------------------------------------------------

    def candidates(
        self, role: WantedRole, model: str | None, excluded: Collection[Worker] = ()
    ) -> tuple[Worker, ...]:
        key = role, model
        found = self._candidates.get(key)
        if found is None:
            if len(self._candidates) > 1000:  # clients can send any model name
                self._candidates.clear()
            found = self._candidates[key] = self._find_candidates(role, model)
        if excluded:
            return tuple(worker for worker in found if worker not in excluded)
        return found

    def _find_candidates(self, role: WantedRole, model: str | None) -> tuple[Worker, ...]:
        available = [worker for worker in self._workers.values() if worker.available]
        # A role is only a preference: every worker can do both prefill and decode.
        ready = [worker for worker in available if _fits(worker, role)] or available
        if model is None:
            return tuple(ready)
        serving = [worker for worker in ready if model in worker.models]
        # A request for an unknown model goes to any worker, whose refusal lists the models that it serves.
        return tuple(serving or ready)

    def _changed(self) -> None:
        self._candidates.clear()
        roles = {worker.role for worker in self._workers.values() if worker.available}
        self.disaggregated = "prefill" in roles and bool(roles - {"prefill"})
        if self.on_change is not None:
            self.on_change()

    # -- load and health --------------------------------------------------------------

    def add_load(self, worker: Worker, tokens: int) -> LoadShare:
        return LoadShare(self, worker, tokens)

    def set_state(self, worker: Worker, state: WorkerState) -> None:
        if worker.state == state:
            return
        log.info("%s: %s -> %s", worker.name, worker.state, state)
        before, worker.state = worker.state, state
        worker.changes += 1
        self.set_floor()
        self._changed()
        if state == "down" and before != "down" and self.on_lost is not None:
            self.on_lost(worker, "it no longer answers")

    def set_kind(self, worker: Worker, kind: Kind, models: Collection[str]) -> None:
        worker.kind, worker.models = kind, frozenset(models)
        self._changed()

    def answered(self, worker: Worker) -> None:
        """Note that the worker has answered a request; this resets its failure counts."""
        worker.failures = worker.trips = 0

    def failed(self, worker: Worker, why: str) -> None:
        worker.errors += 1
        worker.failures += 1
        worker.successes = 0
        log.warning("%s failed (%d in a row): %s", worker.name, worker.failures, why)
        if worker.failures >= FAILURES:
            self.give_up(worker)

    def give_up(self, worker: Worker) -> None:
        """Mark the worker down until the cooldown has passed and its probes succeed."""
        if worker.state in ("down", "draining"):
            return
        worker.trips += 1
        worker.successes = 0
        cooldown_s = min(FIRST_COOLDOWN_S * 2 ** (worker.trips - 1), MAX_COOLDOWN_S)
        worker.open_until_s = self.clock() + cooldown_s * self._random.uniform(0.75, 1.25)
        worker.kind = "unknown"  # another program may start at this address
        self.set_state(worker, "down")

    def probed(self, worker: Worker, state: WorkerState) -> None:
        """Note that the worker has answered a probe and reported `state`."""
        if worker.state == "down":
            if self.clock() < worker.open_until_s:
                return
            worker.successes += 1
            if worker.successes < SUCCESSES:
                return
            worker.failures = 0
        if worker.state != "draining":
            self.set_state(worker, self._effective_state(worker, state))
            worker.probes += worker.state == "ready"

    def _effective_state(self, worker: Worker, state: WorkerState) -> WorkerState:
        floor = self.floor_version
        if state == "ready" and floor is not None and worker.version is not None and worker.version < floor:
            return "outdated"
        return state

    def set_boot_id(self, worker: Worker, boot_id: str | None) -> None:
        """Set the worker's boot id. It reveals restarts shorter than the probe interval."""
        before, worker.boot_id = worker.boot_id, boot_id
        if before in (None, boot_id):
            return
        log.info("%s was restarted", worker.name)
        worker.changes += 1
        self._changed()
        if self.on_restart is not None:
            self.on_restart(worker)

    def set_version(self, worker: Worker, version: int) -> None:
        """Set the weight version that the worker reports."""
        if version != worker.version:
            worker.version = version
            worker.generation += 1  # its cached prefixes were computed with other weights
            self.set_floor()

    def set_floor(self) -> None:
        """Set the lowest weight version that gets requests: the router's last update, or the majority's if newer.

        It does not change during a rolling update, when workers have the old weights or the new ones.
        """
        if not self.rolling:
            self.floor_version = self._required_version()

    def _required_version(self) -> int | None:
        versions = sorted(
            (
                worker.version
                for worker in self._workers.values()
                if worker.version is not None and worker.state not in ("down", "starting")
            ),
            reverse=True,
        )
        # The newest version that more than half of the workers have reached.
        majority = versions[len(versions) // 2] if versions else None
        known = [version for version in (majority, self.wanted_version) if version is not None]
        return max(known, default=None)


def _fits(worker: Worker, role: WantedRole) -> bool:
    if role == "any":
        return True
    return worker.role in ("mixed", role) if role != "mixed" else worker.role in ("mixed", "decode")


def checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")) or any(c.isspace() for c in url) or not _has_address(url):
        raise RequestError(f"a worker's address is http://HOST:PORT, not {url!r}", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return url.isascii() and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unclosed brackets, or a port that is not a number or out of range
        return False
