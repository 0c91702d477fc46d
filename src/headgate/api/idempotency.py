"""`Idempotency-Key`: one key, one generation.

The first request with a key makes the answer; what is sent to it is kept. A retry gets the same bytes, from the first one
on: at once if the answer is whole, as they come if it is still being made. An answer with a key belongs to the key and
not to a connection, so it is finished even when its client has gone (abort it by its id). A refusal is not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headgate.api.sse import Exchange, Reply
from headgate.errors import RequestError, Unavailable

if TYPE_CHECKING:
    from starlette.requests import Request

KEPT_S = 600.0
MOST_BYTES = 64 * 2**20  # of all answers that are kept and complete
LONGEST_ANSWER = 16 * 2**20  # that is kept
LONGEST_KEY = 256

Work = Callable[[Reply], Awaitable[None]]


class KeyReused(RequestError):
    status = 422
    code = "idempotency_key_reused"


class AnswerTooLong(RequestError):
    status = 409
    code = "answer_too_long"


class Recording:
    """What was sent in answer to the first request with a key."""

    def __init__(self, fingerprint: bytes, request_id: str) -> None:
        self.fingerprint = fingerprint
        self.request_id = request_id
        self.ended_s: float | None = None
        self.size = 0
        self.failure: Exception | None = None
        self._messages: list[Message] = []
        self._more = asyncio.Event()

    def keep(self, message: Message) -> None:
        if self.failure is not None:
            return
        self._messages.append(dict(message))
        self.size += len(message.get("body", b""))
        if self.size > LONGEST_ANSWER:
            self._messages, self.size = [], 0
            self.failure = AnswerTooLong(
                f"the answer of this key has more than {LONGEST_ANSWER} bytes and is not kept"
            )
        self._tell()

    def end(self, now_s: float, failure: Exception | None = None) -> None:
        self.ended_s, self.failure = now_s, failure or self.failure
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def replay(self, send: Send) -> None:
        sent = 0
        while True:
            for message in self._messages[sent:]:
                sent += 1
                await send(dict(message))
            if sent >= len(self._messages):
                if self.failure is not None:
                    raise self.failure
                if self.ended_s is not None:
                    return
                await self._more.wait()


class Replays:
    """The answers of this process that have a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recordings: OrderedDict[tuple[str, str], Recording] = OrderedDict()

    def exchange(self, request: Request, key: str, asked: str, work: Work) -> Response:
        """The response to `request`: made by `work`, or already in the making."""
        if len(key) > LONGEST_KEY:
            raise RequestError(f"must have at most {LONGEST_KEY} characters", param="Idempotency-Key")
        self._forget()
        where, fingerprint = (request.state.tenant, key), blake2b(asked.encode()).digest()
        recording = self._recordings.get(where)
        if recording is None:
            recording = self._recordings[where] = Recording(fingerprint, request.state.request_id)
            return _First(self, where, recording, work)
        if recording.fingerprint != fingerprint:
            raise KeyReused(
                "this key was used for another request; give each request its own", param="Idempotency-Key"
            )
        request.state.request_id = recording.request_id
        return _Retry(recording)

    def ended(self, where: tuple[str, str], recording: Recording, failure: Exception | None) -> None:
        recording.end(self._clock(), failure)
        if failure is not None:
            self._recordings.pop(where, None)
        self._forget()

    def _forget(self) -> None:
        """Drop answers that are old, and the oldest if there are too many."""
        now_s = self._clock()
        ended = [(where, r) for where, r in self._recordings.items() if r.ended_s is not None]
        size = sum(recording.size for _, recording in ended)
        for where, recording in ended:
            assert recording.ended_s is not None
            if now_s - recording.ended_s < KEPT_S and size <= MOST_BYTES:
                break
            size -= recording.size
            del self._recordings[where]


class _First(Response):
    """Makes the answer, whether or not anyone is there to read it."""

    def __init__(self, replays: Replays, where: tuple[str, str], recording: Recording, work: Work) -> None:
        self._replays, self._where, self._recording, self._work = replays, where, recording, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def keep(message: Message) -> None:
            self._recording.keep(message)
            await send(message)

        failure: Exception | None = None
        try:
            await self._work(Reply(keep))
        except BaseException as error:
            cut = Unavailable("the server is shutting down; ask another one", code="shutting_down")
            failure = error if isinstance(error, Exception) else cut
            raise
        finally:
            self._replays.ended(self._where, self._recording, failure)


class _Retry(Exchange):
    """Repeats it, for as long as its own client is there."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(lambda reply: recording.replay(reply.raw))


def replays_of(request: Request) -> Replays:
    replays: Replays = request.app.state.replays
    return replays
