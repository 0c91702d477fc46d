"""Placement policies: each has one method that chooses a worker for a request from the workers' current state.

Rules: no clock, no I/O; the caller passes the random source. Candidates are a tuple, the same object until the fleet
changes, because policies cache values derived from it. In a large fleet a policy compares only a random sample of
workers and those that have a prefix of the request's prompt, so the cost of a choice does not grow with the fleet.

*Work* is the measure of load: a request counts one, and so do 1,024 prompt tokens that are not computed yet.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf
from typing import Final, Protocol

from headgate.router.data_path.request_info import BYTES_PER_TOKEN, RequestInfo
from headgate.router.fleet.prefix_index import Match
from headgate.router.fleet.worker import Worker

SMALL_FLEET: Final = 16  # up to this size, all workers are compared
SAMPLE_SIZE: Final = 10  # workers compared in a larger fleet; the best of ten is nearly always in the best quarter
TOKENS_PER_REQUEST: Final = 1024  # prompt tokens that weigh as much as one request

# A conversation stays at the worker that has its prefix, unless that worker's work exceeds the least loaded worker's
# by both of these. The tokens that a move would recompute count in favour of staying.
MAX_EXTRA_WORK: Final = 8.0  # requests
MAX_WORK_RATIO: Final = 1.5

# A new conversation goes to the worker with the least work and recent placements. A worker that has its system prompt
# cached may have up to this much more.
PREFIX_BONUS: Final = 1.0
# Number of remembered placements per worker; older ones count half, a quarter, ...
PLACEMENT_HISTORY: Final = 16

WAITING_WEIGHT: Final = 2.0  # weight of a waiting request, relative to a running one


class Policy(Protocol):
    uses_index: bool  # if False, the caller skips the prefix lookup

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        """Return one of `workers`, which is not empty."""


def work(worker: Worker) -> float:
    return worker.in_flight + worker.other_requests + worker.pending_tokens / TOKENS_PER_REQUEST


class CacheAware:
    """Keeps conversations at their worker and spreads new ones, without overloading the worker of a popular prefix."""

    uses_index = True

    def __init__(self) -> None:
        self._members = Members()
        self._placed: dict[Worker, int] = {}
        self._placements = 0

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        compared = sample = _sample(workers, rng)  # in a small fleet, all workers
        if match.found:
            members = self._members.of(workers)
            previous = [worker for worker in match.last_workers if worker in members]
            if previous and _should_stay(current := min(previous, key=work), match, sample):
                return current
            if len(workers) > SMALL_FLEET:
                compared = [*sample, *(worker for worker in match.found if worker in members)]
        chosen = self._least_loaded(compared, match)
        self._record(chosen, len(workers))
        return chosen

    def _least_loaded(self, workers: Sequence[Worker], match: Match) -> Worker:
        placed, found = self._placed, match.found
        chosen, least = workers[0], inf
        for worker in workers:  # `work` is inlined, because a function call per worker would cost too much
            score = worker.in_flight + worker.other_requests + worker.pending_tokens / TOKENS_PER_REQUEST
            score += placed.get(worker, 0)
            if found and (known := found.get(worker)) is not None:
                score -= min(_tokens(known.size) / TOKENS_PER_REQUEST, PREFIX_BONUS)
            if score < least:
                chosen, least = worker, score
        return chosen

    def _record(self, worker: Worker, workers: int) -> None:
        self._placed[worker] = self._placed.get(worker, 0) + 1
        self._placements += 1
        if self._placements >= PLACEMENT_HISTORY * workers:
            # Halve all counts; this also drops workers that have left.
            self._placed = {worker: count // 2 for worker, count in self._placed.items() if count > 1}
            self._placements = sum(self._placed.values())


def _should_stay(current: Worker, match: Match, sample: Sequence[Worker]) -> bool:
    mine = work(current) - _tokens(match.found[current].size) / TOKENS_PER_REQUEST
    if mine <= MAX_EXTRA_WORK:
        return True
    least = min(map(work, sample))
    return mine <= max(least + MAX_EXTRA_WORK, least * MAX_WORK_RATIO)


def _tokens(size: int) -> int:
    return size // BYTES_PER_TOKEN


class LeastRequests:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_sample(workers, rng), key=lambda worker: worker.load)


class LeastTokens:
    """Chooses the worker with the fewest prompt tokens still to compute; among equals, with the fewest requests."""

    uses_index = False

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_sample(workers, rng), key=lambda worker: (worker.pending_tokens, worker.load))


class PowerOfTwo:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        one, other = _random_worker(workers, rng), _random_worker(workers, rng)
        return one if work(one) <= work(other) else other


class RoundRobin:
    uses_index = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        self._next = (self._next + 1) % len(workers)
        return workers[self._next]


class RandomWorker:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return _random_worker(workers, rng)


class Session:
    """Consistent hashing: a session keeps its worker. A worker that joins or leaves moves only its share of sessions.

    Positions on the ring derive from worker names and are the same in every router. A request without a session goes
    to the worker with the least work.
    """

    uses_index = False

    def __init__(self) -> None:
        self._members = Members()
        self._ring = Ring(())

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        if not info.session:
            return min(_sample(workers, rng), key=work)
        members = self._members.of(workers)
        if not self._ring.serves(members):
            self._ring = Ring(workers)
        return self._ring.find(info.session, members)


class ReportedLoad:
    """Chooses the lowest reported load of running and waiting requests; among equals, the most free blocks."""

    uses_index = False

    def choose(self, workers: tuple[Worker, ...], info: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_sample(workers, rng), key=_reported)


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "cache_aware": CacheAware,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "random": RandomWorker,
    "session": Session,
    "metrics": ReportedLoad,
}


class Members:
    """The candidates as a set, which is rebuilt only when the tuple changes."""

    def __init__(self) -> None:
        self._workers: tuple[Worker, ...] = ()
        self._set: frozenset[Worker] = frozenset()

    def of(self, workers: tuple[Worker, ...]) -> frozenset[Worker]:
        if workers is not self._workers:
            self._workers, self._set = workers, frozenset(workers)
        return self._set


class Ring:
    """A hash ring with a hundred positions per worker. A key belongs to the next position after its hash."""

    POSITIONS: Final = 100

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._known = frozenset(workers)
        self._checked: frozenset[Worker] = self._known
        positions = sorted(
            (position, worker.name, worker) for worker in workers for position in _positions(worker, self.POSITIONS)
        )
        self._hashes = [position for position, _, _ in positions]
        self._workers = [worker for _, _, worker in positions]

    def serves(self, members: frozenset[Worker]) -> bool:
        """Whether the ring has all `members` and at most as many others, such as a worker that a retry excludes."""
        if members is not self._checked:
            if not members <= self._known or 2 * len(members) < len(self._known):
                return False
            self._checked = members
        return True

    def find(self, key: bytes, members: frozenset[Worker]) -> Worker:
        first = bisect_right(self._hashes, _hash(key))
        count = len(self._workers)
        return next(worker for step in range(count) if (worker := self._workers[(first + step) % count]) in members)


def _positions(worker: Worker, count: int) -> list[int]:
    return [_hash(b"%s#%d" % (worker.name.encode(), number)) for number in range(count)]


def _hash(key: bytes) -> int:
    """Hash a key. Unlike `hash`, the result is the same in every process."""
    return int.from_bytes(blake2b(key, digest_size=8).digest())


def _reported(worker: Worker) -> tuple[float, int]:
    return worker.running + WAITING_WEIGHT * worker.waiting, -worker.free_blocks


def _random_worker(workers: tuple[Worker, ...], rng: random.Random) -> Worker:
    return workers[int(rng.random() * len(workers))]


def _sample(workers: tuple[Worker, ...], rng: random.Random) -> Sequence[Worker]:
    """Return all workers of a small fleet, rotated at random so that ties are spread; else a random sample."""
    count, draw = len(workers), rng.random
    if count <= SMALL_FLEET:
        first = int(draw() * count)
        return workers[first:] + workers[:first]
    return [workers[int(draw() * count)] for _ in range(SAMPLE_SIZE)]
