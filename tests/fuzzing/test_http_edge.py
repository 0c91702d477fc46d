"""The router's HTTP parser: any bytes, in any pieces, get a valid HTTP answer or refusal."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import h11
import httptools
import pytest
from hypothesis import strategies as st

from headgate.router.data_path.downstream import (
    MAX_HEAD_BYTES,
    MOST_PIPELINED,
    Connections,
    Downstream,
    HttpRequest,
    answer_head,
)
from tests.fuzzing.properties import damaged, fuzzed

MOST_BODY = 1000
LOOP = asyncio.new_event_loop()

Seen = tuple[str, bytes, tuple[tuple[bytes, bytes], ...], bytes]


class Pipe:
    """A transport that records the bytes written to it."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed, "written after the end"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    close = abort = write_eof

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None


class Echo:
    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def handle(self, client: Downstream, request: HttpRequest) -> None:
        head = request.head
        self.seen.append((head.method, head.target, tuple(head.headers), request.body))
        client.write(answer_head(200, [(b"content-length", b"2")]) + b"ok")
        client.finished()


def talk(pieces: list[bytes], connections: Connections | None = None) -> tuple[list[Seen], bytes]:
    """The requests that the handler saw on a connection with these bytes, and the bytes that the client got."""
    echo = Echo()
    if connections is None:
        connections = Connections(echo.handle, MOST_BODY)
    connections.handle = echo.handle
    pipe = Pipe()

    async def main() -> None:
        client = connections()
        client.connection_made(pipe)  # type: ignore[arg-type]
        for piece in pieces:
            if not pipe.closed:
                client.data_received(piece)
        kept = len(client._head.headers) + sum(map(len, client._body))
        assert kept <= 2 * MAX_HEAD_BYTES and len(client._waiting) <= MOST_PIPELINED
        client.connection_lost(None)

    LOOP.run_until_complete(main())
    assert len(connections) == 0
    return echo.seen, pipe.written


class Answers:
    """Parses the answers that a client got; raises if they are invalid."""

    def __init__(self, data: bytes) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.statuses.append(self._parser.get_status_code())


# ------------------------------------------------------------------------------------------------------------- inputs

HEADERS = (
    b"content-length: 3",
    b"Content-Length: 4",
    b"content-length: 03",
    b"content-length: 3, 3",
    b"content-length: -1",
    b"content-length: 18446744073709551617",
    b"Content-Length:3",
    b"content-length : 3",
    b"content-length:\t3",
    b"transfer-encoding: chunked",
    b"Transfer-Encoding: Chunked",
    b"transfer-encoding: xchunked",
    b"transfer-encoding: chunked, identity",
    b"transfer-encoding: identity",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding: chunked\r\n ",
    b"x: a\r\n b",
    b"x: a\r\n\tcontent-length: 5",
    b"x: \x00",
    b"x: \xff\x80",
    b"x:",
    b": x",
    b"x y: z",
    b"host: a",
    b"host: b",
    b"connection: close",
    b"connection: content-length",
    b"expect: 100-continue",
    b"upgrade: h2c",
    b"authorization: Bearer k",
)
BODIES = (
    b"",
    b"abc",
    b"abcd",
    b"0\r\n\r\n",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"3;x=y\r\nabc\r\n0\r\n\r\n",
    b"03\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n0\r\nauthorization: Bearer evil\r\n\r\n",
    b"-1\r\nabc\r\n0\r\n\r\n",
    b"ffffffffffffffffff\r\nabc",
    b"3\nabc\n0\n\n",
    b"3\r\nabcd\r\n0\r\n\r\n",
    b"0x3\r\nabc\r\n0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\n\r\n",
)
LINES = (
    b"POST / HTTP/1.1",
    b"GET /x?y HTTP/1.1",
    b"POST / HTTP/1.0",
    b"GET http://a/ HTTP/1.1",
    b"GET / HTTP/2.0",
    b"PUT * HTTP/1.1",
)


@st.composite
def requests(draw: Any) -> bytes:
    """Requests that try to make two parsers disagree."""
    sent = b""
    for _ in range(draw(st.integers(1, 3))):
        lines = [draw(st.sampled_from(LINES)), *draw(st.lists(st.sampled_from(HEADERS), max_size=4))]
        end = draw(st.sampled_from((b"\r\n",) * 6 + (b"\n", b"\r")))
        sent += end.join(lines) + end + end + draw(st.sampled_from(BODIES))
    return sent


GOOD = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
streams = st.one_of(
    requests(),
    damaged(GOOD + GOOD),
    damaged(GOOD.replace(b"content-length: 3", b"transfer-encoding: chunked")[:-3] + BODIES[4]),
    st.binary(max_size=200),
)
cuts = st.lists(st.integers(0, 300), max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


# ---------------------------------------------------------------------------------------------------------- properties


@fuzzed(streams, few=20)
def test_any_bytes_get_a_valid_http_answer_that_is_not_a_500(data: bytes) -> None:
    seen, written = talk([data])
    statuses = Answers(written).statuses
    assert set(statuses) <= {200, 400, 413, 429, 431}
    assert statuses.count(200) == len(seen) and len(statuses) <= len(seen) + 1


@fuzzed(st.tuples(streams, cuts), few=20)
def test_the_same_requests_are_seen_however_their_bytes_are_split(drawn: tuple[bytes, list[int]]) -> None:
    data, places = drawn
    whole, byte_by_byte = talk([data]), talk([bytes([byte]) for byte in data])
    in_pieces = talk(cut(data, places))
    assert whole[0] == byte_by_byte[0] == in_pieces[0]
    assert Answers(whole[1]).statuses == Answers(in_pieces[1]).statuses == Answers(byte_by_byte[1]).statuses


@fuzzed(st.tuples(streams, cuts), few=30)
def test_a_cached_head_is_parsed_like_an_uncached_one(drawn: tuple[bytes, list[int]]) -> None:
    data, places = drawn
    fresh, _ = talk([data])
    known = Connections(Echo().handle, MOST_BODY)
    talk([GOOD], known)
    talk([data], known)
    for piece in data.split(b"POST "):
        talk([b"POST " + piece], known)
    again, _ = talk(cut(data, places), known)
    assert again == fresh
    assert talk([data], known)[0] == fresh


@fuzzed(requests(), few=20)
def test_another_parser_finds_the_same_bodies_in_accepted_requests(data: bytes) -> None:
    """Request smuggling requires that two parsers disagree about the end of a request."""
    ours = [body for _, _, _, body in talk([data])[0]]
    theirs = bodies_by_h11(data)
    both = min(len(ours), len(theirs))
    assert ours[:both] == theirs[:both]


def bodies_by_h11(data: bytes) -> list[bytes]:
    """The bodies as parsed by h11, up to the first request that it refuses."""
    connection, bodies, current = h11.Connection(h11.SERVER), [], b""
    connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                current += event.data
            elif isinstance(event, h11.EndOfMessage):
                bodies.append(current)
                current = b""
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            elif not isinstance(event, h11.Request):
                return bodies
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return bodies


def test_a_trailer_is_not_treated_as_a_header():
    """If it were, it would bypass a proxy that filters headers."""
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + BODIES[7]
    ((_, _, headers, body),), _ = talk([chunked])
    assert (headers, body) == (((b"transfer-encoding", b"chunked"),), b"abc")


@pytest.mark.parametrize(
    "headers",
    [
        b"x: a\r\n b\r\n",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 3\r\ncontent-length: 3\r\n",
    ],
)
def test_an_ambiguous_head_is_refused(headers: bytes):
    seen, written = talk([b"POST / HTTP/1.1\r\n" + headers + b"\r\nabc"])
    assert seen == [] and Answers(written).statuses == [400]
