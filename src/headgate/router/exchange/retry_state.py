"""The attempts at one request so far: which workers were tried, how that ended, and whether another attempt follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headgate.config import RouteConfig
from headgate.contract.journal import failed_with
from headgate.router.exchange.attempt import Answered, Lost, Outcome, Streamed, Withheld, refused_as_paused
from headgate.router.exchange.ending import PAUSE
from headgate.router.exchange.states import Event
from headgate.router.fleet.worker import Worker

ELSEWHERE = frozenset((429, 500, 502, 503, 504))  # another worker may do better
PASSING = frozenset((409, 500, 502, 504))  # the same worker may do better the next time
ENGINE_LOST = b'"code":"engine_lost"'  # in a 503: not a pause, which the client should hear of


def is_final(outcome: Outcome) -> bool:
    """Whether it is what the client should have, though nobody else was asked."""
    return isinstance(outcome, Streamed) or (isinstance(outcome, Answered) and outcome.status not in ELSEWHERE)


def _may_pass(outcome: Outcome) -> bool:
    """Whether what failed may succeed at the same worker."""
    match outcome:
        case Lost():
            return True
        case Withheld(rescheduled, ending):
            return rescheduled or ENGINE_LOST in ending
        case Answered(status, _, body):
            return status in PASSING or (status == 503 and ENGINE_LOST in body)
    return False


def _lacks_an_engine(outcome: Outcome) -> bool:
    """Whether the worker has no engine for the request, which its next probe may not show any more."""
    match outcome:
        case Withheld(_, ending):
            return ENGINE_LOST in ending
        case Answered(503, _, body):
            return ENGINE_LOST in body
    return False


def _is_refusal(outcome: Outcome) -> bool:
    """Whether the worker would answer the same until its state changes."""
    match outcome:
        case Withheld(rescheduled):
            return not rescheduled
        case Answered(status):
            return status == 503  # the queue of a 429 empties by itself
    return False


@dataclass(frozen=True, slots=True)
class Progress:
    """What the client has of the answer when an attempt ends."""

    extent: tuple[int, int, int] = (0, 0, 0)  # tokens, characters and ends
    resumable: bool = True  # by another worker; an answer without a journal is not

    @property
    def tokens(self) -> int:
        return self.extent[0]


class RetryState:
    def __init__(self, config: RouteConfig, take_retry: Callable[[], bool], random: Random) -> None:
        """`take_retry` takes one retry from the budget of all requests, and returns False if there is none."""
        self._config = config
        self._take_retry = take_retry
        self._random = random
        self.excluded: set[Worker] = set()
        # Workers that ended or refused it themselves, in which state, and after how many probes if a probe may tell more.
        self._unwilling: dict[Worker, tuple[int, int | None]] = {}
        self._failed: set[Worker] = set()  # workers whose failure may pass
        self._paused: set[Worker] = set()  # workers that refused it because they were paused
        self.fruitless = 0  # attempts in a row that brought no token
        self.last: tuple[Worker, Outcome] | None = None  # what the client is told if nobody does better
        self.extent = (0, 0, 0)  # of what it had been told by then
        self.looked = False  # whether the workers were asked how they are, since the last refusal
        self.left_behind: Worker | None = None  # who still has an earlier attempt, and therefore refuses this one
        self._tried: set[Worker] = set()
        self._reschedules = 0
        self._full: set[Worker] = set()  # workers that had no room for it
        self._tokens = 0

    def judge(self, worker: Worker, outcome: Outcome, progress: Progress) -> Event:
        """Note how an attempt ended. FINAL and EXHAUSTED: no other follows, and the client gets what is `last`."""
        if isinstance(outcome, Streamed) or (isinstance(outcome, Answered) and not self._elsewhere(worker, outcome)):
            self.last = worker, outcome
            return Event.FINAL
        if not self._tells_less(outcome, progress):
            self.last = worker, outcome
        self.extent = progress.extent
        self._count(worker, outcome, progress.tokens)
        if isinstance(outcome, Withheld) and outcome.rescheduled:
            self._full.add(worker)
        return Event.UNFINISHED if progress.resumable and self._may_try(outcome) else Event.EXHAUSTED

    def _may_try(self, outcome: Outcome) -> bool:
        if isinstance(outcome, Withheld) and outcome.rescheduled:
            return self._reschedules <= self._config.preempt_retry_count
        if self._waits_for_room(outcome):
            return True
        return self.fruitless <= self._config.retries and self._take_retry()

    def _waits_for_room(self, outcome: Outcome) -> bool:
        """Whether an answer that was given back finds a queue full: it asks again, with backoff, up to its deadline."""
        return bool(self._full) and isinstance(outcome, Answered) and outcome.status == 429

    def recomputes(self, worker: Worker) -> bool:
        """Whether `worker` is to keep it when there is no room: it was there before, or this is its last move."""
        return worker in self._full or 0 < self._config.preempt_retry_count <= self._reschedules

    def asked_again(self, worker: Worker) -> None:
        """Its connection broke before a word came, and it is asked once more: it may have the first one nevertheless."""
        self._tried.add(worker)

    def _elsewhere(self, worker: Worker, answer: Answered) -> bool:
        """Another worker may do better, or the same one when it has noticed that an earlier attempt is over."""
        asked_before = self.last is not None or worker in self._tried
        return answer.status in ELSEWHERE or (answer.status == 409 and asked_before)

    def _tells_less(self, outcome: Outcome, progress: Progress) -> bool:
        """Whether the client is better told what came before: its part of the answer, or that a worker was full."""
        if self.was_full:
            return isinstance(outcome, Answered) and outcome.status == 503
        unchanged = progress.extent == self.extent
        failed = failed_with(outcome.ending) if isinstance(outcome, Withheld) else True
        return self.was_cut and unchanged and bool(failed)

    def _count(self, worker: Worker, outcome: Outcome, tokens: int) -> None:
        if tokens > self._tokens:
            self.fruitless, self._tokens = 0, tokens
            self.excluded.clear()
            self._unwilling.clear()
            self._failed.clear()
        self.fruitless += 1
        self.looked = False
        refused = isinstance(outcome, Answered) and outcome.status == 409
        self.left_behind = worker if refused and worker in self._tried else None
        self._tried.add(worker)
        rescheduled = isinstance(outcome, Withheld) and outcome.rescheduled
        self._reschedules += rescheduled
        if not rescheduled or self._config.preempt_retry_exclude_decode:
            self.excluded.add(worker)
        (self._paused.add if refused_as_paused(outcome) else self._paused.discard)(worker)
        (self._failed.add if _may_pass(outcome) else self._failed.discard)(worker)
        if _is_refusal(outcome):
            self._unwilling[worker] = worker.changes, worker.probes if _lacks_an_engine(outcome) else None
        else:
            self._unwilling.pop(worker, None)

    @property
    def rescheduled(self) -> bool:
        """Whether the last worker had no room for it."""
        return self.last is not None and isinstance(self.last[1], Withheld) and self.last[1].rescheduled

    @property
    def unwilling(self) -> set[Worker]:
        """Workers that ended or refused it, and have not been in another state since, nor found ready by a probe."""
        return {
            worker
            for worker, (changes, probes) in self._unwilling.items()
            if worker.changes == changes and probes in (None, worker.probes)
        }

    @property
    def was_full(self) -> bool:
        """Whether a worker had too much to do: that is the reason, and not who else is paused."""
        return self.last is not None and isinstance(self.last[1], Answered) and self.last[1].status == 429

    @property
    def is_told_of_a_pause(self) -> bool:
        """Whether its client would hear that workers are paused, and nothing else."""
        if self.last is None or refused_as_paused(self.last[1]):
            return True
        return isinstance(self.last[1], Withheld) and self.last[1].cause == PAUSE

    @property
    def was_refused_as_paused(self) -> bool:
        return self.last is not None and refused_as_paused(self.last[1])

    def ask_again(self, worker: Worker) -> None:
        """It has been seen to run since it was known as paused."""
        if worker in self._paused:
            self._paused.remove(worker)
            self.excluded.discard(worker)
            self._unwilling.pop(worker, None)

    @property
    def was_cut(self) -> bool:
        return self.last is not None and isinstance(self.last[1], Withheld)

    @property
    def was_lost(self) -> bool:
        """Whether the last worker, or its engine, was lost with the answer."""
        return self.last is not None and (isinstance(self.last[1], Lost) or _lacks_an_engine(self.last[1]))

    @property
    def may_return(self) -> bool:
        """Whether a worker that failed may be asked again, if there is no other."""
        return bool(self._failed)

    @property
    def backoff_s(self) -> float:
        """Before an attempt that follows fruitless ones; with jitter, so that clients of a dead worker come one by one."""
        if self.fruitless < 2:
            return 0.0
        return min(0.05 * 2.0 ** (self.fruitless - 2), 1.0) * self._random.uniform(0.5, 1.5)


class RetryBudget:
    """How many attempts may be second ones: a share of all requests, so that a broken fleet is not hammered."""

    SHARE, MOST = 0.2, 1000.0

    def __init__(self) -> None:
        self._left = self.MOST

    def earn(self) -> None:
        if self._left < self.MOST:
            self._left += self.SHARE

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True
