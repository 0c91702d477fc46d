"""One client's request from its last byte in to its last byte out, over as many workers as that takes.

An `Exchange` is the request: what the client has been told so far, and what to tell it when a worker does not finish. An
`Attempt` is one worker's try; its `Course` says what follows from how that ended: whole answers are told, or tried
elsewhere if another worker may do better; what was veiled or lost goes on elsewhere, or the client is told that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING

from headgate.api.errors import error_body
from headgate.errors import RequestError, Unavailable
from headgate.protocol.command import PauseMode
from headgate.router.abort import end_former
from headgate.router.attempt import (
    ANSWER_OWN,
    HOP_BY_HOP,
    JSON,
    STREAM_HEADERS,
    Answered,
    Attempt,
    Lost,
    Outcome,
    Streamed,
    Veiled,
    refused_as_paused,
    whole_answer,
)
from headgate.router.course import Course, is_final
from headgate.router.disagg import Leg, prefilled
from headgate.router.downstream import Downstream, HttpRequest, answer_head, error_answer
from headgate.router.ending import CAUSE, DEADLINE, PAUSE, End, as_aborted, last_words, usage_told, wants_usage
from headgate.router.journal import Journal, splice, unsaid, unveil
from headgate.router.story import Departure, departure
from headgate.router.upstream import Headers, Upstream, WorkerLost
from headgate.router.worker import Worker

if TYPE_CHECKING:
    from headgate.router.ask import Ask
    from headgate.router.router import Placement, Router

log = logging.getLogger(__name__)

# Of a request these are ours to write, and everything that begins with x-headgate.
# Nobody is asked to compress: an answer that breaks off inside an event must be seen to.
OWN = HOP_BY_HOP | {b"accept-encoding", b"host", b"content-length", b"content-type", b"expect", b"x-request-id"}
PRIVATE = b"x-headgate-"
KEEP_ALIVE = b": keep-alive\n\n"
# What nearly every answer that is told whole looks like.
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"x-request-id: %b\r\nx-headgate-worker: %b\r\n\r\n%b"
)
MOST_MEMOS = 64  # ways to ask workers, remembered of one head
LAST_CHUNK = b"0\r\n\r\n"
RECOMPUTE = b"x-headgate-on-preempt: recompute\r\n"
MOST_CHOICES = 1024  # that are told of an end which no worker tells
DEADLINE_GRACE_S = 0.5  # after a deadline, for a worker to end the request itself; servers take 0.3 s of it
LONGEST_MS = 1e12  # of a deadline
WORDS_S = 2.0  # for a worker to tell the text of an answer that was aborted


class NoWorker(Unavailable):
    code = "no_worker"


class WorkersFailed(RequestError):
    status = 502
    code = "worker_lost"


@lru_cache(64)
def _own(connection: bytes | None) -> frozenset[bytes]:
    """Headers that are not passed on: ours to write, and those that a client says are for this hop alone."""
    return OWN.union(name.strip().lower() for name in (connection or b"").split(b","))


class Exchange:
    """One request. Most are asked and answered at once; of one that has to wait, or to go on elsewhere, `run` is a task."""

    # How every one begins; in the class, because there are thousands a second.
    id = ""
    key = "", "", 0  # in `Router.live`
    attempt: Attempt | None = None
    leg: Leg | None = None  # while another worker computes its prompt
    course: Course | None = None
    over = False
    moves = 0  # how often another worker went on with it
    departures: tuple[Departure, ...] = ()  # from those workers
    full = False  # the client reads too slowly
    slow = False  # it has done so at some time
    told_raw = False  # the client has a part of an answer that has no journal
    ending = False  # somebody has asked for its end: no other worker goes on with it
    cut = False  # and it was the router that ended it
    held: PauseMode | None = None  # the pause of the fleet that has found it here
    overtaken = False  # that pause came while it was on its way to a worker, or there
    kept = False  # such a pause has kept it, and is over
    paused_here = False  # it was ended by a pause, and no worker counts it
    cause = CAUSE  # of an end that the router tells
    _timer: asyncio.TimerHandle | None = None  # of its deadline
    graces = 0  # given to workers since the deadline
    _begun = False  # the client has the head of a stream
    _admitted = False
    _task: asyncio.Task[None] | None = None
    _placement: Placement | None = None  # of the first attempt, while no task has it
    _outcome: asyncio.Future[Outcome] | None = None  # that the task waits for
    _ends: tuple[asyncio.Future[None], ...] = ()  # of those who wait for ours

    def __init__(self, router: Router, client: Downstream, request: HttpRequest, ask: Ask, tenant: str) -> None:
        self.router = router
        self.client = client
        self.request = request
        self.ask = ask
        self.tenant = tenant
        self.journal = Journal()
        self.began_s = router.loop.time()
        self.created = int(time.time())
        self.chunked = request.head.version == "1.1"

    # -- Answering ------------------------------------------------------------------

    def client_left(self) -> None:
        self.router.client_left(self)
        self.cancel()

    def client_full(self, full: bool) -> None:
        self.full, self.slow = full, True
        if self.attempt is not None and self.attempt.upstream is not None and self.attempt.outcome is None:
            (self.attempt.upstream.hold if full else self.attempt.upstream.release)()

    # -- to the client --------------------------------------------------------------

    def begin_stream(self, worker: Worker | None, headers: Headers) -> None:
        if self._begun:
            return
        self._begun = True
        if not self.chunked:
            headers = [
                *(header for header in headers if header[0] != b"transfer-encoding"),
                (b"connection", b"close"),
            ]
        self.client.write(answer_head(200, headers + self._names(worker)))

    def _names(self, worker: Worker | None) -> Headers:
        names = [(b"x-request-id", self.id.encode())]
        if worker is not None:
            names.append((b"x-headgate-worker", worker.name.encode()))
        return names

    def pass_events(self, events: bytes) -> None:
        self.journal.feed(events)
        self.write_chunk(events)

    def write_chunk(self, data: bytes) -> None:
        self.client.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def keep_alive(self) -> None:
        """Show life while there is nothing to tell."""
        if self.ask.stream and not self.told_raw:
            self.begin_stream(None, STREAM_HEADERS)
            self.write_chunk(KEEP_ALIVE)

    def _end_stream(self) -> None:
        if self.chunked:
            self.client.write(LAST_CHUNK)
        self.client.finished(keep_alive=self.chunked)

    def _tell(self, worker: Worker | None, answer: Answered) -> None:
        if self._begun:  # a stream that has only shown life, and is refused now
            self.write_chunk(b"data: %b\n\n" % answer.body.replace(b"\n", b" "))
            return self._end_stream()
        if answer.headers is JSON and answer.status == 200 and worker is not None:
            name = worker.name.encode()
            self.client.write(WHOLE % (len(answer.body), self.id.encode(), name, answer.body))
            return self.client.finished()
        headers = [header for header in answer.headers if header[0] not in ANSWER_OWN]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        self.client.write(answer_head(answer.status, headers + self._names(worker)) + answer.body)
        return self.client.finished()

    def fail(self, error: RequestError) -> None:
        """Tell the client what is wrong, as an answer or as the last event of one."""
        if self.client.gone:
            return
        if self._begun:
            self.write_chunk(b"data: %b\n\n" % error_body(error, self.id))
            self._end_stream()
        else:
            self.client.write(error_answer(error, self._names(None)))
            self.client.finished()

    # -- an end that somebody has asked for -------------------------------------------

    @property
    def worker(self) -> Worker | None:
        """Who has it now; None while it waits, or is between two of them."""
        return None if self.attempt is None else self.attempt.worker

    @property
    def prefill_worker(self) -> Worker | None:
        """Who computes its prompt for another."""
        return None if self.leg is None else self.leg.worker

    @property
    def is_untouched(self) -> bool:
        """The worker that has it has made nothing of it: it may be in that worker's queue."""
        moved = self.course is not None and self.journal.extent == self.course.extent
        return moved or not self.journal.choices

    @property
    def end_pending(self) -> bool:
        """Its end was asked for, and its client has not been sent it."""
        return self.ending and not self.over

    @property
    def is_unread(self) -> bool:
        """Its end waits here for a client that does not read."""
        return self.end_pending and self.full

    def ask_end(self, cause: str) -> None:
        """From now on no other worker goes on with it; the first cause counts."""
        if not self.ending:
            self.ending, self.cause = True, cause

    def end(self, cause: str = CAUSE) -> None:
        """End it here and now; a worker that has it learns that by the closing of its connection."""
        self.ask_end(cause)
        self.cancel()

    def hold(self, mode: PauseMode) -> None:
        """The fleet is being paused. What waits for a ticket goes back to waiting for a worker."""
        self.held, self.overtaken = mode, self.worker is not None
        if self.leg is not None:
            self.leg.cancel("the fleet is being paused")

    def waits_out_a_pause(self, course: Course, *, queueing: bool) -> bool:
        """Whether it is kept until the fleet is resumed: it was accepted before the pause, or new requests are queued."""
        ended = course.last is not None and isinstance(course.last[1], Veiled) and course.last[1].cause == PAUSE
        return not ended and (queueing or self.held is not None)

    def _came_too_late(self, outcome: Outcome) -> bool:
        """Whether the worker only refused it because the pause was there first: it has not been tried, then."""
        return self.overtaken and refused_as_paused(outcome)

    def _tell_end(self) -> None:
        """Tell the client that it is over, and what there is."""
        if self.cause == DEADLINE and not self.ask.stream and self._unshown() is None:
            self.journal = self.journal.emptied()  # the client gets nothing of it, and the usage says so
        ends = [self._end_of(i) for i in range(min(self.ask.n, MOST_CHOICES))]
        finished = {i for i, told in self.journal.choices.items() if told.finish is not None}
        unfinished = [end for end in ends if end.index not in finished]
        # Or else all that is missing is the end of the stream, or nobody has asked for this end.
        self.cut = self.cause != DEADLINE and (bool(unfinished) or not self.ask.stream)
        last = self._unshown()
        self.paused_here = self.cause == PAUSE and (last is None or last[1].cause != PAUSE)
        if last is not None:
            self.journal.feed(unsaid(last[1].ending))
            return self._show(last[0], as_aborted(unveil(last[1].ending), self.cause, strict=self._strict))
        model = self.ask.model or next((name for worker in self.router.fleet for name in worker.models), "")
        stream = self.ask.stream
        usage = usage_told(self.journal) if not stream or wants_usage(self.request.body) else None
        path = self.request.path
        about = path, self.id, self.created, model, unfinished if stream else ends
        words = last_words(*about, stream=stream, usage=usage, cause=self.cause, strict=self._strict)
        if not stream:
            return self._tell(None, Answered(200, JSON, words))
        self.begin_stream(None, STREAM_HEADERS)
        self.write_chunk(words)
        return self._end_stream()

    def _end_of(self, index: int) -> End:
        told = self.journal.choices.get(index)
        if told is None:
            return End(index, cause=self.cause)
        # Also a choice of a whole answer that had finished: its text is lost with its worker.
        return End(index, told.tokens, cause=self.cause, versions=told.versions)

    def _unshown(self) -> tuple[Worker, Veiled] | None:
        """The end that its last worker told, and who that was, if the client can have it: nobody has gone on since."""
        if self.course is None or self.course.last is None:
            return None
        worker, ending = self.course.last
        if not isinstance(ending, Veiled) or not ending.cause:
            return None
        if self.ask.stream and (ending.rescheduled or self.journal.extent != self.course.extent):
            return None
        return worker, ending

    @property
    def _strict(self) -> bool:
        """Whether the client reads only OpenAI's finish reasons: applied to what the router itself says last."""
        return (self.request.header(b"x-openai-strict") or b"").lower() == b"true"

    # -- its deadline -------------------------------------------------------------------

    @property
    def _left_s(self) -> float | None:
        """Until its deadline; negative after it. None also for one that workers refuse."""
        due_ms = self.ask.deadline_ms
        return (
            None
            if due_ms is None or not 0 < due_ms <= LONGEST_MS
            else self.began_s + due_ms / 1000 - self.router.loop.time()
        )

    def _overdue(self) -> None:
        """The deadline has passed. What no worker has ends here and now.

        A worker that has the request gets a grace, because it knows the usage and the text that it holds back. So does
        another worker after it, which can make both from the journal.
        """
        attempt = self.attempt
        if attempt is None or self.graces > 1 or (self.graces and not self._leave_to_another(attempt)):
            return self._end_late()
        self.graces += 1
        self._timer = self.router.loop.call_later(DEADLINE_GRACE_S, self._overdue)
        return None

    def _leave_to_another(self, attempt: Attempt) -> bool:
        """Take it from a worker that has not ended it; False if there is no other to do that."""
        if attempt.outcome is not None:
            return True
        ours = (worker for worker in self.router.fleet if worker.available and worker.kind == "headgate")
        if self.ending or self.full or self.router.holding or all(worker is attempt.worker for worker in ours):
            return False
        attempt.fail("it has not ended a request at its deadline")
        return True

    def _end_late(self) -> None:
        self._note_late()
        self.cancel()

    def _note_late(self) -> None:
        self.ask_end(DEADLINE)

    def _cancelled(self) -> None:
        """Its task was ended: by its client, by somebody who asked for that, or because the router closes."""
        if self.client.gone:
            return
        try:
            if not self.ending:
                raise Unavailable("the router is shutting down", code="shutting_down")
            self._tell_end()
        except RequestError as error:
            self.fail(error)
        except Exception:
            self._mistaken()

    # -- the request's life -----------------------------------------------------------

    def begin(self) -> None:
        """Ask a worker at once if nothing has to be waited for."""
        if self.ask.deadline_ms is not None and (left_s := self._left_s) is not None:
            self._timer = self.router.loop.call_later(left_s, self._overdue)
        try:
            asked = self._ask_at_once()
        except Exception:
            return self._mistaken()
        return None if asked else self._run()

    def _ask_at_once(self) -> bool:
        router = self.router
        if router.holding or not router.admission.try_enter(self.tenant):
            return False
        self._admitted = True
        self._placement = placement = router.choose(self)
        if placement is None or placement.prefill is not None:
            return False
        upstream = router.fleet.pool(placement.worker).take()
        if upstream is None:
            return False
        self.attempt = Attempt(self, placement)
        self.attempt.start(upstream, self._request_for(placement.worker, None))
        return True

    def attempt_over(self, attempt: Attempt, outcome: Outcome) -> None:
        if self._task is None:
            self._first_over(attempt, outcome)
        elif self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)

    def _first_over(self, attempt: Attempt, outcome: Outcome) -> None:
        if isinstance(outcome, Lost) and attempt.is_stale:
            return self._run(fresh=True)
        placement, self._placement = self._placement, None
        assert placement is not None
        placement.give_back()
        self.router.attempt_ended(self, placement, outcome)
        if not is_final(outcome):
            return self._run((placement.worker, outcome))
        self._leave()
        try:
            return self._conclude(placement.worker, outcome)
        except Exception:
            return self._mistaken()

    def _run(self, tried: tuple[Worker, Outcome] | None = None, *, fresh: bool = False) -> None:
        self.attempt = None
        self._task = self.router.loop.create_task(self.run(tried, fresh=fresh))
        self._task.add_done_callback(self._ended)  # one that is cancelled before its first step knows nothing of it

    async def run(self, tried: tuple[Worker, Outcome] | None, *, fresh: bool) -> None:
        """Carry it to its end, which is one answer, one error, or a client that has left."""
        router = self.router
        try:
            if not self._admitted:
                await router.admit(self)
                self._admitted = True
            await self._carry_through(tried, fresh=fresh)
        except RequestError as error:
            router.failed(self, error)
            self.fail(error)
        except asyncio.CancelledError:
            self._cancelled()
        except Exception:
            self._mistaken()
        finally:
            self._leave()

    def _mistaken(self) -> None:
        log.exception("%s: the router made a mistake", self.id)
        self._leave()
        self.fail(WorkersFailed("the router made a mistake; its log says more", code="internal_error"))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.over:
            if self.attempt is not None:
                self.attempt.leave()
            self._cancelled()
            self._leave()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.over:
            self._cancelled()
            self._leave()

    def _leave(self) -> None:
        """Give back what it has."""
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self.attempt = self.course = None  # which know this exchange: freed at once, and no collector has to come
        if self._placement is not None:
            self._placement.give_back()
        if self._admitted:
            self.router.admission.leave(self.tenant)
        self.router.exchange_ended(self)
        for end in self._ends:
            if not end.done():
                end.set_result(None)

    def when_over(self) -> asyncio.Future[None]:
        end = self.router.loop.create_future()
        if self.over:
            end.set_result(None)
        else:
            self._ends += (end,)
        return end

    async def _carry_through(self, tried: tuple[Worker, Outcome] | None, *, fresh: bool) -> None:
        try:
            return await self._carry(tried, fresh=fresh)
        except asyncio.CancelledError:
            gone = self.client.gone or self.router.draining or not self.ending
            if gone or self.cut or self.course is None or not self._has_words_to_find(self.course):
                raise
        if (task := asyncio.current_task()) is not None:
            task.uncancel()  # it was aborted between two workers, and its words are still to be found
        return await self._carry(None, fresh=False)

    async def _carry(self, tried: tuple[Worker, Outcome] | None, *, fresh: bool) -> None:
        """Attempt after attempt, until the client has its answer or nobody is left to ask."""
        course = self.course = Course(self)
        if fresh and self._placement is not None:
            course.asked_again(self._placement.worker)
        while True:
            if tried is not None and not self._came_too_late(tried[1]):
                if course.ends_with(*tried) and (is_final(tried[1]) or not self._is_ending):
                    return self._tell_last(course)
                self.moves += 1
                self.departures += (departure(self, *tried),)
                self.router.counters.moved(self)
                if course.left_behind is not None:
                    await end_former(self, course.left_behind)
            if tried is not None and self.held == "abort":
                self.ask_end(PAUSE)
            if self.ending and not self._has_words_to_find(course):
                return self._tell_end()
            placement, self._placement = self._placement, None
            placement = placement or await self.router.place(self, course)
            if placement is None:
                return self._tell_last(course)
            outcome = await self._try(placement, fresh=fresh)
            tried, fresh = None if outcome is None else (placement.worker, outcome), False

    @property
    def _is_ending(self) -> bool:
        """Whether it goes to no other worker: its end was asked for, or a pause ends what is in flight."""
        return self.ending or self.held == "abort"

    def _has_words_to_find(self, course: Course) -> bool:
        """Whether a worker is there to tell the end of a whole answer that was aborted, and whose own worker was lost.

        The tokens are known here and the text is not. No worker goes on with it: in its journal all choices have ended.
        """
        unknown = not self.ask.stream and bool(self.journal.choices) and self._unshown() is None
        if not unknown or self.ask.logprobs or self.router.holding or self.cause == DEADLINE:
            return False
        self.journal.end(min(self.ask.n, MOST_CHOICES), self.cause)
        if not self.cut:
            self.cut, self.moves = True, max(self.moves, 1)
            self._end_without_words_in(WORDS_S)
        self._placement = self._placement or self.router.choose(self, course)
        return self._placement is not None

    def _end_without_words_in(self, time_s: float) -> None:
        """This takes the place of the deadline, which still holds, with its grace."""
        if self._timer is not None:
            self._timer.cancel()
        if (left_s := self._left_s) is not None:
            time_s = min(time_s, max(left_s, 0.0) + DEADLINE_GRACE_S)
        self._timer = self.router.loop.call_later(time_s, self.cancel)

    def _tell_last(self, course: Course) -> None:
        if course.last is None:
            raise self.router.nobody()
        worker, outcome = course.last
        if self.cut and isinstance(outcome, Answered) and outcome.status != 200:
            return self._tell_end()  # no worker has found its words
        refused = isinstance(outcome, Lost) or (isinstance(outcome, Answered) and outcome.status == 503)
        if refused and self._left_s is not None and self._left_s <= 0:
            self._note_late()  # which says more than that a worker was paused, or lost
            return self._tell_end()
        return self._conclude(worker, outcome)

    async def _try(self, placement: Placement, *, fresh: bool) -> Outcome | None:
        """None: the fleet was held before the worker was asked."""
        self.overtaken = False
        with placement:
            if self.router.holding:
                outcome = None
            elif placement.prefill is None:
                outcome = await self._attempt(placement, None, fresh=fresh)
            else:
                async with prefilled(self, placement.prefill) as ticket:
                    outcome = None if self.router.holding else await self._attempt(placement, ticket, fresh=fresh)
        if outcome is None:
            placement.undo()
        else:
            self.router.attempt_ended(self, placement, outcome)
        return outcome

    async def _attempt(self, placement: Placement, ticket: bytes | None, *, fresh: bool) -> Outcome | None:
        if placement.worker.kind == "unknown":
            # Given up since it was chosen. Nobody knows what answers there now, or whether it would keep a journal.
            return Lost("it does not answer any more")
        pool = self.router.fleet.pool(placement.worker)
        request = self._request_for(placement.worker, ticket)
        upstream = None if fresh else pool.take()
        if upstream is not None:
            attempt = Attempt(self, placement)
            outcome = await self._ask(attempt, upstream, request)
            if self.ending or not attempt.is_stale:
                return outcome
            if self.course is not None:
                self.course.asked_again(placement.worker)
        try:
            upstream = await pool.connect()
        except WorkerLost as error:
            return Lost(str(error))
        if self.router.holding:
            pool.give(upstream)
            return None
        return await self._ask(Attempt(self, placement), upstream, request)

    async def _ask(self, attempt: Attempt, upstream: Upstream, request: bytes) -> Outcome:
        self.attempt, self._outcome = attempt, self.router.loop.create_future()
        attempt.start(upstream, request)
        try:
            return await self._outcome
        finally:
            attempt.leave()
            self.attempt = self._outcome = None

    def _request_for(self, worker: Worker, ticket: bytes | None) -> bytes:
        body = self.request.body
        if worker.kind != "headgate":
            return self.request_to(worker, body)
        if self.moves:
            body = self._going_on(body)
        if self.ask.deadline_ms is not None and (left_s := self._left_s) is not None:
            body = splice(body, "deadline_ms", b"%.3f" % max(1000 * left_s, 0.001))
        if ticket is not None:
            body = splice(body, "kv_ticket", ticket)
        more = b"x-headgate-journal: %d\r\n" % self.created
        if self.course is not None and self.course.recomputes(worker):
            more += RECOMPUTE
        return self.request_to(worker, body, more)

    def request_to(self, worker: Worker, body: bytes, more: bytes = b"", *, id: str | None = None) -> bytes:
        """The client's request, as this worker is asked it; under another id it is another request."""
        # What goes on is a part of an answer, which nobody may get for the whole of it.
        head = self._head_for(worker, part=id is not None or bool(self.moves and self.journal.choices))
        lines = b"%bx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n"
        return lines % (head, (id or self.id).encode(), len(body), more) + body  # which is copied once only

    def _head_for(self, worker: Worker, *, part: bool) -> bytes:
        """What is the same of all requests with this head to that worker."""
        memo, key = self.request.head.memo, (worker, worker.kind, worker.key, self.tenant, part)
        head: bytes | None = memo.get(key)
        if head is None:
            if len(memo) > MOST_MEMOS:
                memo.clear()
            head = memo[key] = self._make_head(worker, part=part)
        return head

    def _make_head(self, worker: Worker, *, part: bool) -> bytes:
        router, head = self.router, self.request.head
        own = _own(head.first.get(b"connection")) | ({b"idempotency-key"} if part else set())
        headers = [header for header in head.headers if header[0] not in own and header[0][:11] != PRIVATE]
        lines = b"".join([b"%b: %b\r\n" % header for header in router.credentials(worker, headers, self.tenant)])
        pool = router.fleet.pool(worker)
        return b"%b %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%b" % (
            head.method.encode(),
            pool.prefix,
            head.target,
            pool.netloc,
            lines,
        )

    def _going_on(self, body: bytes) -> bytes:
        """The request, from where its answer has come to."""
        if not self.journal.choices:
            return body
        if not self.ask.stream and self.ask.logprobs:
            self.journal = Journal()  # it has no log-probabilities: the answer, which nobody has seen, is made anew
            return body
        return splice(body, "resume", self.journal.resume(streamed=self.ask.stream))

    def _conclude(self, worker: Worker, outcome: Outcome) -> None:
        match outcome:
            case Streamed():
                self._end_stream()
            case Answered():
                self._tell(worker, outcome)
            case Veiled(_, ending):
                self._show(worker, unveil(ending))
            case Lost(why):
                raise WorkersFailed(f"the worker of this answer was lost ({why}), and no other could go on with it")

    def _show(self, worker: Worker, ending: bytes) -> None:
        """Tell what the worker had to say for itself."""
        if self.ask.stream:
            self.begin_stream(worker, STREAM_HEADERS)
            self.write_chunk(ending)
            return self._end_stream()
        answer = whole_answer(ending)
        if answer is None:
            raise WorkersFailed("the worker of this answer has ended it without a word")
        return self._tell(worker, answer)
