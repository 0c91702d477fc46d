"""The attempts at one request so far: which workers were tried, with which outcome, and whether another attempt follows."""

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

ELSEWHERE = frozenset((429, 500, 502, 503, 504))  # statuses after which another worker may succeed
PASSING = frozenset((409, 500, 502, 504))  # statuses after which the same worker may succeed later
ENGINE_LOST = b'"code":"engine_lost"'  # in a 503; a 503 of a paused worker has another code


def is_final(outcome: Outcome) -> bool:
    """Whether the outcome goes to the client without another attempt."""
    return isinstance(outcome, Streamed) or (isinstance(outcome, Answered) and outcome.status not in ELSEWHERE)


def _may_pass(outcome: Outcome) -> bool:
    """Whether the same worker may succeed later."""
    match outcome:
        case Lost():
            return True
        case Withheld(rescheduled, ending):
            return rescheduled or ENGINE_LOST in ending
        case Answered(status, _, body):
            return status in PASSING or (status == 503 and ENGINE_LOST in body)
    return False


def _lacks_an_engine(outcome: Outcome) -> bool:
    """Whether the worker lost its engine. It may have another engine by its next probe."""
    match outcome:
        case Withheld(_, ending):
            return ENGINE_LOST in ending
        case Answered(503, _, body):
            return ENGINE_LOST in body
    return False


def _is_refusal(outcome: Outcome) -> bool:
    """Whether the worker would give the same answer until its state changes."""
    match outcome:
        case Withheld(rescheduled):
            return not rescheduled
        case Answered(status):
            return status == 503  # after a 429 the queue drains without a change of state
    return False


def _ended_by_pause(outcome: Outcome) -> bool:
    return isinstance(outcome, Withheld) and outcome.cause == PAUSE


@dataclass(frozen=True, slots=True)
class Progress:
    """What the client has received by the end of an attempt."""

    extent: tuple[int, int, int] = (0, 0, 0)  # tokens, characters, ended choices
    resumable: bool = True  # another worker can continue; false for an answer without a journal
    rolling: bool = False  # the router is updating its workers one by one, which pauses each of them

    @property
    def tokens(self) -> int:
        return self.extent[0]


class RetryState:
    def __init__(self, config: RouteConfig, take_retry: Callable[[], bool], random: Random) -> None:
        """Start without attempts. `take_retry` takes one retry from the shared budget; False if none is left."""
        self._config = config
        self._take_retry = take_retry
        self._random = random
        self.excluded: set[Worker] = set()
        # Workers that ended or refused the request, with `Worker.changes` at that time. Also `Worker.probes`, if the
        # reason may have passed by the next good probe, without a change of state.
        self._unwilling: dict[Worker, tuple[int, int | None]] = {}
        self._failed: set[Worker] = set()  # workers whose failure may be temporary
        self._paused: set[Worker] = set()  # workers that refused or ended the request because they were paused
        self.fruitless = 0  # consecutive attempts without a new token
        self.last: tuple[Worker, Outcome] | None = None  # what the client receives if no later attempt is better
        self.extent = (0, 0, 0)  # what the client had received when the last attempt ended
        self.refreshed = False  # whether `Router._refresh` was called for this request since its last attempt
        self.left_behind: Worker | None = None  # the worker that refuses because it still has an earlier attempt
        self._tried: set[Worker] = set()
        self._reschedules = 0
        self._preempted_by: set[Worker] = set()  # workers that preempted the request for lack of KV memory
        self._tokens = 0

    def judge(self, worker: Worker, outcome: Outcome, progress: Progress) -> Event:
        """Record an outcome. After FINAL or EXHAUSTED, no attempt follows, and the client receives `last`."""
        if isinstance(outcome, Streamed) or (isinstance(outcome, Answered) and not self._elsewhere(worker, outcome)):
            self.last = worker, outcome
            return Event.FINAL
        if not self._is_worse_than_last(outcome, progress):
            self.last = worker, outcome
        self.extent = progress.extent
        self._count(worker, outcome, progress.tokens)
        if isinstance(outcome, Withheld) and outcome.rescheduled:
            self._preempted_by.add(worker)
        may_try = progress.resumable and self._may_try(outcome, rolling=progress.rolling)
        return Event.UNFINISHED if may_try else Event.EXHAUSTED

    def _may_try(self, outcome: Outcome, *, rolling: bool) -> bool:
        if rolling and _ended_by_pause(outcome):
            return True  # a rolling update fails no request, and pauses each worker once
        if isinstance(outcome, Withheld) and outcome.rescheduled:
            return self._reschedules <= self._config.preempt_retry_count
        if self._waits_for_room(outcome):
            return True
        return self.fruitless <= self._config.retries and self._take_retry()

    def _waits_for_room(self, outcome: Outcome) -> bool:
        """Whether a worker refused an answer that has begun because its queue is full; retried until the deadline."""
        begun = self._tokens > 0 or self.was_cut
        return begun and isinstance(outcome, Answered) and outcome.status == 429

    def must_recompute(self, worker: Worker) -> bool:
        """Whether `worker` must recompute the request when it preempts it, instead of returning it to the router.

        It must if it returned the request before, or if this is the last permitted move.
        """
        return worker in self._preempted_by or 0 < self._config.preempt_retry_count <= self._reschedules

    def note_resend(self, worker: Worker) -> None:
        """Note that the request is sent to `worker` again after a broken connection; it may receive it twice."""
        self._tried.add(worker)

    def _elsewhere(self, worker: Worker, answer: Answered) -> bool:
        """Whether another worker may succeed, or the same one once it has noticed that an earlier attempt is over."""
        asked_before = self.last is not None or worker in self._tried
        return answer.status in ELSEWHERE or (answer.status == 409 and asked_before)

    def _is_worse_than_last(self, outcome: Outcome, progress: Progress) -> bool:
        """Whether the last outcome (part of the answer, or a full queue) serves the client better than `outcome`."""
        if self.queue_was_full:
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
        self.refreshed = False
        refused = isinstance(outcome, Answered) and outcome.status == 409
        self.left_behind = worker if refused and worker in self._tried else None
        self._tried.add(worker)
        rescheduled = isinstance(outcome, Withheld) and outcome.rescheduled
        self._reschedules += rescheduled
        if not rescheduled or self._config.preempt_retry_exclude_decode:
            self.excluded.add(worker)
        paused = refused_as_paused(outcome) or _ended_by_pause(outcome)
        (self._paused.add if paused else self._paused.discard)(worker)
        passing = _may_pass(outcome) or self._waits_for_room(outcome)
        (self._failed.add if passing else self._failed.discard)(worker)
        if _is_refusal(outcome):
            brief = paused or _lacks_an_engine(outcome)  # this may be over before the next probe
            self._unwilling[worker] = worker.changes, worker.probes if brief else None
        else:
            self._unwilling.pop(worker, None)

    @property
    def rescheduled(self) -> bool:
        """Whether the last worker preempted the request for lack of KV memory and returned it."""
        return self.last is not None and isinstance(self.last[1], Withheld) and self.last[1].rescheduled

    @property
    def unwilling(self) -> set[Worker]:
        """Workers that ended or refused the request, and have neither changed state nor been probed ready since."""
        return {
            worker
            for worker, (changes, probes) in self._unwilling.items()
            if worker.changes == changes and probes in (None, worker.probes)
        }

    @property
    def queue_was_full(self) -> bool:
        """Whether a worker's queue was full; reporting this takes precedence over paused workers."""
        return self.last is not None and isinstance(self.last[1], Answered) and self.last[1].status == 429

    @property
    def would_report_a_pause(self) -> bool:
        """Whether the client would receive only the report of a pause."""
        if self.last is None or refused_as_paused(self.last[1]):
            return True
        return _ended_by_pause(self.last[1])

    @property
    def was_refused_as_paused(self) -> bool:
        return self.last is not None and refused_as_paused(self.last[1])

    def ask_again(self, worker: Worker) -> None:
        """Allow attempts at `worker` again, because its pause has ended."""
        if worker in self._paused:
            self._paused.remove(worker)
            self.excluded.discard(worker)
            self._unwilling.pop(worker, None)

    @property
    def was_cut(self) -> bool:
        return self.last is not None and isinstance(self.last[1], Withheld)

    @property
    def was_lost(self) -> bool:
        """Whether the last worker, or its engine, was lost."""
        return self.last is not None and (isinstance(self.last[1], Lost) or _lacks_an_engine(self.last[1]))

    @property
    def may_return(self) -> bool:
        """Whether a worker that failed may be tried again if there is no other."""
        return bool(self._failed)

    @property
    def backoff_s(self) -> float:
        """Delay before the next attempt, with jitter, so that requests of a lost worker do not move all at once."""
        if self.fruitless < 2:
            return 0.0
        return min(0.05 * 2.0 ** (self.fruitless - 2), 1.0) * self._random.uniform(0.5, 1.5)


class RetryBudget:
    """Limits retries to a share of all requests, so that retries do not overload a failing fleet."""

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
