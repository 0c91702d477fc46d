"""One attempt at a request by one worker: reads the response, passes it to the client, and reports an outcome.

Bytes pass from the worker's connection to the client's in a single call. Only whole events are passed on, so that
another worker can continue the stream; the journal records what such a worker needs.

    Answered    a whole answer, not yet sent to the client
    Streamed    the client has received the whole stream
    Withheld    the worker ended the answer early (pause, shutdown, too little KV memory); another may continue it
    Lost        the connection broke, or the response was invalid or incomplete
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from headgate.contract.errors import WARNING_HEADER
from headgate.contract.journal import (
    BOUND,
    DATA,
    MESSAGE_STOP,
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
from headgate.contract.load_report import HEADER as LOAD
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
# Response headers that the router writes itself.
ANSWER_OWN = HOP_BY_HOP | {b"content-length", b"x-request-id", RAW_HEADER, b"x-headgate-worker"}
PASSED = (LOAD, WARNING_HEADER)  # of a worker's answer, with a journal: the load report and a warning
JSON: Headers = [(b"content-type", b"application/json")]
DONE = b"data: [DONE]\n\n"
STOP = MESSAGE_STOP + b'data: {"type":"message_stop"}\n\n'
ENDS = DONE, STOP  # of streams with a journal
FOREIGN_ENDS = *ENDS, b"data: [DONE]\r\n\r\n"
REPLAYED = b"idempotent-replayed"  # marks an answer stored for an Idempotency-Key, perhaps made with older weights
PAUSED = b'"code":"paused"'  # never matches inside a JSON string, where quotes are escaped


class Answered(msgspec.Struct, frozen=True, gc=False):  # created per request; cheaper than a dataclass
    status: int
    headers: Headers
    body: bytes
    usage: tuple[int, int] | None = None  # (prompt tokens, cached prompt tokens), if known


class Streamed(msgspec.Struct, frozen=True, gc=False):
    tail: bytes = b""  # the last events of an answer without a journal; they contain its usage, if any


@dataclass(frozen=True, slots=True)
class Withheld:
    rescheduled: bool  # the worker had too little KV memory for the request
    ending: bytes
    cause: str = ""  # why the worker ended the first choice; empty if it reports an error instead


@dataclass(frozen=True, slots=True)
class Lost:
    why: str


Outcome = Answered | Streamed | Withheld | Lost


class Recipient(Protocol):
    """The request that an attempt is made for."""

    info: RequestInfo
    journal: Journal
    moves: int  # number of earlier attempts
    unresumable: bool  # the client has received part of an answer without a journal

    def tokens_begin(self) -> None:
        """Called when the first tokens of an attempt arrive."""

    def begin_stream(self, worker: Worker, headers: Headers) -> None: ...

    def pass_events(self, events: bytes) -> None:
        """Send events to the client and record them in the journal."""

    def write_events(self, events: bytes) -> None:
        """Send events to the client."""

    def pipe(self) -> EventPipe | None:
        """Return a pipe that sends events straight to the client, except errors and the end of the answer.

        The attempt handles those two. None if the answer is not sent in chunks.
        """

    def attempt_over(self, attempt: Attempt, outcome: Outcome) -> None: ...


class AnswerForm(Enum):
    """The form in which a response arrives."""

    __hash__ = object.__hash__  # hashes by identity; the hash of Enum is computed in Python, which is slow

    WHOLE = auto()
    JOURNALLED = auto()  # a journal, followed by the whole answer
    EVENTS = auto()  # server-sent events with a journal
    FOREIGN_EVENTS = auto()


WHOLE = AnswerForm.WHOLE  # looking up a global costs a tenth of looking up an Enum member


class Attempt(msgspec.Struct, eq=False):  # created per request; cheaper than a class with `__init__`
    """Reads one worker's response and calls `attempt_over` of its exchange exactly once."""

    _exchange: Recipient
    _taken: LoadShare
    _read_whole: ReadWhole
    upstream: Upstream
    last_s: float  # when the request was sent, or when a sweep last noticed data
    _floor: int | None  # the oldest weight version in the fleet when the request was sent
    heard: bool = False  # data has arrived since the last sweep; reading a clock per chunk would be too slow
    status: int = 0  # 0 until the response head arrives
    journalled: bool = False
    given_up: bool = False  # the router has abandoned the attempt
    outcome: Outcome | None = None
    _headers: Headers = []
    _passed: Headers = []  # the headers that the client gets in an answer with a journal
    _form: AnswerForm = WHOLE
    _tail: bytes = b""  # an incomplete event
    _last: bytes = b""  # the events passed on last
    _before: bytes = b""  # the events before `_last`, of a stream without a journal
    _withheld: list[bytes] = []
    _vetted: bool = False  # the weight version of the first tokens was checked, or the answer is a stored one
    _pipe: EventPipe | None = None
    _body: list[bytes] = []
    _size: int = 0
    _whole: Answered | None = None  # an answer that was received in one piece

    @property
    def worker(self) -> Worker:
        return self._taken.worker

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
            elif name in PASSED:
                self._passed = [*self._passed, (name, value)]
        if status != 200 or not streams:
            return
        if not exchange.info.stream and self.journalled:
            self._form = AnswerForm.JOURNALLED
            return
        exchange.begin_stream(self.worker, STREAM_HEADERS + self._passed if self.journalled else _streamed(headers))
        self._form = AnswerForm.EVENTS if self.journalled else AnswerForm.FOREIGN_EVENTS

    def data(self, data: bytes) -> None:
        self.heard = True
        _READ[self._form](self, data)

    def whole(self, head: KnownHead, events: bytes) -> None:
        if head.journalled and not self._exchange.info.stream and self._read_at_once(events):
            return
        self.head(200, head.headers)
        if self.outcome is None:
            self.data(events)

    def _read_at_once(self, events: bytes) -> bool:
        """Read `events` as one complete answer; returns whether that was possible, as it nearly always is."""
        exchange, answer = self._exchange, self._read_whole(events)
        if answer is None or exchange.moves or exchange.info.n > 1:
            return False
        version, prompt, cached, body = answer
        if self._floor is not None and version < self._floor:
            return False
        self.status, self._whole = 200, Answered(200, JSON, body, (prompt, cached))
        return True

    def last_data_s(self, now_s: float) -> float:
        """Return when data last arrived, to the precision of the sweep that calls this method."""
        if self.heard or (self._pipe is not None and self._pipe.heard):
            self.heard, self.last_s = False, now_s
            if self._pipe is not None:
                self._pipe.heard = False
        return self.last_s

    def ended(self) -> None:
        self._finish(self._ending())

    def lost(self, why: str) -> None:
        complete = self._form in (AnswerForm.EVENTS, AnswerForm.FOREIGN_EVENTS) and self._last.endswith(FOREIGN_ENDS)
        self._finish(Streamed(self._before + self._last) if complete else Lost(why))

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
        """Let events go straight to the client, without passing through this object, or stop doing so."""
        if self._pipe is None and may_use:
            self._pipe = self._exchange.pipe()
        if self.upstream.answers(self):
            self.upstream.pipe = self._pipe if may_use else None

    def _whole_events(self, data: bytes) -> bytes:
        data = self._tail + data
        end = safe_end(data)
        self._tail = data[end:]
        if len(self._tail) > LONGEST_EVENT:
            self.fail("an event of its answer never ends")
        return data[:end]

    def _outdated(self, events: bytes) -> bool:
        """Whether the first tokens come from weights older than the fleet's. If so, the attempt fails."""
        if (version := first_version(events)) is None:
            return False
        self._vetted = True
        floor = self._floor
        if floor is None or version >= floor:
            self._exchange.tokens_begin()
            return False
        self.fail(f"its weights have version {version}, and the fleet's {floor}")
        return True

    def _set_aside(self, events: bytes) -> bytes:
        """Return `events` without withheld ones, which are kept."""
        shown, withheld = split_withheld(events)
        self._withheld += withheld
        return shown

    def _pass(self, data: bytes) -> None:
        """Pass on a stream without a journal. Only whole events are sent, so an error event can always follow."""
        if self._taken.pending:
            self._taken.first_token()
        data = self._tail + data
        end = _events_end(data)
        self._tail = data[end:]
        if end:
            if not self._exchange.unresumable:
                self._exchange.unresumable = True
                self._exchange.tokens_begin()
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
        """Collect a piece of an answer that is not streamed: comments of the journal, then the complete answer.

        The exchange records the journal; the answer is kept in `_body`.
        """
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
        if self._withheld:
            ending = b"".join(self._withheld)
            return withheld(ending)
        if self._form is AnswerForm.WHOLE:
            return Answered(self.status, self._headers, b"".join(self._body))
        if self._form is AnswerForm.JOURNALLED:
            return whole_answer(b"".join(self._body), self._passed) or Lost("its answer ended early")
        if self._form is AnswerForm.EVENTS and not (self._last.endswith(ENDS) or failed_with(self._last)):
            return Lost("its answer ended early")
        return Streamed()

    def _finish(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._exchange.attempt_over(self, outcome)

    @property
    def is_stale(self) -> bool:
        """Whether the worker may have closed a reused connection before the request arrived. It is then repeated."""
        return self.upstream.reused and isinstance(self.outcome, Lost) and not (self.status or self.given_up)

    def fail(self, why: str) -> None:
        """Abandon the attempt. Its connection is closed, which makes the worker stop."""
        self.given_up = True
        self.leave()
        self.lost(why)

    def leave(self) -> None:
        # The connection may already serve another request.
        if self.upstream.answers(self):
            self.upstream.drop()


_READ: Final[Mapping[AnswerForm, Callable[[Attempt, bytes], None]]] = {
    AnswerForm.WHOLE: Attempt._collect,
    AnswerForm.JOURNALLED: Attempt._collect_journal,
    AnswerForm.EVENTS: Attempt._pass_events,
    AnswerForm.FOREIGN_EVENTS: Attempt._pass,
}


def refused_as_paused(outcome: Outcome) -> bool:
    """Whether the worker refused the request because it is paused."""
    match outcome:
        case Answered(status, _, body):
            return status == 503 and PAUSED in body
        case Withheld(_, ending, ""):
            return PAUSED in ending
    return False


def withheld(ending: bytes) -> Withheld:
    """Return the outcome of a withheld end, read from its journal lines, because the events depend on the client."""
    ends = withheld_ends(ending)
    rescheduled = any(reason == RESCHEDULED for reason, _ in ends)
    return Withheld(rescheduled, ending, ends[0][1] if ends else "")


def _events_end(data: bytes) -> int:
    """Return where the last whole event ends; lines may end in LF or CRLF."""
    return max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3) if b"\n\n" in data or b"\n\r\n" in data else 0


def whole_answer(events: bytes, passed: Headers | None = None) -> Answered | None:
    """Return the whole answer at the end of a journal; None if it is missing. `passed` are headers of the worker's."""
    whole = last_data(events)
    return None if whole is None else Answered(failed_with(events) or 200, JSON + passed if passed else JSON, whole)


def _streamed(headers: Headers) -> Headers:
    kept = [header for header in headers if header[0] not in ANSWER_OWN]
    return [*kept, (b"transfer-encoding", b"chunked")]
