"""Writes the answer to the client: one head, then events or one body, then one end."""

from __future__ import annotations

import msgspec

from headgate.contract.error_answers import as_error_event, error_event_at
from headgate.errors import RequestError
from headgate.router.data_path.downstream import Downstream, answer_head, error_answer
from headgate.router.data_path.upstream import Headers
from headgate.router.exchange.attempt import ANSWER_OWN, JSON, STREAM_HEADERS, Answered
from headgate.router.fleet.worker import Worker

KEEP_ALIVE = b": keep-alive\n\n"
LAST_CHUNK = b"0\r\n\r\n"
# The form of nearly every answer that is not streamed.
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"x-request-id: %b\r\nx-headgate-worker: %b\r\n\r\n%b"
)


class ClientAnswer(msgspec.Struct, eq=False):  # created per request; cheaper than a class with `__init__`
    _client: Downstream
    id: str  # the request's id
    path: str
    chunked: bool  # a stream is sent in chunks, which HTTP/1.0 lacks
    _begun: bool = False  # the head of a stream was sent

    def begin_stream(self, worker: Worker | None, headers: Headers = STREAM_HEADERS) -> None:
        if self._begun:
            return
        self._begun = True
        if not self.chunked:
            framed = [header for header in headers if header[0] != b"transfer-encoding"]
            headers = [*framed, (b"connection", b"close")]
        self._client.write(answer_head(200, headers + self._names(worker)))

    def write_events(self, events: bytes) -> None:
        self._client.write(b"%x\r\n%b\r\n" % (len(events), events) if self.chunked else events)

    def keep_alive(self) -> None:
        """Send a comment, so that proxies do not time the stream out."""
        self.begin_stream(None)
        self.write_events(KEEP_ALIVE)

    def end_stream(self) -> None:
        if self.chunked:
            self._client.write(LAST_CHUNK)
        self._client.finished(keep_alive=self.chunked)

    def send_stream(self, worker: Worker | None, events: bytes) -> None:
        """Send the last events, and end the stream."""
        self.begin_stream(worker)
        self.write_events(events)
        self.end_stream()

    def send_whole(self, worker: Worker | None, answer: Answered) -> None:
        if self._begun:  # keep-alive comments were sent before this refusal
            return self.send_stream(worker, as_error_event(self.path, answer.body.replace(b"\n", b" ")))
        if answer.headers is JSON and answer.status == 200 and worker is not None:
            name = worker.name.encode()
            self._client.write(WHOLE % (len(answer.body), self.id.encode(), name, answer.body))
            return self._client.finished()
        headers = [header for header in answer.headers if header[0] not in ANSWER_OWN]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        self._client.write(answer_head(answer.status, headers + self._names(worker)) + answer.body)
        return self._client.finished()

    def send_error(self, error: RequestError) -> None:
        """Send an error as the answer, or as the last event of a stream."""
        if self._client.gone:
            return
        if self._begun:
            self.send_stream(None, error_event_at(self.path, error, self.id))
        else:
            self._client.write(error_answer(error, self._names(None), path=self.path, request_id=self.id))
            self._client.finished()

    def _names(self, worker: Worker | None) -> Headers:
        names = [(b"x-request-id", self.id.encode())]
        if worker is not None:
            names.append((b"x-headgate-worker", worker.name.encode()))
        return names
