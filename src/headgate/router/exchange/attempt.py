"""One worker's try at a request: its answer is read, passed on, and judged by how it ended.

Bytes pass from the worker's connection to the client's in a single call, unread but for a look at their last characters,
because only whole events are passed on. What is needed to go on elsewhere goes into the journal.

    Answered    a whole answer that the client has not seen
    Streamed    the client has it all
    Veiled      the worker ended it for its own reasons (pause, shutdown, no room)
    Lost        the worker died, or spoke nonsense, or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from headgate.contract.journal import (
    BOUND,
    DATA,
    RAW_HEADER,
    RESCHEDULED,
    TOKENS,
    WITHHELD,
    failed_with,
    first_version,
    last_data,
    safe_end,
    split_withheld,
    withheld_ends,
)
from headgate.router.data_path.fast_path import EventPipe, ReadWhole
from headgate.router.data_path.request_info import RequestInfo
from headgate.router.data_path.upstream import Headers, KnownHead, Upstream
from headgate.router.exchange.journal import Journal
from headgate.router.fleet.fleet import LoadShare
from headgate.router.fleet.worker import Worker

LONGEST_EVENT = 16 * 2**20
LONGEST_ANSWER = 256 * 2**20
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"transfer-encoding", b"chunked"),
]
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Of an answer these are ours to write.
ANSWER_OWN = HOP_BY_HOP | {b"content-length", b"x-request-id", RAW_HEADER, b"x-headgate-worker"}
JSON: Headers = [(b"content-type", b"application/json")]
DONE = b"data: [DONE]\n\n"
DONES = DONE, b"data: [DONE]\r\n\r\n"
REPLAYED = b"idempotent-replayed"  # the answer was kept for a key, and may be older than the fleet's weights
PAUSED = b'"code":"paused"'  # cannot stand inside a JSON string, which would escape its quotes


class Answered(msgspec.Struct, frozen=True, gc=False):  # one per request, and cheaper to make than a dataclass
    status: int
    headers: Headers
    body: bytes
    usage: tuple[int, int] | None = None  # tokens of the prompt, and those that were cached, if it is known already


class Streamed(msgspec.Struct, frozen=True, gc=False):
    tail: bytes = b""  # of an answer without a journal: its last events, where its usage is if it was told


@dataclass(frozen=True, slots=True)
class Withheld:
    rescheduled: bool  # by a worker that had no room for it
    ending: bytes
    cause: str = ""  # of the first choice that was ended; empty if the worker has ended none and reports an error


@dataclass(frozen=True, slots=True)
class Lost:
    why: str


Outcome = Answered | Streamed | Withheld | Lost


class Recipient(Protocol):
    """The request that an attempt is made for."""

    ask: RequestInfo
    journal: Journal
    moves: int  # attempts before this one
    told_raw: bool  # the client has a part of an answer that has no journal

    def begin_stream(self, worker: Worker, headers: Headers) -> None: ...

    def pass_events(self, events: bytes) -> None:
        """To the client, and into the journal."""

    def write_events(self, events: bytes) -> None:
        """To the client."""

    def pipe(self) -> EventPipe | None:
        """Takes plain events to the client without the attempt; None if the client does not read chunks."""

    def attempt_over(self, attempt: Attempt, outcome: Outcome) -> None: ...


class AnswerForm(Enum):
    """What an answer comes as."""

    __hash__ = object.__hash__  # of its identity; that of Enum is computed in Python

    WHOLE = auto()
    JOURNALLED = auto()  # a journal, and at its end the whole answer
    EVENTS = auto()  # with a journal among them
    FOREIGN_EVENTS = auto()


WHOLE = AnswerForm.WHOLE  # a global costs a tenth of what a member of an Enum does


class Attempt:
    """One worker's try. Reads the answer, passes it on, and tells its exchange how it ended, once."""

    __slots__ = (
        "_before",
        "_body",
        "_exchange",
        "_floor",
        "_form",
        "_headers",
        "_last",
        "_pipe",
        "_read_whole",
        "_size",
        "_tail",
        "_taken",
        "_veiled",
        "_vetted",
        "_whole",
        "given_up",
        "heard",
        "journalled",
        "last_s",
        "outcome",
        "status",
        "upstream",
        "worker",
    )

    def __init__(self, exchange: Recipient, taken: LoadShare, read_whole: ReadWhole) -> None:
        self._exchange = exchange
        self._read_whole = read_whole
        self._taken = taken
        self._headers: Headers = []
        self._form = WHOLE
        self._tail = b""  # of an event that has not come whole
        self._last = b""  # events that were passed on
        self._before = b""  # and those before them, of somebody else's stream
        self._veiled: list[bytes] = []
        self._vetted = False  # its first tokens are of the fleet's weights, or the answer is a kept one
        self._floor: int | None = None  # of the fleet's weights when it was asked
        self._pipe: EventPipe | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._whole: Answered | None = None  # that came at once
        self.status = 0  # until the head has come
        self.journalled = False
        self.given_up = False  # by us
        self.worker = taken.worker
        self.upstream: Upstream | None = None
        self.outcome: Outcome | None = None
        self.heard = False  # something, since the sweep last asked; to look at a clock each time would be felt
        self.last_s = 0.0  # when it was asked, or that was found

    # -- Reader ---------------------------------------------------------------------

    def head(self, status: int, headers: Headers) -> None:
        exchange = self._exchange
        self.status, self._headers = status, headers
        streams = False
        for name, value in headers:
            if name == b"content-type":
                streams = value.startswith(b"text/event-stream")
            elif name == RAW_HEADER:
                self.journalled = True
            elif name == REPLAYED:
                self._vetted = True
        if status != 200 or not streams:
            return
        if not exchange.ask.stream and self.journalled:
            self._form = AnswerForm.JOURNALLED
            return
        exchange.begin_stream(self.worker, STREAM_HEADERS if self.journalled else _streamed(headers))
        self._form = AnswerForm.EVENTS if self.journalled else AnswerForm.FOREIGN_EVENTS

    def data(self, data: bytes) -> None:
        self.heard = True
        _READ[self._form](self, data)

    def whole(self, head: KnownHead, events: bytes) -> None:
        if head.journalled and not self._exchange.ask.stream and self._told_at_once(events):
            return
        self.head(200, head.headers)
        if self.outcome is None:
            self.data(events)

    def _told_at_once(self, events: bytes) -> bool:
        """Whether that was all there is to know, as nearly always."""
        exchange, told = self._exchange, self._read_whole(events)
        if told is None or exchange.moves or exchange.ask.n > 1:
            return False
        version, prompt, cached, answer = told
        if self._floor is not None and version < self._floor:
            return False
        self.status, self._whole = 200, Answered(200, JSON, answer, (prompt, cached))
        return True

    def heard_last_s(self, now_s: float) -> float:
        """When something last came of it, as far as anybody has looked."""
        if self.heard or (self._pipe is not None and self._pipe.heard):
            self.heard, self.last_s = False, now_s
            if self._pipe is not None:
                self._pipe.heard = False
        return self.last_s

    def ended(self) -> None:
        self._finish(self._ending())

    def lost(self, why: str) -> None:
        told = self._form in (AnswerForm.EVENTS, AnswerForm.FOREIGN_EVENTS) and self._last.endswith(DONES)
        self._finish(Streamed(self._before + self._last) if told else Lost(why))

    # -- bytes ----------------------------------------------------------------------

    def _pass_events(self, data: bytes) -> None:
        if self._tail or not data.endswith(b"\n\n") or BOUND in data:
            data = self._whole_events(data)
        if WITHHELD in data:
            data = self._set_aside(data)
        if data:
            if not self._vetted and self._outdated(data):
                return
            self._last = data
            self._exchange.pass_events(data)
            if self._taken.pending and DATA in data:
                self._taken.first_token()
        self._use_pipe(self._vetted and not (self._tail or self._taken.pending))

    def _use_pipe(self, may_use: bool) -> None:
        """What comes next, if it is plain, goes to the client without us."""
        exchange, upstream = self._exchange, self.upstream
        if self._pipe is None and may_use:
            self._pipe = exchange.pipe()
        if upstream is not None and upstream.answers(self):
            upstream.pipe = self._pipe if may_use else None

    def _whole_events(self, data: bytes) -> bytes:
        data = self._tail + data
        end = safe_end(data)
        self._tail = data[end:]
        if len(self._tail) > LONGEST_EVENT:
            self.fail("an event of its answer never ends")
        return data[:end]

    def _outdated(self, events: bytes) -> bool:
        """Whether its first tokens come from weights that the fleet no longer had; no client sees them then."""
        if (version := first_version(events)) is None:
            return False
        self._vetted = True
        floor = self._floor
        if floor is None or version >= floor:
            return False
        self.fail(f"its weights have version {version}, and the fleet's {floor}")
        return True

    def _set_aside(self, events: bytes) -> bytes:
        """Keep withheld events back."""
        shown, withheld = split_withheld(events)
        self._veiled += withheld
        return shown

    def _pass(self, data: bytes) -> None:
        """Somebody else's stream: whole events as well, so that the word of its breaking off is not part of one."""
        if self._taken.pending:
            self._taken.first_token()
        data = self._tail + data
        end = _events_end(data)
        self._tail = data[end:]
        if end:
            self._exchange.told_raw = True
            self._before, self._last = self._last, data[:end]
            self._exchange.write_events(self._last)
        elif len(data) > LONGEST_EVENT:
            self.fail("an event of its answer never ends")

    def _collect(self, data: bytes) -> None:
        self._body.append(data)
        self._size += len(data)
        if self._size > LONGEST_ANSWER:
            self.fail(f"its answer has more than {LONGEST_ANSWER} bytes")

    def _collect_journal(self, data: bytes) -> None:
        """The journal of an answer that is told whole, then that answer."""
        if self._tail or not data.endswith(b"\n\n") or BOUND in data:
            data = self._whole_events(data)
        if WITHHELD in data:
            data = self._set_aside(data)
        if not data or (not self._vetted and self._outdated(data)):
            return
        self._last = data
        if self._taken.pending and TOKENS in data:
            self._taken.first_token()
        if last_data(data) is not None:
            self._body.append(data)
        self._exchange.journal.feed(data)

    # -- the end --------------------------------------------------------------------

    def _ending(self) -> Outcome:
        if self._whole is not None:
            return self._whole
        if self._form is AnswerForm.FOREIGN_EVENTS:
            if self._tail:
                self._exchange.write_events(self._tail)
            return Streamed(self._before + self._last)
        if self._tail:
            return Lost("its answer ended inside an event")
        if self._veiled:
            ending = b"".join(self._veiled)
            return withheld(ending)
        if self._form is AnswerForm.WHOLE:
            return Answered(self.status, self._headers, b"".join(self._body))
        if self._form is AnswerForm.JOURNALLED:
            return whole_answer(b"".join(self._body)) or Lost("its answer ended early")
        if self._form is AnswerForm.EVENTS and not (self._last.endswith(DONE) or failed_with(self._last)):
            return Lost("its answer ended early")
        return Streamed()

    def _finish(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._exchange.attempt_over(self, outcome)

    @property
    def is_stale(self) -> bool:
        """The worker may have closed this kept connection just before the request came; only a fresh one tells."""
        kept = self.upstream is not None and self.upstream.reused
        return kept and isinstance(self.outcome, Lost) and not (self.status or self.given_up)

    def fail(self, why: str) -> None:
        """Give it up: the worker is told by closing its connection."""
        self.given_up = True
        self.leave()
        self._finish(Lost(why))

    def leave(self) -> None:
        # By now the connection may be somebody else's.
        if self.upstream is not None and self.upstream.answers(self):
            self.upstream.drop()

    def start(self, upstream: Upstream, request: bytes, now_s: float, floor: int | None) -> None:
        """`floor`: the oldest weights that the fleet has."""
        self.upstream, self.last_s, self._floor = upstream, now_s, floor
        upstream.send(request, self)


_READ: Final[Mapping[AnswerForm, Callable[[Attempt, bytes], None]]] = {
    AnswerForm.WHOLE: Attempt._collect,
    AnswerForm.JOURNALLED: Attempt._collect_journal,
    AnswerForm.EVENTS: Attempt._pass_events,
    AnswerForm.FOREIGN_EVENTS: Attempt._pass,
}


def refused_as_paused(outcome: Outcome) -> bool:
    """Whether the worker took nothing of the request, because it is paused."""
    match outcome:
        case Answered(status, _, body):
            return status == 503 and PAUSED in body
        case Withheld(_, ending, ""):
            return PAUSED in ending
    return False


def withheld(ending: bytes) -> Withheld:
    """An end that is not final, by the journal: what the client would read depends on its headers."""
    ends = withheld_ends(ending)
    rescheduled = any(reason == RESCHEDULED for reason, _ in ends)
    return Withheld(rescheduled, ending, ends[0][1] if ends else "")


def _events_end(data: bytes) -> int:
    """Where the last whole event ends, in either way to end lines."""
    return max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3) if b"\n\n" in data or b"\n\r\n" in data else 0


def whole_answer(events: bytes) -> Answered | None:
    """The answer that is told whole at the end of its journal; None if it is not there."""
    whole = last_data(events)
    return None if whole is None else Answered(failed_with(events) or 200, JSON, whole)


def _streamed(headers: Headers) -> Headers:
    kept = [header for header in headers if header[0] not in ANSWER_OWN]
    return [*kept, (b"transfer-encoding", b"chunked")]
