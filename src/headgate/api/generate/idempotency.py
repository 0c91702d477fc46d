"""`Idempotency-Key`: one generation per key.

The first request with a key generates the answer, and its bytes are recorded. A retry receives the same bytes from the
beginning: at once if the answer is complete, otherwise as they are generated. The answer belongs to the key and not to a
connection, so it is completed even if the client disconnects (abort it by its id) or does not read. Not recorded are
refusals, and answers that another server must continue because this one had no room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headgate.contract.load_report import HEADER as LOAD
from headgate.edge.sse import TRANSPORT, ResponseWriter, WriterResponse, innermost
from headgate.edge.tenant_store import TenantStore
from headgate.errors import RequestError, Unavailable
from headgate.shares import Shares

if TYPE_CHECKING:
    from starlette.requests import Request

KEPT_S = 600.0
MOST_BYTES = 64 * 2**20  # for all complete answers that are kept; tenants share it
RECORDING_BYTES, MESSAGE_BYTES = 1000, 300  # overhead per answer, and per message of it
LONGEST_ANSWER = 16 * 2**20  # bytes; longer answers are not kept
MAKING_BYTES = 64 * 2**20  # for all answers that are being generated; tenants share it
LONGEST_KEY = 256
REPLAYED = b"idempotent-replayed", b"true"

Work = Callable[[ResponseWriter], Awaitable[None]]


class KeyReused(RequestError):
    status = 422
    code = "idempotency_key_reused"


class AnswerTooLong(RequestError):
    status = 409
    code = "answer_too_long"


class Recording:
    """The answer to the first request with a key."""

    def __init__(self, fingerprint: bytes, request_id: str, take: Callable[[int], bool]) -> None:
        self.fingerprint = fingerprint
        self.request_id = request_id
        self.ended_s: float | None = None
        self.size = 0
        self.taken = 0  # bytes reserved while it is being generated
        self.failure: Exception | None = None
        self._take = take  # reserves more bytes; False if there is no room
        self._messages: list[Message] = []
        self._more = asyncio.Event()

    @property
    def weight(self) -> int:
        """Approximate memory in bytes."""
        return RECORDING_BYTES + MESSAGE_BYTES * len(self._messages) + self.size

    def keep(self, message: Message) -> None:
        size = len(message.get("body", b""))
        self._messages.append(dict(message))
        self.size += size
        if self.size > LONGEST_ANSWER or not self._take(MESSAGE_BYTES + size):
            self._messages, self.size = [], 0  # requests that are reading it hold the old list
            self.failure = AnswerTooLong(
                f"the answer of this key is not kept: it has more than {LONGEST_ANSWER} bytes, "
                "or too many long answers are being generated"
            )
        else:
            self.taken += MESSAGE_BYTES + size
        self._wake()

    def end(self, now_s: float, failure: Exception | None = None) -> None:
        self.ended_s, self.failure = now_s, failure or self.failure
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    def send_all(self, send: Send) -> Coroutine[Any, Any, None]:
        """Send the recording from its beginning, as it grows, until it ends or is no longer kept."""
        return self._send_from(send, self._messages)

    async def _send_from(self, send: Send, messages: Sequence[Message]) -> None:
        sent = 0
        while True:
            while sent < len(messages):
                sent += 1
                await send(dict(messages[sent - 1]))
            if self.ended_s is not None or self.failure is not None:
                return
            await self._more.wait()

    async def replay(self, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            await send(_marked(message))

        if self.failure is None:
            await self.send_all(send_marked)
        if self.failure is not None:
            raise self.failure


def _marked(message: Message) -> Message:
    """Mark a replay in its headers: weights from before an update may have generated it. Its load report is outdated."""
    if message["type"] == "http.response.start":
        message["headers"] = [*(each for each in message.get("headers", ()) if each[0] != LOAD), REPLAYED]
    return message


class Replays:
    """The recorded answers of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[tuple[str, str], Recording] = {}
        self._making = Shares(MAKING_BYTES)
        self._kept: TenantStore[Recording] = TenantStore(MOST_BYTES)

    def exchange(self, request: Request, key: str, asked: str, work: Work) -> Response:
        """The response to `request`: generated by `work`, or a replay."""
        if len(key) > LONGEST_KEY:
            raise RequestError(f"must have at most {LONGEST_KEY} characters", param="Idempotency-Key")
        tenant: str = request.state.tenant
        fingerprint = blake2b(asked.encode()).digest()
        recording = self._find(tenant, key)
        if recording is None:
            recording = Recording(fingerprint, request.state.request_id, partial(self._take, tenant))
            self._running[tenant, key] = recording
            return _First(self, tenant, key, recording, work)
        if recording.fingerprint != fingerprint:
            raise KeyReused(
                "this key was used for another request; give each request its own", param="Idempotency-Key"
            )
        request.state.request_id = recording.request_id
        return _Retry(recording)

    def _find(self, tenant: str, key: str) -> Recording | None:
        self._forget(tenant)
        if (other := self._kept.next_tenant()) is not None:
            self._forget(other)
        return self._running.get((tenant, key)) or self._kept.get(tenant, key)

    def _take(self, tenant: str, size: int) -> bool:
        if not self._making.may_take(tenant, size, several=True):
            return False
        self._making.take(tenant, size)
        return True

    def ended(self, tenant: str, key: str, recording: Recording, failure: Exception | None, *, kept: bool) -> None:
        recording.end(self._clock(), failure)
        self._making.give_back(tenant, recording.taken)
        del self._running[tenant, key]
        if kept:
            self._kept.put(tenant, key, recording, recording.weight)

    def _forget(self, tenant: str) -> None:
        """Drop this tenant's expired answers; answers are kept in the order in which they ended."""
        before_s = self._clock() - KEPT_S
        while (oldest := self._kept.oldest(tenant)) is not None:
            key, recording = oldest
            assert recording.ended_s is not None
            if recording.ended_s > before_s:
                return
            self._kept.drop(tenant, key)


class _First(Response):
    """Generates the answer whether or not the client reads it, and sends it to the client concurrently."""

    def __init__(self, replays: Replays, tenant: str, key: str, recording: Recording, work: Work) -> None:
        self._replays, self._tenant, self._key = replays, tenant, key
        self._recording, self._work = recording, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._recording.send_all(send))
                await self._make(sending, send, scope.get("state", {}).get(TRANSPORT))
        except BaseExceptionGroup as failures:
            raise innermost(failures) from None

    async def _make(self, sending: asyncio.Task[None], send: Send, transport: asyncio.Transport | None) -> None:
        recording = self._recording

        async def keep(message: Message) -> None:
            if recording.failure is None:
                recording.keep(message)
            else:  # too long to be kept, so it now depends on its client
                writer.transport = transport
                await sending
                await send(message)

        writer = ResponseWriter(keep)
        failure: Exception | None = None
        try:
            await self._work(writer)
        except BaseException as error:
            cut = Unavailable("the server is shutting down; use another one", code="shutting_down")
            failure = error if isinstance(error, Exception) else cut
            raise
        finally:
            kept = failure is None and not writer.given_back
            self._replays.ended(self._tenant, self._key, recording, failure, kept=kept)


class _Retry(WriterResponse):
    """Replays a recording until its client disconnects."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(lambda writer: recording.replay(writer.raw))


def replays_of(request: Request) -> Replays:
    replays: Replays = request.app.state.replays
    return replays
