"""The relay: carries out the actions of a routed request, from its arrival to the last byte of its answer.

An `Exchange` is one request. Everything that happens to it is an event; the table in `states` maps events to actions,
and this module performs them. Admission, placement, tickets and connections run as tasks that end with an event. The
bytes of an answer pass from the worker's connection to the client's in an `Attempt`, not through this module.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from typing import Final, Protocol

import msgspec

from headgate.config import RouteConfig
from headgate.contract.journal import RAW_HEADER
from headgate.contract.limits import MOST_CHOICES
from headgate.edge.admission import Admission
from headgate.errors import RequestError, Unavailable
from headgate.protocol.command import PauseMode
from headgate.protocol.output import Cause
from headgate.router.control.abort_calls import end_former
from headgate.router.control.fan_out import WorkerCalls
from headgate.router.counters import RouterCounters
from headgate.router.data_path.downstream import Downstream, HttpRequest
from headgate.router.data_path.fast_path import EventPipe, ReadWhole
from headgate.router.data_path.forwarding import Forwarder
from headgate.router.data_path.request_info import RequestInfo
from headgate.router.data_path.upstream import Headers, Upstream, WorkerLost
from headgate.router.exchange import reports
from headgate.router.exchange.attempt import Attempt, Lost, Outcome, Withheld, refused_as_paused
from headgate.router.exchange.client_answer import ClientAnswer
from headgate.router.exchange.ending import CAUSE, DEADLINE, PAUSE, is_resumable
from headgate.router.exchange.journal import NO_ENDS, Journal, splice
from headgate.router.exchange.placement import Placement
from headgate.router.exchange.prefill import (
    PREFILL_LINE,
    NoTicket,
    PrefillRequest,
    prefill_body,
    prefill_name,
    request_ticket,
)
from headgate.router.exchange.reports import EndReport, WorkersFailed
from headgate.router.exchange.retry_state import Progress, RetryBudget, RetryState, is_final
from headgate.router.exchange.states import (
    ASKING,
    CLOSED,
    PLACING,
    QUEUED,
    STREAMING,
    Action,
    Event,
    Facts,
    State,
    transition,
)
from headgate.router.exchange.timeline import Departure, departure
from headgate.router.fleet.fleet import Workers
from headgate.router.fleet.worker import Worker

log = logging.getLogger(__name__)

RECOMPUTE = b"x-headgate-on-preempt: recompute\r\n"
DEADLINE_GRACE_S = 0.5  # how long a worker may take to end a request after its deadline; servers take up to 0.3 s
LONGEST_MS = 1e12  # longer deadlines are ignored here; the worker refuses them
RENDER_S = 2.0  # how long workers may take to turn the token ids of an aborted answer into text


class NoWorker(Unavailable):
    code = "no_worker"


class Services(Protocol):
    """The part of the router that an exchange uses."""

    loop: asyncio.AbstractEventLoop
    config: RouteConfig
    random: Random
    fleet: Workers
    admission: Admission
    retry_budget: RetryBudget
    forwarder: Forwarder
    worker_calls: WorkerCalls
    counters: RouterCounters
    read_whole: ReadWhole
    holding: bool  # the whole fleet is paused or pausing
    draining: bool

    def choose(self, exchange: Exchange, retry_state: RetryState | None = None) -> Placement | None:
        """Return a placement on a worker that is ready now; None if there is none."""

    async def place(self, exchange: Exchange, retry_state: RetryState) -> Placement | None:
        """Wait until a worker is ready and return a placement on it; None if no worker can become ready."""

    async def admit(self, exchange: Exchange) -> None:
        """Wait for admission."""

    def no_worker(self) -> RequestError:
        """Return the error that says why no worker can take a request."""

    def attempt_ended(self, exchange: Exchange, placement: Placement, outcome: Outcome) -> None: ...

    def failed(self, exchange: Exchange, error: RequestError) -> None: ...

    def client_left(self, exchange: Exchange) -> None: ...

    def exchange_ended(self, exchange: Exchange) -> None: ...


class EndedExchange(msgspec.Struct, frozen=True, gc=False):  # created per request; cheaper than a dataclass
    """What remains of a request after its end, for the dashboard."""

    id: str
    tenant: str
    path: str
    began_s: float
    ended_s: float
    cause: str  # empty if a worker ended it; the router does not parse answers
    moves: int


class Exchange:
    """One routed request."""

    # Initial values. They are class attributes because setting them per request would cost more.
    id = ""
    key = "", "", 0  # the key in `Router.live`
    state = QUEUED
    attempt: Attempt | None = None
    prefill_request: PrefillRequest | None = None  # set while another worker computes the prompt
    retry_state: RetryState | None = None  # set once an attempt has failed, or placement has to wait
    first_token_s: float | None = None  # after the arrival; None in an answer that came in one piece
    moves = 0  # attempts that were followed by another one
    departures: tuple[Departure, ...] = ()  # why each of the attempts counted by `moves` ended
    full = False  # the client reads too slowly
    slow = False  # the client has been full at least once
    unresumable = False  # the client has received part of an answer without a journal
    cause: str | None = None  # why the request was asked to end
    choice_ends = NO_ENDS  # why single choices were asked to end, by index
    held: PauseMode | None = None  # the mode of the fleet pause that found the request in flight
    overtaken = False  # a worker had the request when that pause began
    kept = False  # the request has survived such a pause
    end_report: EndReport | None = None
    graces = 0  # how often workers were given extra time after the deadline
    _timer: asyncio.TimerHandle | None = None  # fires at the deadline
    _work: asyncio.Task[None] | None = None  # the wait for admission, placement, a ticket or a connection
    _placement: Placement | None = None
    _upstream: Upstream | None = None  # a connection that is not used yet
    _ticket: bytes | None = None
    last_attempt: tuple[Worker, Outcome] | None = None
    refusal: RequestError | None = None  # the error if admission failed
    _ends: tuple[asyncio.Future[None], ...] = ()  # callers that wait for the end
    answer: ClientAnswer

    def __init__(
        self, router: Services, client: Downstream, request: HttpRequest, info: RequestInfo, tenant: str
    ) -> None:
        self.router = router
        self.client = client
        self.request = request
        self.info = info
        self.tenant = tenant
        self.journal = Journal()
        self.began_s = router.loop.time()
        self.created = int(time.time())

    def __repr__(self) -> str:
        return f"<Exchange {self.id} {self.state.name.lower()}, {self.moves} moves>"

    # -- status -----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.state is CLOSED

    @property
    def began(self) -> float:
        """The time of the request's arrival, in seconds since 1970."""
        return time.time() - (self.router.loop.time() - self.began_s)

    @property
    def ending(self) -> bool:
        """Whether the end was requested, so that no other worker resumes the answer."""
        return self.cause is not None

    @property
    def cut(self) -> bool:
        """Whether the router ended the answer before it was complete."""
        return self.state is State.RENDERING or (self.end_report is not None and self.end_report.cut)

    @property
    def ended_by_pause(self) -> bool:
        """Whether the router itself ended the request because of a pause, so that no worker counts it as ended."""
        return self.end_report is not None and self.end_report.paused

    @property
    def worker(self) -> Worker | None:
        """The worker that has the request; None while it waits or is between workers."""
        return None if self.attempt is None else self.attempt.worker

    @property
    def is_untouched(self) -> bool:
        """Whether the current worker has generated nothing yet; the request may be in its queue."""
        moved = self.retry_state is not None and self.journal.extent == self.retry_state.extent
        return moved or not self.journal.choices

    @property
    def end_pending(self) -> bool:
        """Whether the end was requested and has not been sent to the client."""
        return self.ending and not self.over

    @property
    def is_unread(self) -> bool:
        """Whether the end waits for a client that does not read."""
        return self.end_pending and self.full

    @property
    def model(self) -> str:
        """The model that the request names, or else the first model of the fleet."""
        return self.info.model or next((name for worker in self.router.fleet for name in worker.models), "")

    def summary(self, now_s: float) -> EndedExchange:
        """Called at the end."""
        cause = self.cause or (self.departure_cause if self.client.gone else "")
        return EndedExchange(self.id, self.tenant, self.request.path, self.began_s, now_s, cause, self.moves)

    @property
    def departure_cause(self) -> Cause:
        """Why the request ends if its client is gone."""
        return "client_stalled" if self.client.stalled else "client_disconnect"

    def no_worker(self) -> RequestError:
        return self.router.no_worker()

    def count_failure(self, error: RequestError) -> None:
        self.router.failed(self, error)

    # -- events from outside ------------------------------------------------------------

    def begin(self) -> None:
        """Start the exchange; the request is sent at once if no step has to wait."""
        if self.info.deadline_ms is not None and (left_s := self.left_s) is not None:
            self._timer = self.router.loop.call_later(left_s, self._on, Event.DEADLINE)
        self.answer = ClientAnswer(self.client, self.id, self.request.path, self.request.head.version == "1.1")
        try:
            self._begin()
        except Exception:
            self._report_bug()

    def _begin(self) -> None:
        router = self.router
        if router.holding or not router.admission.try_enter(self.tenant):
            return self._act(Action.ADMIT)
        self.state = PLACING
        self._placement = placement = router.choose(self)
        if placement is None:
            return self._act(Action.PLACE)
        if placement.prefill is not None:
            return self._on(Event.SPLIT)
        self._upstream = router.fleet.pool(placement.worker).take()
        if self._upstream is None:
            return self._on(Event.PLACED)
        # A shortcut for three transitions of the table; nearly every request starts this way.
        self.state = ASKING
        return self._send()

    def client_left(self) -> None:
        self.router.client_left(self)
        self._on(Event.GONE)

    def client_full(self, full: bool) -> None:
        self.full, self.slow = full, True
        if self.attempt is not None and self.attempt.outcome is None:
            (self.attempt.upstream.hold if full else self.attempt.upstream.release)()

    def hold(self, mode: PauseMode) -> None:
        """Called when a pause of the fleet begins."""
        self.held, self.overtaken = mode, self.worker is not None
        self._on(Event.HELD)

    def release(self) -> None:
        """Called when the pause of the fleet has ended."""
        self.held, self.kept = None, True

    def ask_end(self, cause: str) -> None:
        """Note that the worker which has the request was asked to end it; if there is none, end the request here.

        If several causes are given, the first one counts.
        """
        self._set_cause(cause)
        self._on(Event.END_ASKED)

    def ask_choice_end(self, choice: int, cause: str) -> None:
        """Note that the worker was asked to end one choice; another worker that gets the request ends it at once."""
        self.choice_ends = {choice: cause, **self.choice_ends}

    def end(self, cause: str = CAUSE) -> None:
        """End the request now. If a worker has it, the connection to that worker is closed."""
        self._set_cause(cause)
        self._on(Event.END_NOW)

    def cancel(self) -> None:
        """End the request because the router is shutting down."""
        self._on(Event.CLOSING)

    def when_over(self) -> asyncio.Future[None]:
        end = self.router.loop.create_future()
        if self.over:
            end.set_result(None)
        else:
            self._ends += (end,)
        return end

    def keep_alive(self) -> None:
        """Send a keep-alive comment on a stream."""
        if self.info.stream and not self.unresumable:
            self.answer.keep_alive()

    def waits_out_a_pause(self, retry_state: RetryState, *, queueing: bool) -> bool:
        """Whether the request waits for the fleet to resume: it precedes the pause, or the pause queues requests."""
        last = retry_state.last
        ended = last is not None and isinstance(last[1], Withheld) and last[1].cause == PAUSE
        return not ended and (queueing or self.held is not None)

    # -- events of its attempts ---------------------------------------------------------

    def tokens_begin(self) -> None:
        """Called when the first tokens of an attempt arrive."""
        if self.first_token_s is None:
            self.first_token_s = self.router.loop.time() - self.began_s

    def begin_stream(self, worker: Worker, headers: Headers) -> None:
        """Called when the head of a streamed response has arrived: send a head to the client."""
        self.answer.begin_stream(worker, headers)
        if self.state is ASKING:
            self.state = STREAMING

    def pipe(self) -> EventPipe | None:
        """Return a pipe that sends events straight to the client, except errors and the end of the answer.

        The attempt handles those two. None if the answer is not sent in chunks.
        """
        return self.client.pipe(self.journal) if self.answer.chunked else None

    def write_events(self, events: bytes) -> None:
        self.answer.write_events(events)

    def pass_events(self, events: bytes) -> None:
        self.journal.feed(events)
        self.answer.write_events(events)

    def attempt_over(self, attempt: Attempt, outcome: Outcome) -> None:
        if self.retry_state is None and is_final(outcome):
            return self._answered(outcome)
        if attempt.is_stale and not self.ending:
            self.attempt = None
            self._retry_state.note_resend(attempt.worker)
            return self._on(Event.STALE)
        return self._attempt_ended(outcome)

    def _answered(self, outcome: Outcome) -> None:
        """A shortcut of `_attempt_ended` for the common case: a first attempt with a final answer."""
        placement, self._placement = self._placement, None
        before, self.state, self.attempt = self.state, CLOSED, None
        assert placement is not None
        placement.give_back()
        try:
            self.router.attempt_ended(self, placement, outcome)
            self._give_back(before)
            reports.conclude(self, placement.worker, outcome)
        except Exception:
            self._report_bug()

    def _attempt_ended(self, outcome: Outcome) -> None:
        placement, self._placement = self._placement, None
        assert placement is not None
        self.attempt = None
        self._leave_prefill()
        placement.give_back()
        self.router.attempt_ended(self, placement, outcome)
        self.last_attempt = placement.worker, outcome
        self._on(self._judged(placement.worker, outcome))

    def _judged(self, worker: Worker, outcome: Outcome) -> Event:
        if self.overtaken and refused_as_paused(outcome):
            return Event.OVERTAKEN
        resumable = not (self.unresumable or self.journal.unreadable)
        progress = Progress(self.journal.extent, resumable, self.router.fleet.rolling)
        return self._retry_state.judge(worker, outcome, progress)

    @property
    def _retry_state(self) -> RetryState:
        if self.retry_state is None:
            router = self.router
            self.retry_state = RetryState(router.config, router.retry_budget.take, router.random)
        return self.retry_state

    # -- from an event to actions -------------------------------------------------------

    def _on(self, event: Event) -> None:
        before = self.state
        if before is CLOSED:
            return
        try:
            self.state, actions = transition(before, event, self._facts())
            if self.state is CLOSED:
                self._give_back(before)
            for action in actions:
                self._act(action)
        except Exception:
            self._report_bug()

    def _act(self, action: Action) -> None:
        ACTIONS[action](self)

    def _facts(self) -> Facts:
        retry_state = self.retry_state
        return Facts(
            holding=self.router.holding,
            aborting=self.held == "abort",
            text_missing=self._is_text_missing(),
            former=retry_state is not None and retry_state.left_behind is not None,
            graces=self.graces,
            others=bool(self.graces) and self._has_others(),
        )

    def _is_text_missing(self) -> bool:
        """Whether a whole answer would contain token ids without text, which only a worker can turn into text."""
        if self.info.stream or self.info.logprobs or self.cause == DEADLINE or self.client.gone:
            return False
        if self.router.holding or self.router.draining:
            return False
        return bool(self.journal.choices) and reports.withheld_end(self) is None

    def _has_others(self) -> bool:
        """Whether there is another worker that could end the request, with usage and text from the journal."""
        ours = (worker for worker in self.router.fleet if worker.available and worker.kind == "headgate")
        if self.ending or self.full or self.router.holding:
            return False
        return any(worker is not self.worker for worker in ours)

    def _report_bug(self) -> None:
        log.exception("%s: internal error", self.id)
        before, self.state = self.state, CLOSED
        if before is not CLOSED:
            self._give_back(before)
        self.answer.send_error(WorkersFailed("internal error of the router; see its log", code="internal_error"))

    def _give_back(self, before: State) -> None:
        """Release everything that the request owned in state `before`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            self._work.cancel()
        if self.attempt is not None or self._placement is not None or self.prefill_request is not None:
            self._drop()
        if before is not QUEUED:
            self.router.admission.leave(self.tenant)
        self.router.exchange_ended(self)
        for end in self._ends:
            if not end.done():
                end.set_result(None)

    # -- waiting --------------------------------------------------------------------------

    def _wait_for(self, work: Callable[[], Awaitable[Callable[[], None]]]) -> None:
        """Run `work` as a task, then call the function that it returns. Closing the request cancels the task."""
        self._work = self.router.loop.create_task(self._run(work))

    async def _run(self, work: Callable[[], Awaitable[Callable[[], None]]]) -> None:
        try:
            proceed = await work()
        except RequestError as error:
            self.refusal, proceed = error, partial(self._on, Event.REFUSED)
        except Exception:
            proceed = self._report_bug
        self._work = None
        proceed()

    def _admit(self) -> None:
        self._wait_for(self._admitted)

    async def _admitted(self) -> Callable[[], None]:
        await self.router.admit(self)
        return partial(self._on, Event.ADMITTED)

    def _place(self) -> None:
        self._wait_for(self._placed)

    async def _placed(self) -> Callable[[], None]:
        self._placement = placement = await self.router.place(self, self._retry_state)
        if placement is None:
            return partial(self._on, Event.NO_WORKER)
        return partial(self._on, Event.PLACED if placement.prefill is None else Event.SPLIT)

    def _prefill(self) -> None:
        self.overtaken = False
        worker = self._placed_at.prefill
        assert worker is not None
        # Its share of the load is taken at once: a worker without any leaves the fleet as soon as it is removed.
        prefill = self.prefill_request = PrefillRequest(self.router.fleet.add_load(worker, self.info.tokens))
        self._wait_for(partial(self._prefilled, prefill))

    async def _prefilled(self, prefill: PrefillRequest) -> Callable[[], None]:
        router, worker = self.router, prefill.worker
        try:
            request, timeout_s = self._prefill_request_to(worker), router.config.ticket_timeout_s
            self._ticket = await request_ticket(prefill, router.fleet.pool(worker), request, timeout_s)
        except (NoTicket, WorkerLost) as error:
            self._leave_prefill()  # now, because the prefill request may still be queued
            if isinstance(error, WorkerLost) and worker.state != "down":
                router.fleet.failed(worker, str(error))
            log.info("%s: no KV from prefill worker %s (%s)", self.id, worker.name, error)
            router.counters.prefills_lost += 1
        return partial(self._on, Event.TICKET)

    def _prefill_request_to(self, worker: Worker) -> bytes:
        id = prefill_name(self.id)
        body = prefill_body(self.request.body, id, named=self.info.request_id is not None)
        return self.router.forwarder.request_to(worker, self.request, self.tenant, id, body, PREFILL_LINE, part=True)

    def _connect(self, *, fresh: bool = False) -> None:
        self.overtaken = False
        self._upstream = None if fresh else self.router.fleet.pool(self._placed_at.worker).take()
        if self._upstream is not None:
            return self._use_connection()
        return self._wait_for(self._connected)

    async def _connected(self) -> Callable[[], None]:
        try:
            self._upstream = await self.router.fleet.pool(self._placed_at.worker).connect()
        except WorkerLost as error:
            return partial(self._attempt_ended, Lost(str(error)))
        return self._use_connection

    def _use_connection(self) -> None:
        upstream, worker = self._upstream, self._placed_at.worker
        if worker.kind != "unknown" or upstream is None:
            return self._on(Event.CONNECTED)
        # The worker was removed after it was chosen; another kind of server may answer at its address now.
        self._upstream = None
        upstream.drop()
        return self._attempt_ended(Lost("the worker was removed"))

    def _end_former(self) -> None:
        retry_state = self._retry_state
        assert retry_state.left_behind is not None
        self._wait_for(partial(self._former_ended, retry_state.left_behind))

    async def _former_ended(self, worker: Worker) -> Callable[[], None]:
        await end_former(self.router.worker_calls, worker, self.id, self.tenant, self.request.head.headers)
        return partial(self._on, Event.FORMER_ENDED)

    # -- attempts -------------------------------------------------------------------------

    @property
    def _placed_at(self) -> Placement:
        assert self._placement is not None
        return self._placement

    def _send(self) -> None:
        router, placement = self.router, self._placed_at
        request = self._request_for(placement.worker)
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        now_s, floor = router.loop.time(), router.fleet.floor_version
        self.attempt = attempt = Attempt(self, placement, router.read_whole, upstream, now_s, floor)
        upstream.send(request, attempt)
        if self.full:
            upstream.hold()

    def _request_for(self, worker: Worker) -> bytes:
        body, part, forward = self.request.body, False, self.router.forwarder.request_to
        if worker.kind != "headgate":
            return forward(worker, self.request, self.tenant, self.id, body)
        if self.moves or self.choice_ends:
            body = self._from_where_it_is(body)
            part = body is not self.request.body
        if self.info.deadline_ms is not None and (left_s := self.left_s) is not None:
            body = splice(body, "deadline_ms", b"%.3f" % max(1000 * left_s, 0.001))
        if self._ticket is not None:
            body = splice(body, "kv_ticket", self._ticket)
        more = b"%b: %d\r\n" % (RAW_HEADER, self.created)
        if self.retry_state is not None and self.retry_state.must_recompute(worker):
            more += RECOMPUTE
        return forward(worker, self.request, self.tenant, self.id, body, more, part=part)

    def _from_where_it_is(self, body: bytes) -> bytes:
        """Return the body that makes a worker resume the answer."""
        if not self.info.stream and self.info.logprobs:
            # The journal has no log-probabilities, so the answer starts again; the client has received none of it.
            self.journal = Journal()
        ends = self.choice_ends if self.journal.choices or is_resumable(self.request.path) else NO_ENDS
        if not self.journal.choices and not ends:
            return body
        return splice(body, "resume", self.journal.resume(streamed=self.info.stream, ends=ends))

    def _leave_prefill(self) -> None:
        prefill, self.prefill_request, self._ticket = self.prefill_request, None, None
        if prefill is not None:
            prefill.leave()

    def _drop(self) -> None:
        """Abandon the attempt, or the preparation of one."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.leave()
        if self.prefill_request is not None:
            self._leave_prefill()
        placement, self._placement = self._placement, None
        if placement is None:
            return
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            self.router.fleet.pool(placement.worker).give(upstream)
        placement.give_back()

    def _undo(self) -> None:
        """Revoke the placement, because the fleet was paused before the request was sent."""
        self._stop_waiting()
        placement = self._placed_at
        self._drop()
        placement.undo()

    def _stop_waiting(self) -> None:
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def _count_move(self) -> None:
        assert self.last_attempt is not None
        self.moves += 1
        self.departures += (departure(*self.last_attempt, self.router.loop.time() - self.began_s),)
        self.router.counters.count_move(resumed=bool(self.journal.choices))

    # -- deadlines and ends -----------------------------------------------------------------

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, negative after it; None if there is none, or one that workers refuse."""
        due_ms = self.info.deadline_ms
        if due_ms is None or not 0 < due_ms <= LONGEST_MS:
            return None
        return self.began_s + due_ms / 1000 - self.router.loop.time()

    def _start_grace(self) -> None:
        self.graces += 1
        self._timer = self.router.loop.call_later(DEADLINE_GRACE_S, self._on, Event.DEADLINE)

    def _give_up(self) -> None:
        assert self.attempt is not None
        self.attempt.fail("it did not end a request at its deadline")

    def _set_cause(self, cause: str) -> None:
        if self.cause is None and not self.over:
            self.cause = cause

    def _late(self) -> None:
        if self.cause is None:
            self.cause = DEADLINE

    def _paused(self) -> None:
        if self.cause is None:
            self.cause = PAUSE

    def _render(self) -> None:
        """Ask a worker to turn the token ids of the answer into text.

        The worker gets a request to resume a journal in which all choices have ended.
        """
        self._stop_waiting()
        self._drop()
        self.moves = max(self.moves, 1)
        if self._timer is not None:
            self._timer.cancel()
        time_s, left_s = RENDER_S, self.left_s
        if left_s is not None:
            time_s = min(time_s, max(left_s, 0.0) + DEADLINE_GRACE_S)
        self._timer = self.router.loop.call_later(time_s, self._on, Event.DEADLINE)
        self._render_again()

    def _render_again(self) -> None:
        assert self.cause is not None
        self.journal.end(min(self.info.n, MOST_CHOICES), self.cause)
        self._placement = self.router.choose(self, self._retry_state)
        if self._placement is None:
            return self._on(Event.NO_WORKER)
        return self._connect()


ACTIONS: Final[Mapping[Action, Callable[[Exchange], None]]] = {
    Action.ADMIT: Exchange._admit,
    Action.PLACE: Exchange._place,
    Action.PREFILL: Exchange._prefill,
    Action.CONNECT: Exchange._connect,
    Action.CONNECT_FRESH: partial(Exchange._connect, fresh=True),
    Action.SEND: Exchange._send,
    Action.UNDO: Exchange._undo,
    Action.DROP: Exchange._drop,
    Action.COUNT_MOVE: Exchange._count_move,
    Action.END_FORMER: Exchange._end_former,
    Action.START_GRACE: Exchange._start_grace,
    Action.GIVE_UP: Exchange._give_up,
    Action.END_BY_PAUSE: Exchange._paused,
    Action.END_BY_DEADLINE: Exchange._late,
    Action.RENDER: Exchange._render,
    Action.RENDER_AGAIN: Exchange._render_again,
    Action.PASS_ON: reports.sending(reports.pass_on),
    Action.PASS_TEXT_ON: reports.sending(reports.pass_text_on),
    Action.REPORT_LAST: reports.sending(reports.report_last),
    Action.REPORT_END: reports.sending(reports.report_end),
    Action.REPORT_ERROR: reports.sending(reports.report_refusal),
    Action.REPORT_CLOSING: reports.sending(reports.report_closing),
}
