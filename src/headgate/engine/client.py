"""A client of one engine, on the event loop: `generate`, `call(command)` and `ping`.

Rules: leaving a stream before its terminal output sends exactly one abort. Requests and aborts of one turn of the
event loop travel as one message (at most `MOST_IDS` ids each); no timer delays them. When the engine is lost, every
open stream ends with EngineDead, once.

If the reader leaves a stream early, the stream is kept until the engine's terminal output arrives, because only that
output tells how many tokens were generated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from headgate.engine.channel import ClientChannel
from headgate.errors import EngineDead, RequestError
from headgate.protocol.command import Command, Result
from headgate.protocol.message import (
    CLIENT_SHIFT,
    PROTOCOL,
    Abort,
    CommandAnswer,
    CommandCall,
    EngineInfo,
    Hello,
    Ping,
    Pong,
    StepOutputs,
    Submit,
    Suspend,
    Welcome,
)
from headgate.protocol.output import Cause, Ended, Outputs, Refused
from headgate.protocol.plan import Logprobs, RoutedExperts
from headgate.protocol.request import GenerateRequest, Ticket
from headgate.turns import Turns

log = logging.getLogger(__name__)

MOST_IDS = 1024
WOKEN_AT_ONCE = 8  # readers per turn of the event loop, if there are several tenants
UNREAD_TOKENS = 16  # a stream with this many unread tokens suspends its sequence until they are read
CALL_TIMEOUT_S = 60.0  # longer than the default timeout of any command


@dataclass(slots=True)
class Chunk:
    """The tokens that have arrived since the last chunk; several if the reader was slow. The last has `ended` set."""

    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # version of the weights, one per token
    logprobs: list[Logprobs] = field(default_factory=list)  # one per token, if requested
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    ticket: Ticket | None = None  # names the KV of the prompt, if it is exported
    routed: list[RoutedExperts] = field(default_factory=list)  # if requested; positions may repeat
    vector: bytes | None = None  # of the prompt, with `ended`: float32, little-endian
    ended: Ended | None = None


class TokenStream:
    """The answer to one request, as an async iterator of chunks."""

    def __init__(self, id: int, resumed: int = 0) -> None:
        self.id = id
        self.made = 0  # tokens that the engine has generated, read or not; final when `settled`
        self.settled = False  # the terminal output has arrived, even if the reader has left
        self.on_settled: Callable[[], None] | None = None
        self.cause: Cause = "client_disconnect"  # the cause sent with the abort if the reader leaves early
        self.done = False  # the terminal output, a refusal or the loss of the engine has arrived
        self._left = False  # the reader no longer waits
        self._resumed = resumed  # generated tokens that the request already had
        self._chunk = Chunk()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready():
            if self.done or self._left:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk, self._chunk = self._chunk, Chunk()
        return chunk

    def _ready(self) -> bool:
        chunk = self._chunk
        return bool(chunk.tokens or chunk.prompt_logprobs or chunk.ticket) or chunk.ended is not None

    def add_token(self, token: int, version: int, logprobs: Logprobs | None) -> None:
        self.made += 1
        self._chunk.tokens.append(token)
        self._chunk.versions.append(version)
        if logprobs is not None:
            self._chunk.logprobs.append(logprobs)
        self._wake()

    def add_scores(self, scores: tuple[Logprobs, ...]) -> None:
        self._chunk.prompt_logprobs += scores
        self._wake()

    def add_routed(self, experts: tuple[RoutedExperts, ...]) -> None:
        self._chunk.routed += experts  # no reason to wake the reader, who needs them at the end

    def add_vector(self, vector: bytes) -> None:
        self._chunk.vector = vector  # its terminal output follows

    def add_ticket(self, ticket: Ticket) -> None:
        self._chunk.ticket = ticket
        self._wake()

    def finish(self, ended: Ended) -> None:
        self._chunk.ended = ended
        self.done = True
        self.made = ended.output_tokens - self._resumed
        self._settle()
        self._wake()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self.done = True
        self._settle()
        self._wake()

    def leave(self) -> None:
        """End the iteration after the chunks that have arrived; the terminal output still settles the stream."""
        self._left = True
        self._wake()

    def _settle(self) -> None:
        self.settled = True
        if self.on_settled is not None:
            self.on_settled()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SharedStream(TokenStream):
    """A stream that belongs to a tenant.

    Tenants take turns in having their readers woken; tokens that arrive meanwhile are read together. A stream with
    `UNREAD_TOKENS` unread tokens suspends its sequence.
    """

    def __init__(self, request: GenerateRequest, turns: Turns, suspend: Callable[[int, bool], None]) -> None:
        super().__init__(request.id, len(request.generated))
        self._tenant = request.tenant
        self._turns = turns
        self._suspend = suspend
        self._suspended = False
        self._queued = False  # a wake of the reader is queued

    async def __anext__(self) -> Chunk:
        chunk = await super().__anext__()
        if self._suspended:
            self._suspended = False
            self._suspend(self.id, False)
        return chunk

    def add_token(self, token: int, version: int, logprobs: Logprobs | None) -> None:
        super().add_token(token, version, logprobs)
        if not self._suspended and len(self._chunk.tokens) >= UNREAD_TOKENS:
            self._suspended = True
            self._suspend(self.id, True)

    def _wake(self) -> None:
        if self._waiter is not None and not (self._queued or self._waiter.done()):
            self._queued = True
            self._turns.call(self._tenant, self._wake_now)

    def _wake_now(self) -> None:
        self._queued = False
        super()._wake()


class EngineClient:
    """One client of one engine. Use `connected` to create one."""

    def __init__(
        self,
        channel: ClientChannel,
        client: int,
        info: EngineInfo,
        name: str = "the engine",
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.info = info
        self._name = name  # the engine's name in logs
        self.lost: EngineDead | None = None
        self._channel = channel
        self._client = client
        self._base = client << CLIENT_SHIFT
        self._numbers = count(1) if numbers is None else numbers
        self._calls = count(1)
        self._answers: dict[int, asyncio.Future[Result]] = {}
        self._pings = count(1)
        self._streams: dict[int, TokenStream] = {}
        self._left: dict[int, TokenStream] = {}  # streams that their readers left before the terminal output arrived
        self._pongs: dict[int, asyncio.Future[Pong]] = {}
        self._submits: list[GenerateRequest] = []
        self._aborts: dict[int, Cause] = {}
        self._suspends: dict[int, bool] = {}
        self._turns = Turns(WOKEN_AT_ONCE)

    def __repr__(self) -> str:
        return f"<EngineClient {len(self._streams)} streams{', lost' if self.lost else ''}>"

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenStream]:
        """Submit `request` under a new id and yield its stream; leaving the context early aborts the request."""
        stream = self._open(request)
        try:
            yield stream
        finally:
            self._close(stream)

    async def ping(self, timeout_s: float) -> Pong:
        """The engine's status; raises EngineDead or TimeoutError if it does not answer."""
        if self.lost is not None:
            raise self.lost
        number = next(self._pings)
        pong: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        self._pongs[number] = pong
        try:
            self._channel.send(Ping(number))
            return await asyncio.wait_for(pong, timeout_s)
        finally:
            del self._pongs[number]

    async def call(self, command: Command, timeout_s: float = CALL_TIMEOUT_S) -> Result:
        """Run `command` in the engine; raises EngineDead or TimeoutError if it does not answer."""
        if self.lost is not None:
            raise self.lost
        number = next(self._calls)
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            # Requests that were submitted before the command must reach the engine before the command does.
            self._send_submits()
            self._channel.send(CommandCall(self._client, number, command))
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._answers[number]

    def abort(self, id: int, cause: Cause) -> None:
        """Queue an abort of the request `id`; its stream still receives the terminal output."""
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts[id] = cause

    async def listen(self) -> None:
        """Deliver the engine's messages to streams and callers, until cancelled."""
        while True:
            match await self._channel.receive():
                case StepOutputs(outputs):
                    self._deliver(outputs)
                case Pong() as pong:
                    if (waiter := self._pongs.get(pong.number)) and not waiter.done():
                        waiter.set_result(pong)
                case CommandAnswer(number, result):
                    if (call := self._answers.get(number)) and not call.done():
                        call.set_result(result)
                case Welcome():
                    log.warning("the engine sent a second welcome message; it must have restarted")

    def lose(self, error: EngineDead) -> None:
        """End open streams and pending calls with `error`, because the engine is lost; later ones raise it at once."""
        self.lost = error
        streams = [*self._streams.values(), *self._left.values()]
        self._streams, self._left = {}, {}
        for stream in streams:
            stream.fail(error)
        waits: list[asyncio.Future[Any]] = [*self._answers.values(), *self._pongs.values()]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(error)

    # -- sending ----------------------------------------------------------------

    def _open(self, request: GenerateRequest) -> TokenStream:
        if self.lost is not None:
            raise self.lost
        request = msgspec.structs.replace(request, id=self._base | next(self._numbers))
        stream = self._streams[request.id] = self._stream(request)
        if not self._submits:
            asyncio.get_running_loop().call_soon(self._send_submits)
        self._submits.append(request)
        return stream

    def _stream(self, request: GenerateRequest) -> TokenStream:
        if request.tenant:
            return SharedStream(request, self._turns, self._suspend)
        return TokenStream(request.id, len(request.generated))

    def _close(self, stream: TokenStream) -> None:
        # The stream leaves `_streams` when its abort is queued, so that no abort is sent twice.
        if self._streams.pop(stream.id, None) is not None and not stream.done:
            self._left[stream.id] = stream
            self.abort(stream.id, stream.cause)

    def _take(self, id: int) -> TokenStream | None:
        """Remove and return the stream whose terminal output or refusal has arrived."""
        return self._streams.pop(id, None) or self._left.pop(id, None)

    def _send_submits(self) -> None:
        requests, self._submits = self._submits, []
        for i in range(0, len(requests), MOST_IDS):
            self._send_submit(Submit(requests[i : i + MOST_IDS]))

    def _send_submit(self, submit: Submit) -> None:
        try:
            self._channel.send(submit)
        except EngineDead as error:
            for request in submit.requests:
                if stream := self._take(request.id):
                    stream.fail(error)

    def _send_aborts(self) -> None:
        # An abort must not overtake its own request.
        self._send_submits()
        aborts, self._aborts = self._aborts, {}
        for cause in dict.fromkeys(aborts.values()):
            ids = [id for id, why in aborts.items() if why == cause]
            for i in range(0, len(ids), MOST_IDS):
                self._send_abort(Abort(ids[i : i + MOST_IDS], cause))

    def _send_abort(self, abort: Abort) -> None:
        try:
            self._channel.send(abort)
        except EngineDead as error:
            # No caller waits for an abort, so the failure is only logged.
            log.warning(
                "%s cannot be sent an abort (%s) of %s: %s",
                self._name,
                abort.cause,
                ", ".join(map(str, abort.ids)),
                error,
            )

    def _suspend(self, id: int, suspended: bool) -> None:
        if not self._suspends:
            asyncio.get_running_loop().call_soon(self._send_suspends)
        self._suspends[id] = suspended

    def _send_suspends(self) -> None:
        suspends, self._suspends = self._suspends, {}
        for suspended in (True, False):
            ids = [id for id, asked in suspends.items() if asked is suspended]
            for i in range(0, len(ids), MOST_IDS):
                with suppress(EngineDead):  # `lose` reports the error to every stream
                    self._channel.send(Suspend(ids[i : i + MOST_IDS], suspended))

    # -- receiving --------------------------------------------------------------

    def _deliver(self, outputs: Outputs) -> None:
        streams, logprobs, version = self._streams, outputs.logprobs, outputs.version
        for i, (id, token) in enumerate(zip(outputs.ids, outputs.tokens, strict=True)):
            if stream := streams.get(id):
                stream.add_token(token, version, logprobs.get(i) if logprobs else None)
        for id, scores in outputs.prompt_logprobs.items():
            if stream := streams.get(id):
                stream.add_scores(scores)
        for id, experts in outputs.routed.items():
            if stream := streams.get(id):
                stream.add_routed(experts)
        for id, vector in outputs.vectors.items():
            if stream := streams.get(id):
                stream.add_vector(vector)
        for id, ticket in outputs.tickets.items():
            if stream := streams.get(id):
                stream.add_ticket(ticket)
        for ended in outputs.ended:
            if stream := self._take(ended.id):
                stream.finish(ended)
        for refused in outputs.refused:
            if stream := self._take(refused.id):
                stream.fail(_error(refused))


def _error(refused: Refused) -> RequestError:
    error = RequestError(refused.message, param=refused.param, code=refused.code)
    error.status = refused.status
    return error


@asynccontextmanager
async def connected(
    address: str, client: int, timeout_s: float, numbers: Iterator[int] | None = None
) -> AsyncIterator[EngineClient]:
    """Connect to the engine at `address` and yield its client after the handshake.

    `numbers` are the numbers in the ids of its requests; by default, they count from 1.
    """
    channel = ClientChannel(address, client)
    try:
        channel.send(Hello(PROTOCOL, client))
        try:
            welcome = await asyncio.wait_for(channel.receive(), timeout_s)
        except TimeoutError:
            raise EngineDead(f"the engine at {address} has not answered in {timeout_s:g} s") from None
        if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
            raise EngineDead(f"the engine at {address} does not speak protocol {PROTOCOL}")
        engine = EngineClient(channel, client, welcome.info, f"the engine at {address}", numbers)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(engine.listen())
            try:
                yield engine
            finally:
                engine.lose(EngineDead("the connection to the engine was closed"))
                listening.cancel()
    finally:
        channel.close()
