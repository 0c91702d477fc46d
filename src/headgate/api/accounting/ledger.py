"""The ledger: who is in, and what became of everyone who was.

A request is *admitted* (or refused, at once and with a reason), lives as an open `Record`, and is closed exactly once,
whichever way it leaves: all its choices finished, an error, or a client that went away. What is closed goes into the
metrics and into a bounded history.

A closed record is *settled* when its engines have said their last word of it, which for a client that went away comes a
step later. Then its `engine_tokens` are final, and the listeners (log, traces) hear of it. They count what engines made
for a choice: not what it was resumed with, but also what came after a stop string or after its client had gone. So all
records together have as many as the engines have told, as long as no engine dies with words that nobody has heard.

From the moment it is admitted a record can be asked to end. A choice that no engine has heard of yet is then ended when it
would have been sent to one.

Limits count choices, because each is a sequence in an engine: `limit` is what the engines run at once plus the queue. These
places are shared among tenants (`headgate.shares`): none of them can take the last ones while there may be others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakSet

from msgspec.structs import replace
from starlette.requests import ClientDisconnect

from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.engines import ChunkStream
from headgate.contract.errors import QueueFull
from headgate.contract.requests import ChoiceUsage, RequestEvent, UsageRecord
from headgate.edge.sharing import Sharing
from headgate.edge.sse import ClientGone, ResponseWriter
from headgate.errors import DuplicateId, EngineDead, RequestError, Unavailable
from headgate.protocol.output import Cause
from headgate.shares import Shares

log = logging.getLogger(__name__)

HISTORY = 10_000  # usage records kept for those who ask later
LONGEST_RETRY_S = 60
PROBE = "probe"  # the kind of a request that is made to see whether the engine answers
PREFILL = "prefill"  # the kind of a request that computes the prompt of another: no entry and no count of its own


class Past(NamedTuple):
    """A request that has ended, and when it arrived by the ledger's clock: wall clocks are set, and order nothing."""

    arrived_s: float
    usage: UsageRecord


Listener = Callable[[UsageRecord], None]
Key = tuple[str, str]  # tenant and label: what one tenant calls its requests is nothing to another


class Record:
    """One admitted request, while it lives: `async with ledger.admit(...) as record`."""

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
        "usage",
        "writer",
    )

    def __init__(
        self, ledger: Ledger, tenant: str, share: str, label: str, kind: str, choices: int, tags: Mapping[str, str]
    ) -> None:
        self.tenant = tenant
        self.share = share  # whose places it takes
        self.label = label
        self.kind = kind
        self.choices = choices
        self.tags = tags
        self.open = False
        self.accepted = False  # before a pause began, which governs it then also while no engine has it
        self.usage: UsageRecord | None = None  # when it has ended, unless it was refused after all
        self.writer: ResponseWriter | None = None  # in which it is told
        self.streams: dict[int, ChunkStream] = {}  # by choice, while an engine works on it
        self.events: list[RequestEvent] = []
        self.arrived = time.time()
        self.arrived_s = self.progress_s = ledger.clock()
        self.first_token_s: float | None = None  # after arrival
        self._ledger = ledger
        self._last_s: dict[int, float] = {}  # when each choice had its latest token
        self._prompts: dict[int, int] = {}  # tokens, by choice
        self._outputs: dict[int, int] = {}  # tokens so far, by choice
        self._resumed: dict[int, int] = {}  # tokens that were handed in, by choice
        self._finished: dict[int, ChoiceUsage] = {}
        self._begun: dict[int, ChunkStream] = {}  # every choice that an engine was to make
        self._asked: dict[int, Cause] = {}  # choices that shall end
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

    # -- its end, on request ------------------------------------------------------

    def begin(self, choice: int, stream: ChunkStream) -> None:
        """An engine is about to make `choice`, unless its end has been asked for already."""
        self.streams[choice] = self._begun[choice] = stream
        if (cause := self._asked.get(choice)) is not None:
            stream.end(cause)
        else:
            self.note("running", choice)

    def ask_end(self, cause: Cause, choice: int | None = None) -> list[ChunkStream]:
        """Have all choices end, or one; the streams that are to be told so. The others hear it when they begin."""
        choices = range(self.choices) if choice is None else (choice,)
        unfinished = [i for i in choices if i not in self._finished]
        if any(i not in self._asked for i in unfinished):
            self.note("end_asked", choice)
        for i in unfinished:
            self._asked.setdefault(i, cause)
        return [self.streams[i] for i in unfinished if i in self.streams]

    def end_unplaced(self, cause: Cause) -> bool:
        """Have the choices end that no engine has; whether there are any."""
        placed = {i for i, stream in self.streams.items() if stream.place is not None}
        unplaced = [i for i in range(self.choices) if i not in placed and i not in self._finished]
        for stream in [stream for i in unplaced for stream in self.ask_end(cause, i)]:
            stream.end(cause)
        return bool(unplaced)

    def client_left(self, cause: Cause) -> None:
        """What has not finished is cut now, under this name unless its end was asked for before."""
        for i in range(self.choices):
            if i not in self._finished:
                why = self._asked.setdefault(i, cause)
                self._finished[i] = self._cut(i, "abort", why)
                self._resumed.pop(i, None)  # no part of these counts
                if i in self.streams:
                    self.streams[i].cause = why
        self._wake()

    async def ended(self, choice: int | None = None) -> None:
        """Wait until the request is closed, or until that choice has had its terminal output."""
        while self.open and choice not in self._finished:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def outcome(self, choice: int | None = None) -> ChoiceUsage | UsageRecord | None:
        """What became of it, or of that choice; None while that is not known, and if it was refused."""
        if choice is None:
            return self.usage
        return self._finished.get(choice) or (self.usage.choices[choice] if self.usage else None)

    @property
    def output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(self._outputs.values())

    def outputs(self, choice: int) -> int:
        """Tokens so far."""
        return self._outputs.get(choice, 0)

    def has_finished(self, choice: int) -> bool:
        return choice in self._finished

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- what happens to it -------------------------------------------------------

    def prompt(self, count: int, choice: int = 0) -> None:
        """The prompt of `choice` goes to an engine now; it counts even if no terminal output is ever heard."""
        self._prompts[choice] = count

    def resume(self, choice: int, count: int) -> None:
        """`count` tokens of the answer were handed in with the request: no counter moves by them."""
        self._resumed[choice] = count

    @property
    def handed_in(self) -> int:
        """Tokens of its usage that were handed in; a choice that was cut has only those that have come."""
        ended = {choice: usage.output_tokens for choice, usage in self._finished.items()}
        return sum(min(count, ended.get(choice, 0)) for choice, count in self._resumed.items())

    def first_token(self) -> None:
        """The first token of any choice has come; said again, it changes nothing."""
        if self.first_token_s is None:
            self.first_token_s = self._ledger.clock() - self.arrived_s
            self._ledger.metrics.first_token.observe(self.first_token_s)
            self.note("first_token")

    def tokens(self, count: int, choice: int = 0) -> None:
        """`count` tokens of `choice` have come in one chunk."""
        if not count:
            return
        now_s, before_s = self._ledger.clock(), self._last_s.get(choice)
        if before_s is None:
            self.first_token()
        else:
            self._ledger.metrics.between_tokens.observe((now_s - before_s) / count, count)
        self._last_s[choice] = self.progress_s = now_s
        self._outputs[choice] = self._outputs.get(choice, 0) + count

    def finish(
        self,
        choice: int,
        finish_reason: str,
        cause: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        """The terminal output of `choice`; the first one counts."""
        if choice in self._finished:
            return
        usage = ChoiceUsage(choice, finish_reason, cause, prompt_tokens, cached_tokens, output_tokens)
        self._finished[choice] = usage
        self.streams.pop(choice, None)
        self.note("finished", choice)
        self._wake()

    def usages(self, reason: str, cause: str) -> tuple[ChoiceUsage, ...]:
        """Every choice, those without a terminal output as cut for `reason` and `cause`."""
        return tuple(self._finished.get(i) or self._cut(i, reason, cause) for i in range(self.choices))

    def _cut(self, choice: int, reason: str, cause: str) -> ChoiceUsage:
        tokens = self._prompts.get(choice, 0), 0, self._outputs.get(choice, 0)
        return ChoiceUsage(choice, reason, cause, *tokens)

    @property
    def finished(self) -> bool:
        return len(self._finished) >= self.choices

    @property
    def completed(self) -> bool:
        """Every choice has ended by itself, not because it was cut."""
        return self.finished and not any(c.finish_reason in ("abort", "error") for c in self._finished.values())

    @property
    def begun_anywhere(self) -> bool:
        """Some choice of it has, or may have, been begun by an engine."""
        working = any(stream.made or not stream.settled for stream in self._begun.values())
        return working or bool(self._outputs or self._finished)

    @property
    def unsettled(self) -> list[ChunkStream]:
        return [stream for stream in self._begun.values() if not stream.settled]

    def made(self, choice: int) -> int:
        """Tokens that engines have told of it so far."""
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
        self.unsettled: set[Record] = set()  # closed, but an engine is still to say how many tokens it made
        self._listeners = listeners
        self._history: OrderedDict[Key, Past] = OrderedDict()
        self._tenants: dict[str, None] = {}  # that were ever in: no more than there are keys
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
    ) -> Record:
        """A place for a request, taken on entering it. `label` is the client's name for it, or one is made up."""
        named = label or f"req-{secrets.token_hex(16)}"
        return Record(self, tenant, tenant if share is None else share, named, kind, choices, tags or {})

    @property
    def limit(self) -> int:
        return self._places.total

    @property
    def in_flight(self) -> int:
        """Choices."""
        return self._places.taken

    def close(self) -> None:
        """Refuse everyone from now on."""
        self.closing = True

    async def emptied(self) -> None:
        """Wait until nobody is in."""
        await self._empty.wait()

    def named(self, label: str, tenant: str | None = None) -> list[Record]:
        """The live request of that name: one tenant's, or, without a tenant, those of all of them."""
        return [record for key in self._keys(label, tenant) if (record := self.live.get(key))]

    def past(self, label: str, tenant: str | None = None) -> Past | None:
        """What became of the latest request of that name, one tenant's or anybody's, if it is not too long ago."""
        found = [past for key in self._keys(label, tenant) if (past := self._history.get(key))]
        return max(found, key=lambda past: past.arrived_s, default=None)

    def _keys(self, label: str, tenant: str | None) -> list[Key]:
        return [(name, label) for name in (self._tenants if tenant is None else (tenant,))]

    def refuse(self, error: RequestError) -> None:
        """Count a refusal, once: who answers it hears of what was refused here, too."""
        if error not in self._counted:
            self._counted.add(error)
            self.metrics.refused[error.code] += 1

    @property
    def oldest_without_progress_s(self) -> float:
        """How long the request that has waited longest has waited for its next token."""
        return max((self.clock() - record.progress_s for record in self.live.values()), default=0.0)

    # -- in and out -------------------------------------------------------------

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
            raise Unavailable("the server is shutting down; ask another one", code="shutting_down")
        if record.key in self.live:
            raise DuplicateId(f"a request with the id {record.label!r} is still running", param="request_id")
        if record.kind != PROBE:
            self.sharing.takes(record.share)
        self.check_place(record.share, record.choices)

    def check_place(self, share: str, choices: int) -> None:
        """Refuse unless `share` may take that many places."""
        if not self._places.may_take(share, choices, several=self.sharing.several):
            raise QueueFull(self._why_full(share, choices), self._retry_after_s(choices))

    def _why_full(self, share: str, choices: int) -> str:
        if self.in_flight + choices > self.limit:
            return f"the queue is full: {self.in_flight} of {self.limit} places are taken; try again later"
        held = self._places.held[share]
        return f"you have {held} of {self.limit} places, and the rest is kept for others; try again later"

    def _retry_after_s(self, choices: int) -> int:
        """When that many places should be free, if requests go on ending as quickly as of late."""
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
        if isinstance(error, RequestError) and not record.begun_anywhere:
            self.refuse(error)  # by an engine, or because it could not be understood
            log.debug("%s: refused: %s", record.label, error)
            return
        record.usage = _usage(record, error, record.age_s)
        self._account(record, record.usage)
        self._remember(record)
        self._await_last_words(record)

    def _await_last_words(self, record: Record) -> None:
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
        if past is not None and past.usage is before:  # and not a later request of that name
            self._history[record.key] = Past(record.arrived_s, record.usage)
        for listener in self._listeners:
            listener(record.usage)

    def _account(self, record: Record, usage: UsageRecord) -> None:
        if usage.kind == PREFILL:
            return  # the request is counted where it is answered
        metrics = self.metrics
        metrics.requests[usage.finish_reason, usage.cause] += 1
        metrics.whole_request.observe(usage.elapsed_s)
        for choice in usage.choices:
            if choice.finish_reason == "abort":
                metrics.aborts[choice.cause] += 1
        metrics.tokens["prompt"] += usage.prompt_tokens
        metrics.tokens["cached"] += usage.cached_tokens
        metrics.tokens["output"] += usage.output_tokens - record.handed_in

    def _remember(self, record: Record) -> None:
        assert record.usage is not None
        self._history[record.key] = Past(record.arrived_s, record.usage)
        self._history.move_to_end(record.key)
        while len(self._history) > self._longest:
            self._history.popitem(last=False)


def _usage(record: Record, error: BaseException | None, elapsed_s: float) -> UsageRecord:
    choices = record.usages(*_why_cut(error))
    # One that was cut says more about the request than those that were not.
    telling = next((c for c in choices if c.finish_reason in ("abort", "error")), choices[-1])
    return UsageRecord(
        request_id=record.label,
        tenant=record.tenant,
        kind=record.kind,
        finish_reason=telling.finish_reason,
        cause=telling.cause,
        arrived=record.arrived,
        first_token_s=record.first_token_s,
        elapsed_s=elapsed_s,
        choices=choices,
        tags=record.tags,
        events=tuple(record.events),
    )


def _with_engine_tokens(record: Record) -> UsageRecord:
    assert record.usage is not None
    choices = [replace(choice, engine_tokens=record.made(choice.choice)) for choice in record.usage.choices]
    return replace(record.usage, choices=tuple(choices))


def _why_cut(error: BaseException | None) -> tuple[str, str]:
    """Finish reason and cause of choices that never had a terminal output."""
    match error:
        case BaseExceptionGroup():
            return _why_cut(error.exceptions[0])
        case EngineDead():
            return "abort", "engine_lost"
        case RequestError():
            return "error", error.code
        # Leaving is how a handler ends when its client does.
        case None | asyncio.CancelledError() | GeneratorExit() | ClientDisconnect() | ClientGone() | OSError():
            return "abort", "client_disconnect"
    return "error", "internal_error"
