"""Answers of workers: for any bytes from a worker, the client of the router gets one complete HTTP answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from headgate.router.exchange.journal import Journal
from tests.fuzzing.properties import damaged, fuzzed
from tests.router.client import ask, routing
from tests.router.mock import CHAT, Asked, Broken, Connection, Mock
from tests.router.run import run

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JOURNALLED = PLAIN[:-2] + b"x-headgate-journal: 1\r\n\r\n"
WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{"id": "x1"}'
EVENTS = (
    b':j 0 1 2 5,6\ndata: {"choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n'
    b": keep-alive\n\n"
    b':j 1 1 0 7\n\n:j 0 1 4 8\n:f 0 stop eos 5 0 3\n:+\ndata: {"one":1}\n\ndata: {"two":2}\n\n'
    b'data: {"usage":{}}\n\ndata: [DONE]\n\n'
)
# One attempt per request, and a worker that was marked as failed is used again at once.
SETTINGS: dict[str, Any] = {"retries": 0, "patience_s": 0.05, "probe_interval_s": 0.02, "silence_s": 30.0}
NONSENSE = (
    b":j 0 1 0 99999999999\ndata: {}\n\n",
    b":j 0 1 0 1,,2\ndata: {}\n\n",
    b":j 0 1 0 " + b"9" * 5000 + b"\ndata: {}\n\n",
    b":j " + b"9" * 5000 + b" 1 0 1\ndata: {}\n\n",
    b":j 0 " + b"9" * 5000 + b" 0 1\ndata: {}\n\n",
    b":f 0 stop eos " + b"9" * 5000 + b" 0 0\n\n",
    b":e 000\ndata: {}\n\n",
    b":e 999\ndata: {}\n\n",
    b":m data: [DONE]\n:m \n\n",
    b":m \n\n",
    b":+\n\n",
    b"data: \n\n",
    b"\xff\xfe\n\n",
)


@st.composite
def events(draw: Any) -> bytes:
    parts = draw(
        st.lists(st.one_of(damaged(EVENTS), st.sampled_from(NONSENSE), st.just(EVENTS)), min_size=1, max_size=3)
    )
    return b"".join(parts)


@st.composite
def answers(draw: Any) -> list[bytes]:
    """An answer, as the pieces in which it is sent."""
    match draw(st.integers(0, 5)):
        case 0:
            return [draw(damaged(WHOLE))]
        case 1:
            return [
                draw(damaged(draw(st.sampled_from((JOURNALLED, PLAIN))))),
                draw(damaged(chunk(EVENTS) + b"0\r\n\r\n")),
            ]
    body = draw(events())
    places = sorted(draw(st.lists(st.integers(0, len(body)), max_size=4)))
    pieces = [chunk(body[start:end]) for start, end in pairwise([0, *places, len(body)]) if start < end]
    end = [b"0\r\n\r\n"] if draw(st.booleans()) else []
    return [draw(st.sampled_from((JOURNALLED, PLAIN))), *pieces, *end]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Raw(Connection):
    """Sends scripted bytes as the answer to any request."""

    async def _answer(self, asked: Asked) -> None:
        try:
            for piece in self._mock.pieces:  # type: ignore[attr-defined]
                self._write(piece)
                await asyncio.sleep(0)
            self._break()
        except Broken:
            pass


class RawWorker(Mock):
    pieces: list[bytes]

    async def start(self) -> Mock:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(lambda: Raw(self), sock=listener)
        return self


@fuzzed(st.tuples(st.lists(answers(), min_size=1, max_size=6), st.booleans()), few=4)
def test_the_client_gets_one_complete_answer_whatever_a_worker_sends(drawn: tuple[list[list[bytes]], bool]) -> None:
    answered, plain = drawn
    mistakes: list[str] = []

    async def main() -> None:
        async with RawWorker(plain=plain) as worker, routing(worker, **SETTINGS) as (_, url):
            for worker.pieces in answered:
                for stream in (True, False):
                    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
                    response = await ask(url, CHAT, body)
                    assert response.complete and 200 <= response.status < 1000

    with logged(mistakes):
        run(main())
    assert not mistakes


class logged(logging.Handler):  # noqa: N801 (used as a verb)
    """A log handler that records internal errors."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("headgate").addHandler(self)
        logging.getLogger("asyncio").addHandler(self)

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("headgate").removeHandler(self)
        logging.getLogger("asyncio").removeHandler(self)


@fuzzed(events(), few=40)
def test_a_journal_is_parsed_or_rejected(body: bytes) -> None:
    journal = Journal()
    journal.feed(body)
    assert journal.unreadable in (True, False) and journal.tokens >= 0
    assert journal.resume(streamed=True).startswith(b'{"choices":')


def test_an_unstreamed_answer_that_ends_like_a_stream_is_not_treated_as_one():
    """Regression: the router took [DONE] for the end of a stream, and wrote to the client before the head."""

    async def main() -> None:
        async with RawWorker() as worker, routing(worker, **SETTINGS) as (_, url):
            worker.pieces = [JOURNALLED, chunk(EVENTS)]
            response = await ask(url, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
            assert response.complete and response.status == 502

    run(main())


def test_36_an_invalid_journal_is_never_resumed():
    journal = Journal()
    journal.feed(b":j 0 1 2 5,6\ndata: {}\n\n")
    assert not journal.unreadable and journal.tokens == 2
    journal.feed(NONSENSE[0])
    assert journal.unreadable
