"""A stream that continues in another engine when its engine is lost.

The stream keeps its request and every token it has passed on. When its engine is lost and another is ready, it sends
the same request with those tokens to the other engine; the reader notices only a delay. If the reader leaves the
stream early, the request is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from headgate.engine.client import Chunk, EngineClient, TokenStream
from headgate.errors import EngineDead, RequestError
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest

log = logging.getLogger(__name__)

MOST_MOVES = 2  # without a token in between: a request that crashes its engine must not crash every engine
DEADLINE_GRACE_S = 0.3  # how long after a deadline the stream waits for the engine's own terminal output


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream's tokens are generated: the index of the engine, and the engine's id for the sequence."""

    engine: int
    id: int


# Chooses the index and the client of an engine for a stream with the given time left; None if the stream is to end.
Choose = Callable[["MovingStream", float | None], Awaitable[tuple[int, EngineClient] | None]]


class MovingStream:
    """One answer, whichever engines generate it. Leaving the stream early aborts the request with cause `cause`."""

    def __init__(self, request: GenerateRequest, choose: Choose) -> None:
        self.cause: Cause = "client_disconnect"
        self.ending = False
        self.accepted = request.accepted  # before the current pause; a pause with mode abort ends such streams
        self.at: tuple[EngineClient, TokenStream] | None = None
        self.place: Place | None = None  # where the stream in `at` runs, as a hashable value
        self.parts: list[TokenStream] = []  # one for each engine that the request was sent to
        self.wait: asyncio.Timeout | None = None  # set while the stream waits for an engine
        self.chunks = self._chunks()
        self._request = request
        self._choose = choose
        self._tokens = list(request.generated)
        self._scored = 0  # prompt positions whose log-probabilities have been passed on
        self._stalled = 0  # engines lost in a row without a token

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self.chunks

    def end(self, cause: Cause) -> None:
        """Abort the request. Its terminal output still arrives, unless no engine has it or that engine is lost."""
        if self.ending:
            return
        self._leave(cause)
        if self.at is not None:
            client, stream = self.at
            client.abort(stream.id, cause)

    def overdue(self) -> None:
        """Stop the reader's wait: the deadline has passed and the engine has not ended the stream."""
        self._leave("deadline")
        if self.at is not None:
            self.at[1].leave()

    def end_at(self, cause: Cause) -> Place | None:
        """Like `end`, but the caller aborts the sequence at the returned place; None if no engine has the request."""
        self._leave(cause)
        return self.place

    @property
    def made(self) -> int:
        """Tokens that engines have generated for this stream, delivered or not; final when `settled`."""
        return sum(part.made for part in self.parts)

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` when the terminal output of a part arrives, for every part that still lacks one."""
        for part in self.parts:
            if not part.settled:
                part.on_settled = call

    def _leave(self, cause: Cause) -> None:
        if not self.ending:
            self.cause, self.ending = cause, True
        if self.wait is not None and not self.wait.expired():
            self.wait.reschedule(asyncio.get_running_loop().time())

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield chunks from one engine after another.

        Stops when an engine ends the stream, or when the stream is being ended and no engine has its request.
        """
        request, began_s = self._request, asyncio.get_running_loop().time()
        while (chosen := await self._choose(self, _time_left(request.timeout_s, began_s))) is not None:
            known, moved = len(self._tokens), bool(self.parts)
            resumed = self._resumed(_time_left(request.timeout_s, began_s))
            try:
                async with aclosing(self._chunks_from(*chosen, resumed)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except EngineDead as error:
                if self.ending:
                    return
                self._stalled = self._stalled + 1 if len(self._tokens) == known else 0
                self._raise_if_final(error)
            except RequestError as error:
                if error.code != "paused" or not (moved or self.accepted):
                    raise
                self.end("pause")  # the pause also ended the streams that had an engine

    def _resumed(self, timeout_s: float | None) -> GenerateRequest:
        """Return the request together with the tokens generated so far."""
        # A ticket is valid for one engine only: its lease ended with the connection of the first engine.
        ticket = None if self.parts else self._request.ticket
        tokens, accepted = self._tokens, self.accepted
        return msgspec.structs.replace(
            self._request, generated=tuple(tokens), timeout_s=timeout_s, ticket=ticket, accepted=accepted
        )

    async def _chunks_from(
        self, index: int, client: EngineClient, request: GenerateRequest
    ) -> AsyncGenerator[Chunk, None]:
        repeated = self._scored  # prompt scores that an earlier engine has already delivered
        async with client.generate(request) as stream:
            self.parts.append(stream)
            self.at, self.place = (client, stream), Place(index, stream.id)
            timer = _call_after(request.timeout_s, self.overdue)
            try:
                async for chunk in stream:
                    if repeated and (scores := chunk.prompt_logprobs):
                        repeated, chunk.prompt_logprobs = max(0, repeated - len(scores)), scores[repeated:]
                    self._tokens += chunk.tokens
                    self._scored += len(chunk.prompt_logprobs)
                    yield chunk
            finally:
                self.at, self.place, stream.cause = None, None, self.cause
                if timer is not None:
                    timer.cancel()

    def _raise_if_final(self, error: EngineDead) -> None:
        """Raise if the stream cannot continue in another engine."""
        if self._request.export_kv:
            raise error  # the client may already have the ticket, which names the lost engine
        if self._stalled > MOST_MOVES:
            raise EngineDead(
                f"{self._stalled} engines were lost in a row before the next token; giving up"
            ) from error
        log.warning("a stream lost its engine after %d tokens and continues in another: %s", len(self._tokens), error)


def _time_left(timeout_s: float | None, began_s: float) -> float | None:
    """The remaining time of a request; never zero or less, so that the engine ends an overdue request itself."""
    if timeout_s is None:
        return None
    return max(timeout_s - (asyncio.get_running_loop().time() - began_s), 1e-3)


def _call_after(timeout_s: float | None, call: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Schedule `call` for a moment after the timeout, by which the engine should have ended the request."""
    if timeout_s is None:
        return None
    return asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, call)
