"""The ledger: the requests in flight, and the outcomes of those that have ended.

A request is *admitted* or refused at once with a reason. It is an open `Record` while it runs, and is closed exactly once,
however it ends: all choices finished, an error, or a client that disconnected. Closed records go into the metrics and into
a bounded history.

A closed record is *settled* when its engines have sent their last output for it; after a disconnection this is one step
later. Its `engine_tokens` are then final, and the listeners (log, traces) are called. `engine_tokens` counts the tokens
that engines generated for a choice: without those it was resumed with, but with those after a stop string or after the
disconnection. The sum over all records equals the number of tokens that the engines sent, unless an engine dies with
output that was not received.

A record can be asked to end from the moment it is admitted. A choice that has not been sent to an engine yet ends when it
would be sent.

Limits count choices, because each is a sequence in an engine: `limit` is the number that the engines run at once plus the
queue. Tenants share these places (`headgate.shares`): no tenant can take the last ones while there may be others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakSet

from msgspec.structs import replace
from starlette.requests import ClientDisconnect

from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.engines import ChunkStream
from headgate.contract.errors import QueueFull
from headgate.contract.requests import ChoiceUsage, RequestEvent, UsageRecord
from headgate.contract.trace_context import TraceContext
from headgate.edge.sharing import Sharing
from headgate.edge.sse import ClientGone, ResponseWriter
from headgate.errors import DuplicateId, EngineDead, RequestError, Unavailable
from headgate.protocol.output import Cause
from headgate.shares import Shares

log = logging.getLogger(__name__)

HISTORY = 10_000  # usage records that are kept after the end of a request
LONGEST_RETRY_S = 60
NO_TRACE = TraceContext()
PROBE = "probe"  # the kind of a request that checks whether the engines respond
PREFILL = (
    "prefill"  # the kind of a request that computes the prompt of another one; it is not listed or counted itself
)


class Past(NamedTuple):
    """A request that has ended, with its arrival by the ledger's clock: wall clocks are adjusted, so they give no order."""

    arrived_s: float
    usage: UsageRecord


Listener = Callable[[UsageRecord], None]
Key = tuple[str, str]  # tenant and label (the request id of the client); two tenants may use the same label


class Record:
    """One admitted request while it runs: `async with ledger.admit(...) as record`."""

    __slots__ = (
        "_asked",
        "_begun",
        "_finished",
        "_last_s",
        "_ledger",
        "_outputs",
        "_prompts",
        "_resumed",
        "_waiters",
        "accepted",
        "arrived",
        "arrived_s",
        "choices",
        "events",
        "first_token_s",
        "kind",
        "label",
        "open",
        "progress_s",
        "share",
        "streams",
        "tags",
        "tenant",
        "trace",
        "usage",
        "writer",
    )

    def __init__(
        self,
        ledger: Ledger,
        tenant: str,
        share: str,
        label: str,
        kind: str,
        choices: int,
        tags: Mapping[str, str],
        trace: TraceContext,
    ) -> None:
        self.tenant = tenant
        self.share = share  # name of the party whose share it uses (`edge/sharing.py`)
        self.label = label
        self.kind = kind
        self.choices = choices
        self.tags = tags
        self.trace = trace
        self.open = False
        # Whether it was admitted before the current pause, which then applies to it even if no engine has it yet.
        self.accepted = False
        self.usage: UsageRecord | None = None  # set at the end, unless the request was refused after its admission
        self.writer: ResponseWriter | None = None  # writes the response
        self.streams: dict[int, ChunkStream] = {}  # by choice, until it finishes
        self.events: list[RequestEvent] = []
        self.arrived = time.time()
        self.arrived_s = self.progress_s = ledger.clock()
        self.first_token_s: float | None = None  # since arrival
        self._ledger = ledger
        self._last_s: dict[int, float] = {}  # time of the latest token, by choice
        self._prompts: dict[int, int] = {}  # tokens, by choice
        self._outputs: dict[int, int] = {}  # tokens so far, by choice
        self._resumed: dict[int, int] = {}  # tokens that the request supplied, by choice
        self._finished: dict[int, ChoiceUsage] = {}
        self._begun: dict[int, ChunkStream] = {}  # every choice that was passed to the engines
        self._asked: dict[int, Cause] = {}  # choices that were asked to end
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        tokens = sum(self._outputs.values())
        return f"<Record {self.label}: {len(self._finished)}/{self.choices} choices finished, {tokens} tokens>"

    async def __aenter__(self) -> Self:
        self._ledger._open(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger._close(self, error)
        self._wake()

    @property
    def key(self) -> Key:
        return self.tenant, self.label

    @property
    def age_s(self) -> float:
        return self._ledger.clock() - self.arrived_s

    def note(self, event: str, choice: int | None = None) -> None:
        self.events.append(RequestEvent(event, round(self.age_s, 6), choice))

    # -- ending on request --------------------------------------------------------

    def begin(self, choice: int, stream: ChunkStream) -> None:
        """`choice` is passed to an engine, or ends if it was asked to end already."""
        self.streams[choice] = self._begun[choice] = stream
        if (cause := self._asked.get(choice)) is not None:
            stream.end(cause)
        else:
            self.note("running", choice)

    def ask_end(self, cause: Cause, choice: int | None = None) -> list[ChunkStream]:
        """Ask all choices, or one, to end. Returns the streams that the caller must end; other choices end in `begin`."""
        choices = range(self.choices) if choice is None else (choice,)
        unfinished = [i for i in choices if i not in self._finished]
        if any(i not in self._asked for i in unfinished):
            self.note("end_asked", choice)
        for i in unfinished:
            self._asked.setdefault(i, cause)
        return [self.streams[i] for i in unfinished if i in self.streams]

    def asked_to_end(self, choice: int) -> Cause | None:
        """Why `choice` was asked to end; None if it was not."""
        return self._asked.get(choice)

    def end_unplaced(self, cause: Cause) -> bool:
        """End the choices that no engine has. Returns whether there are any."""
        placed = {i for i, stream in self.streams.items() if stream.place is not None}
        unplaced = [i for i in range(self.choices) if i not in placed and i not in self._finished]
        for stream in [stream for i in unplaced for stream in self.ask_end(cause, i)]:
            stream.end(cause)
        return bool(unplaced)

    def client_left(self, cause: Cause) -> None:
        """End all unfinished choices now, with `cause` unless they were asked to end for another cause before."""
        for i in range(self.choices):
            if i not in self._finished:
                why = self._asked.setdefault(i, cause)
                self._finished[i] = self._cut(i, "abort", why)
                self._resumed.pop(i, None)  # the counts of a cut choice do not include resumed tokens
                if i in self.streams:
                    self.streams[i].cause = why
        self._wake()

    async def ended(self, choice: int | None = None) -> None:
        """Wait until the request is closed, or until `choice` has had its terminal output."""
        while self.open and choice not in self._finished:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def outcome(self, choice: int | None = None) -> ChoiceUsage | UsageRecord | None:
        """The outcome of the request or of `choice`; None while it is unknown, and if the request was refused."""
        if choice is None:
            return self.usage
        return self._finished.get(choice) or (self.usage.choices[choice] if self.usage else None)

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(self._outputs.values())

    def outputs(self, choice: int) -> int:
        return self._outputs.get(choice, 0)

    def has_finished(self, choice: int) -> bool:
        return choice in self._finished

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- progress -----------------------------------------------------------------

    def prompt(self, count: int, choice: int = 0) -> None:
        """The prompt of `choice` is sent to an engine; it counts even if no terminal output follows."""
        self._prompts[choice] = count

    def resume(self, choice: int, count: int) -> None:
        """The request supplied `count` tokens of the answer; metrics do not count them."""
        self._resumed[choice] = count

    @property
    def resumed_tokens(self) -> int:
        """Tokens of the usage that the request supplied; a choice that was cut has at most its delivered tokens."""
        ended = {choice: usage.output_tokens for choice, usage in self._finished.items()}
        return sum(min(count, ended.get(choice, 0)) for choice, count in self._resumed.items())

    def first_token(self) -> None:
        """Record the first token of any choice. Later calls have no effect."""
        if self.first_token_s is None:
            self.first_token_s = self._ledger.clock() - self.arrived_s
            self._ledger.metrics.first_token.observe(self.first_token_s)
            self.note("first_token")

    def tokens(self, count: int, choice: int = 0) -> None:
        """Record `count` tokens of `choice` from one chunk."""
        if not count:
            return
        now_s, before_s = self._ledger.clock(), self._last_s.get(choice)
        if before_s is None:
            self.first_token()
        else:
            self._ledger.metrics.between_tokens.observe((now_s - before_s) / count, count)
        self._last_s[choice] = self.progress_s = now_s
        self._outputs[choice] = self._outputs.get(choice, 0) + count
        self._ledger.metrics.received_tokens += count

    def finish(
        self,
        choice: int,
        finish_reason: str,
        cause: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        """Record the terminal output of `choice`; only the first one counts."""
        if choice in self._finished:
            return
        usage = ChoiceUsage(choice, finish_reason, cause, prompt_tokens, cached_tokens, output_tokens)
        self._finished[choice] = usage
        self.streams.pop(choice, None)
        self.note("finished", choice)
        self._wake()

    def usages(self, reason: str, cause: str) -> tuple[ChoiceUsage, ...]:
        """The usage of every choice; those without a terminal output were cut for `reason` and `cause`."""
        return tuple(self._finished.get(i) or self._cut(i, reason, cause) for i in range(self.choices))

    def _cut(self, choice: int, reason: str, cause: str) -> ChoiceUsage:
        tokens = self._prompts.get(choice, 0), 0, self._outputs.get(choice, 0)
        return ChoiceUsage(choice, reason, cause, *tokens)

    @property
    def finished(self) -> bool:
        return len(self._finished) >= self.choices

    @property
    def completed(self) -> bool:
        """Whether every choice has finished without being cut."""
        return self.finished and not any(c.finish_reason in ("abort", "error") for c in self._finished.values())

    @property
    def begun(self) -> bool:
        """Whether an engine has, or may have, started a choice."""
        working = any(stream.made or not stream.settled for stream in self._begun.values())
        return working or bool(self._outputs or self._finished)

    @property
    def unsettled(self) -> list[ChunkStream]:
        return [stream for stream in self._begun.values() if not stream.settled]

    def made(self, choice: int) -> int:
        """Tokens that engines have generated for `choice` so far."""
        return self._begun[choice].made if choice in self._begun else 0


class Ledger:
    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        limit: int,
        sharing: Sharing | None = None,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.perf_counter,
        history: int = HISTORY,
    ) -> None:
        self.metrics = metrics
        self.sharing = sharing or Sharing()
        self.clock = clock
        self._places = Shares(limit)
        self.closing = False
        self.live: dict[Key, Record] = {}
        self.unsettled: set[Record] = set()  # closed, but an engine has not sent its last output yet
        self._listeners = listeners
        self._history: OrderedDict[Key, Past] = OrderedDict()
        self._tenants: dict[str, None] = {}  # tenants of all requests so far; bounded by the number of keys
        self._counted: WeakSet[Exception] = WeakSet()  # refusals
        self._longest = history
        self._ends_s: deque[float] = deque(maxlen=64)
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Ledger {len(self.live)} requests, {self.in_flight}/{self.limit} choices>"

    def admit(
        self,
        *,
        tenant: str = "",
        share: str | None = None,
        label: str | None = None,
        kind: str,
        choices: int = 1,
        tags: Mapping[str, str] | None = None,
        trace: TraceContext = NO_TRACE,
    ) -> Record:
        """Return a record for a request. Entering it as a context counts its choices against `limit`, or raises.

        `label` is the id that the client chose; without one, an id is generated.
        """
        named = label or f"req-{secrets.token_hex(16)}"
        return Record(self, tenant, tenant if share is None else share, named, kind, choices, tags or {}, trace)

    @property
    def limit(self) -> int:
        return self._places.total

    @property
    def in_flight(self) -> int:
        """The number of choices in flight."""
        return self._places.taken

    def close(self) -> None:
        """Refuse all requests from now on."""
        self.closing = True

    async def emptied(self) -> None:
        """Wait until no request is in flight."""
        await self._empty.wait()

    def named(self, label: str, tenant: str | None = None) -> list[Record]:
        """The live requests with this label, of one tenant or of all tenants."""
        return [record for key in self._keys(label, tenant) if (record := self.live.get(key))]

    def past(self, label: str, tenant: str | None = None) -> Past | None:
        """The latest ended request with this label, of one tenant or of all tenants, if it is still in the history."""
        found = [past for key in self._keys(label, tenant) if (past := self._history.get(key))]
        return max(found, key=lambda past: past.arrived_s, default=None)

    def latest(self) -> Iterator[Past]:
        """The ended requests that are still in the history, latest first."""
        return reversed(self._history.values())

    def _keys(self, label: str, tenant: str | None) -> list[Key]:
        return [(name, label) for name in (self._tenants if tenant is None else (tenant,))]

    def refuse(self, error: RequestError) -> None:
        """Count a refusal once: the gate also reports refusals that the ledger has counted already."""
        if error not in self._counted:
            self._counted.add(error)
            self.metrics.refused[error.code] += 1

    @property
    def oldest_without_progress_s(self) -> float:
        """The longest time that a live request has been waiting for its next token."""
        return max((self.clock() - record.progress_s for record in self.live.values()), default=0.0)

    # -- opening and closing ----------------------------------------------------

    def _open(self, record: Record) -> None:
        try:
            self._check(record)
        except RequestError as error:
            self.refuse(error)
            raise
        self._tenants[record.tenant] = None
        self.live[record.key] = record
        record.open = True
        record.note("accepted")
        self._places.take(record.share, record.choices)
        self._empty.clear()
        log.debug("%s: accepted (%s, %d choices)", record.label, record.kind, record.choices)

    def _check(self, record: Record) -> None:
        if self.closing:
            raise Unavailable("the server is shutting down; use another one", code="shutting_down")
        if record.key in self.live:
            raise DuplicateId(f"a request with the id {record.label!r} is still running", param="request_id")
        if record.kind != PROBE:
            self.sharing.takes(record.share)
        self.check_place(record.share, record.choices)

    def check_place(self, share: str, choices: int) -> None:
        """Refuse unless `share` may take this many places."""
        if not self._places.may_take(share, choices, several=self.sharing.several):
            raise QueueFull(self._why_full(share, choices), self._retry_after_s(choices))

    def _why_full(self, share: str, choices: int) -> str:
        if self.in_flight + choices > self.limit:
            return f"the queue is full: {self.in_flight} of {self.limit} places are taken; try again later"
        held = self._places.held[share]
        return f"you have {held} of {self.limit} places, and the rest is reserved for others; try again later"

    def _retry_after_s(self, choices: int) -> int:
        """The time until this many places are free, at the rate at which requests have ended recently."""
        if len(self._ends_s) < 2:
            return 1
        each_s = (self.clock() - self._ends_s[0]) / len(self._ends_s)
        return min(max(math.ceil(each_s * choices), 1), LONGEST_RETRY_S)

    def _close(self, record: Record, error: BaseException | None) -> None:
        del self.live[record.key]
        record.open = False
        self._places.give_back(record.share, record.choices)
        if not self.live:
            self._empty.set()
        self._ends_s.append(self.clock())
        if isinstance(error, RequestError) and not record.begun:
            self.refuse(error)  # by an engine, or because the request was invalid
            log.debug("%s: refused: %s", record.label, error)
            return
        record.usage = _usage(record, error, record.age_s)
        self._account(record, record.usage)
        self._remember(record)
        self._await_settlement(record)

    def _await_settlement(self, record: Record) -> None:
        self.unsettled.add(record)
        for stream in record.unsettled:
            stream.when_settled(lambda: self._settle(record))
        self._settle(record)

    def _settle(self, record: Record) -> None:
        if record.unsettled:
            return
        self.unsettled.discard(record)
        before, record.usage = record.usage, _with_engine_tokens(record)
        if made := record.usage.engine_tokens:
            self.metrics.tokens["engine"] += made
        past = self._history.get(record.key)
        if past is not None and past.usage is before:  # otherwise a later request has the same label
            self._history[record.key] = Past(record.arrived_s, record.usage)
        for listener in self._listeners:
            listener(record.usage)

    def _account(self, record: Record, usage: UsageRecord) -> None:
        if usage.kind == PREFILL:
            return  # the server that answers the request counts it
        metrics = self.metrics
        metrics.requests[usage.finish_reason, usage.cause] += 1
        metrics.whole_request.observe(usage.elapsed_s)
        for choice in usage.choices:
            if choice.finish_reason == "abort":
                metrics.aborts[choice.cause] += 1
        metrics.tokens["prompt"] += usage.prompt_tokens
        metrics.tokens["cached"] += usage.cached_tokens
        metrics.tokens["output"] += usage.output_tokens - record.resumed_tokens

    def _remember(self, record: Record) -> None:
        assert record.usage is not None
        self._history[record.key] = Past(record.arrived_s, record.usage)
        self._history.move_to_end(record.key)
        while len(self._history) > self._longest:
            self._history.popitem(last=False)


def _usage(record: Record, error: BaseException | None, elapsed_s: float) -> UsageRecord:
    choices = record.usages(*_why_cut(error))
    # If a choice was cut, the request has its finish reason.
    decisive = next((c for c in choices if c.finish_reason in ("abort", "error")), choices[-1])
    return UsageRecord(
        request_id=record.label,
        tenant=record.tenant,
        kind=record.kind,
        finish_reason=decisive.finish_reason,
        cause=decisive.cause,
        arrived=record.arrived,
        first_token_s=record.first_token_s,
        elapsed_s=elapsed_s,
        choices=choices,
        tags=record.tags,
        events=tuple(record.events),
        traceparent=record.trace.parent,
        tracestate=record.trace.state,
    )


def _with_engine_tokens(record: Record) -> UsageRecord:
    assert record.usage is not None
    choices = [replace(choice, engine_tokens=record.made(choice.choice)) for choice in record.usage.choices]
    return replace(record.usage, choices=tuple(choices))


def _why_cut(error: BaseException | None) -> tuple[str, str]:
    """The finish reason and cause of choices without a terminal output."""
    match error:
        case BaseExceptionGroup():
            return _why_cut(error.exceptions[0])
        case EngineDead():
            return "abort", "engine_lost"
        case RequestError():
            return "error", error.code
        # A handler ends with one of these when its client disconnects.
        case None | asyncio.CancelledError() | GeneratorExit() | ClientDisconnect() | ClientGone() | OSError():
            return "abort", "client_disconnect"
    return "error", "internal_error"
