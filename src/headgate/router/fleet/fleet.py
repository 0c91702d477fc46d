"""The fleet: which workers there are, how they fare, and what of ours each of them has.

A worker leaves after several failures in a row and comes back after several good probes; each time it leaves without having
answered anything in between, it stays away for longer. What was taken from a worker is given back once, whatever happens to
the request or to the worker.
"""

from __future__ import annotations

import logging
import random
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

FAILURES = 3  # in a row, and a worker gets nothing more
SUCCESSES = 2  # good probes in a row, and it is back
FIRST_BREAK_S, LONGEST_BREAK_S = 0.5, 30.0

Half = Literal["prefill", "decode", "mixed", "any"]  # of a request; any: whoever there is


class NoSuchWorker(RequestError):
    status = 404
    code = "unknown_worker"


class LoadShare:
    """One request's share of a worker's load: a request until it ends, and its prompt until the first token."""

    __slots__ = ("_fleet", "_given_back", "pending", "worker")

    def __init__(self, fleet: Workers, worker: Worker, tokens: int) -> None:
        self._fleet = fleet
        self.pending = tokens  # of the prompt, until the first token of the answer
        self._given_back = False
        self.worker = worker
        worker.in_flight += 1
        worker.pending_tokens += tokens

    def first_token(self) -> None:
        self.worker.pending_tokens -= self.pending
        self.pending = 0

    def give_back(self) -> None:
        if self._given_back:
            self._fleet.double_releases += 1
            return
        self._given_back = True
        worker = self.worker
        worker.pending_tokens -= self.pending
        self.pending = 0
        worker.in_flight -= 1
        if worker.state == "draining":
            self._fleet._given_back(worker)


class Workers:
    def __init__(
        self,
        *,
        connect_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        fast_path: FastPath = PYTHON,
    ) -> None:
        self.clock = clock
        self._fast_path = fast_path
        self.outbox = Outbox()  # for all that is written to workers, or to clients
        self.double_releases = 0
        self.disaggregated = False  # somebody is there for prompts alone
        self.rolling = False  # an update goes from worker to worker: versions differ, and that is right
        self.floor_version: int | None = None  # of the weights; who has older ones gets nothing
        self.wanted_version: int | None = None  # of the weights; what an update through us has set
        self._connect_timeout_s = connect_timeout_s
        self._workers: dict[str, Worker] = {}
        self._leaving: dict[Worker, None] = {}  # removed, and still at work; an address may have left more than once
        self._pools: dict[Worker, Pool] = {}
        self._candidates: dict[tuple[Half, str | None], tuple[Worker, ...]] = {}
        self._random = random.Random(seed)
        self.on_lost: Callable[[Worker, str], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_restart: Callable[[Worker], None] | None = None

    # -- who there is ---------------------------------------------------------------

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def everyone(self) -> list[Worker]:
        return [*self._workers.values(), *self._leaving]

    def add(self, url: str, role: Role = "mixed", *, pid: int | None = None, managed: bool = False) -> Worker:
        """A worker at that address; one that is known already gets the new role."""
        url = checked_url(url)
        if role not in ROLES:
            raise RequestError(f"role must be one of {', '.join(ROLES)}, not {role!r}", param="role")
        worker = self._workers.get(url)
        if worker is None:
            worker = Worker(url, role)
            self._pools[worker] = Pool(url, self._connect_timeout_s, self.outbox, self._fast_path)
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
        """Send it nothing more; what it has may finish."""
        if self._workers.pop(worker.url, None) is not None:
            self._leaving[worker] = None
            self.set_state(worker, "draining")
            self._given_back(worker)

    def pool(self, worker: Worker) -> Pool:
        return self._pools[worker]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def sweep(self) -> None:
        now_s = self.clock()
        for pool in self._pools.values():
            pool.sweep(now_s)

    def _given_back(self, worker: Worker) -> None:
        if worker.in_flight or worker.state != "draining":
            return
        if worker in self._leaving:
            del self._leaving[worker]
            self._pools.pop(worker).close()
            log.info("%s has left", worker.name)
        self._changed()  # somebody may wait for its last request

    # -- who may be asked -------------------------------------------------------------

    def candidates(self, half: Half, model: str | None, excluded: Collection[Worker] = ()) -> tuple[Worker, ...]:
        key = half, model
        found = self._candidates.get(key)
        if found is None:
            if len(self._candidates) > 1000:  # clients may invent names
                self._candidates.clear()
            found = self._candidates[key] = self._look_for(half, model)
        if excluded:
            return tuple(worker for worker in found if worker not in excluded)
        return found

    def _look_for(self, half: Half, model: str | None) -> tuple[Worker, ...]:
        available = [worker for worker in self._workers.values() if worker.available]
        # Every worker can do every half: a role is a preference.
        ready = [worker for worker in available if _can(worker, half)] or available
        if model is None:
            return tuple(ready)
        serving = [worker for worker in ready if model in worker.models]
        # A name that nobody is known to have goes to anyone, whose refusal says which names there are.
        return tuple(serving or ready)

    def _changed(self) -> None:
        self._candidates.clear()
        roles = {worker.role for worker in self._workers.values() if worker.available}
        self.disaggregated = "prefill" in roles and bool(roles - {"prefill"})
        if self.on_change is not None:
            self.on_change()

    # -- how they fare ----------------------------------------------------------------

    def taking(self, worker: Worker, tokens: int) -> LoadShare:
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
            self.on_lost(worker, "it does not answer any more")

    def set_kind(self, worker: Worker, kind: Kind, models: Collection[str]) -> None:
        worker.kind, worker.models = kind, frozenset(models)
        self._changed()

    def answered(self, worker: Worker) -> None:
        """It has answered a request: whatever was wrong is over."""
        worker.failures = worker.trips = 0

    def failed(self, worker: Worker, why: str) -> None:
        worker.errors += 1
        worker.failures += 1
        worker.successes = 0
        log.warning("%s failed (%d in a row): %s", worker.name, worker.failures, why)
        if worker.failures >= FAILURES:
            self.give_up(worker)

    def give_up(self, worker: Worker) -> None:
        """Send it nothing more until it has been well for a while."""
        if worker.state in ("down", "draining"):
            return
        worker.trips += 1
        worker.successes = 0
        break_s = min(FIRST_BREAK_S * 2 ** (worker.trips - 1), LONGEST_BREAK_S)
        worker.open_until_s = self.clock() + break_s * self._random.uniform(0.75, 1.25)
        worker.kind = "unknown"  # something else may come back
        self.set_state(worker, "down")

    def probed(self, worker: Worker, state: WorkerState) -> None:
        """It has answered a probe, and says how it is."""
        if worker.state == "down":
            if self.clock() < worker.open_until_s:
                return
            worker.successes += 1
            if worker.successes < SUCCESSES:
                return
            worker.failures = 0
        if worker.state != "draining":
            self.set_state(worker, self._judged(worker, state))
            worker.probes += worker.state == "ready"

    def _judged(self, worker: Worker, state: WorkerState) -> WorkerState:
        floor = self.floor_version
        if state == "ready" and floor is not None and worker.version is not None and worker.version < floor:
            return "outdated"
        return state

    def set_life(self, worker: Worker, life: str | None) -> None:
        """What it calls its life. It may have been away so shortly that nobody has missed it."""
        before, worker.life = worker.life, life
        if before not in (None, life) and self.on_restart is not None:
            log.info("%s was started anew", worker.name)
            self.on_restart(worker)

    def set_version(self, worker: Worker, version: int) -> None:
        """The weights it says it has."""
        if version != worker.version:
            worker.version = version
            worker.generation += 1  # of its cache: what was sent before was computed with other weights
            self.set_floor()

    def set_floor(self) -> None:
        """Which weights a worker must have to be asked: what an update through us has set, or the majority's.

        During a rolling update it stays as it was: workers have the old weights or the new ones, and none older than both.
        """
        if not self.rolling:
            self.floor_version = self._settled_version()

    def _settled_version(self) -> int | None:
        versions = sorted(
            (
                worker.version
                for worker in self._workers.values()
                if worker.version is not None and worker.state not in ("down", "starting")
            ),
            reverse=True,
        )
        # The newest that more than half of them have reached.
        majority = versions[len(versions) // 2] if versions else None
        known = [version for version in (majority, self.wanted_version) if version is not None]
        return max(known, default=None)


def _can(worker: Worker, half: Half) -> bool:
    if half == "any":
        return True
    return worker.role in ("mixed", half) if half != "mixed" else worker.role in ("mixed", "decode")


def checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")) or any(c.isspace() for c in url) or not _has_address(url):
        raise RequestError(f"a worker's address is http://HOST:PORT, not {url!r}", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return url.isascii() and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number or none that there is
        return False
