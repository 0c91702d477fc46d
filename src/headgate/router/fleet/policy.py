"""Which worker gets a request: each policy is a small thing with one method, judged by what it sees of workers now.

Rules: no clock, no I/O; chance comes from the caller. Candidates are a tuple, the same one until the fleet changes, because
what is derived from it is kept. Of a large fleet a policy looks at a sample and at the workers that are special to the
request, so the choice costs the same among a thousand.

*Work* is how load is weighed: a request counts one, and so do 1,024 tokens of prompts that are yet to be computed.
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

SMALL_FLEET: Final = 16  # workers that are all looked at
SAMPLE: Final = 10  # of more; the best of ten is nearly always among the best quarter
TOKENS_PER_REQUEST: Final = 1024  # of prompt, that weigh as much as one more request

# Where a conversation's prefix is, it stays, unless its worker has more work than the least loaded has by
# both of these; what moving would compute again counts for staying.
AHEAD: Final = 8.0  # requests
TIMES: Final = 1.5

# A new conversation goes to whom fewest were given of late. A worker that has its system prompt may be ahead by this much.
HEAD_START: Final = 1.0
# Placements per worker that are remembered; older ones count half, a quarter, ...
MEMORY: Final = 16

WAITING_WEIGHT: Final = 2.0  # of a worker's own queue against what it runs


class Policy(Protocol):
    uses_index: bool  # otherwise its caller need not look the prompt up

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        """One of `workers`, of which there is at least one."""


def work(worker: Worker) -> float:
    return worker.in_flight + worker.others + worker.pending_tokens / TOKENS_PER_REQUEST


class CacheAware:
    """Conversations stay where they are, new ones are spread evenly, and nobody drowns in a popular prefix."""

    uses_index = True

    def __init__(self) -> None:
        self._members = Members()
        self._placed: dict[Worker, int] = {}
        self._placements = 0

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        looked_at = sample = _some(workers, rng)  # all of a small fleet
        if match.found:
            members = self._members.of(workers)
            homes = [worker for worker in match.homes if worker in members]
            if homes and _may_stay(home := min(homes, key=work), match, sample):
                return home
            if len(workers) > SMALL_FLEET:
                looked_at = [*sample, *(worker for worker in match.found if worker in members)]
        chosen = self._fairest(looked_at, match)
        self._note(chosen, len(workers))
        return chosen

    def _fairest(self, workers: Sequence[Worker], match: Match) -> Worker:
        placed, found = self._placed, match.found
        fairest, least = workers[0], inf
        for worker in workers:  # a loop, because a call per worker would be felt
            score = worker.in_flight + worker.others + worker.pending_tokens / TOKENS_PER_REQUEST
            score += placed.get(worker, 0)
            if found and (known := found.get(worker)) is not None:
                score -= min(_tokens(known.size) / TOKENS_PER_REQUEST, HEAD_START)
            if score < least:
                fairest, least = worker, score
        return fairest

    def _note(self, worker: Worker, workers: int) -> None:
        self._placed[worker] = self._placed.get(worker, 0) + 1
        self._placements += 1
        if self._placements >= MEMORY * workers:
            # Who is no longer there is forgotten on the way.
            self._placed = {worker: count // 2 for worker, count in self._placed.items() if count > 1}
            self._placements = sum(self._placed.values())


def _may_stay(home: Worker, match: Match, sample: Sequence[Worker]) -> bool:
    mine = work(home) - _tokens(match.found[home].size) / TOKENS_PER_REQUEST
    if mine <= AHEAD:
        return True
    least = min(map(work, sample))
    return mine <= max(least + AHEAD, least * TIMES)


def _tokens(size: int) -> int:
    return size // BYTES_PER_TOKEN


class LeastRequests:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_some(workers, rng), key=lambda worker: worker.load)


class LeastTokens:
    """Fewest prompt tokens yet to be computed; then fewest requests."""

    uses_index = False

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_some(workers, rng), key=lambda worker: (worker.pending_tokens, worker.load))


class PowerOfTwo:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        one, other = _any(workers, rng), _any(workers, rng)
        return one if work(one) <= work(other) else other


class RoundRobin:
    uses_index = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        self._next = (self._next + 1) % len(workers)
        return workers[self._next]


class RandomWorker:
    uses_index = False

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return _any(workers, rng)


class Session:
    """A session has one worker as long as that is there; who comes or goes moves its own share of sessions alone.

    Workers have places on a ring by their names, the same in every router. A request without a session goes where there
    is least to do.
    """

    uses_index = False

    def __init__(self) -> None:
        self._members = Members()
        self._ring = Ring(())

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        if not ask.session:
            return min(_some(workers, rng), key=work)
        members = self._members.of(workers)
        if not self._ring.serves(members):
            self._ring = Ring(workers)
        return self._ring.find(ask.session, members)


class ReportedLoad:
    """By what workers report of themselves: running and waiting requests, then room for more."""

    uses_index = False

    def choose(self, workers: tuple[Worker, ...], ask: RequestInfo, match: Match, rng: random.Random) -> Worker:
        return min(_some(workers, rng), key=_reported)


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
    """The candidates as a set, made once for as long as they are the same tuple."""

    def __init__(self) -> None:
        self._workers: tuple[Worker, ...] = ()
        self._set: frozenset[Worker] = frozenset()

    def of(self, workers: tuple[Worker, ...]) -> frozenset[Worker]:
        if workers is not self._workers:
            self._workers, self._set = workers, frozenset(workers)
        return self._set


class Ring:
    """Every worker has a hundred places; a key belongs to the next place after its hash."""

    PLACES: Final = 100

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._known = frozenset(workers)
        self._checked: frozenset[Worker] = self._known
        places = sorted((place, worker.name, worker) for worker in workers for place in _places(worker, self.PLACES))
        self._hashes = [place for place, _, _ in places]
        self._workers = [worker for _, _, worker in places]

    def serves(self, members: frozenset[Worker]) -> bool:
        """Whether all of `members` are on it, and not too many others, such as one that a retry leaves out."""
        if members is not self._checked:
            if not members <= self._known or 2 * len(members) < len(self._known):
                return False
            self._checked = members
        return True

    def find(self, key: bytes, members: frozenset[Worker]) -> Worker:
        first = bisect_right(self._hashes, _hash(key))
        count = len(self._workers)
        return next(worker for step in range(count) if (worker := self._workers[(first + step) % count]) in members)


def _places(worker: Worker, count: int) -> list[int]:
    return [_hash(b"%s#%d" % (worker.name.encode(), number)) for number in range(count)]


def _hash(key: bytes) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(key, digest_size=8).digest())


def _reported(worker: Worker) -> tuple[float, int]:
    return worker.running + WAITING_WEIGHT * worker.waiting, -worker.free_blocks


def _any(workers: tuple[Worker, ...], rng: random.Random) -> Worker:
    return workers[int(rng.random() * len(workers))]


def _some(workers: tuple[Worker, ...], rng: random.Random) -> Sequence[Worker]:
    """All of a small fleet, beginning anywhere so that ties are spread; some of a large one."""
    count, draw = len(workers), rng.random
    if count <= SMALL_FLEET:
        first = int(draw() * count)
        return workers[first:] + workers[:first]
    return [workers[int(draw() * count)] for _ in range(SAMPLE)]
