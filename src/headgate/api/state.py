"""What every handler is given: the engines, the words, the limits, and the ledger in which requests are written.

One `Api` per process, made once and put into `app.state.api`; nothing in it changes while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from headgate.edge.admission import Admission
from headgate.edge.departures import Departures
from headgate.engine.client import Chunk
from headgate.engine.replicas import Place
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.command import Command, Pause, Result, Resume
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest
from headgate.text.template import ChatTemplate
from headgate.text.tokenizer import Tokenizer
from headgate.text.tools import ToolFormat

if TYPE_CHECKING:
    from starlette.requests import Request

    from headgate.api.accounting.ledger import Ledger

log = logging.getLogger(__name__)

T = TypeVar("T")

# Shorter inputs are tokenised on the event loop: that takes less time than going to a thread and back.
LONG_TEXT = 4096
TEXT_THREADS = 2
TEXT_QUEUE = 1024  # texts that may wait for a thread


class ChunkStream(Protocol):
    """The answer to one request. Leaving it early aborts the request, under the name in `cause`."""

    cause: Cause

    place: Place | None  # where it is being made; None if no engine has it

    @property
    def made(self) -> int:
        """Tokens that engines have told of it, heard or not; final when `settled`."""

    @property
    def settled(self) -> bool: ...

    def when_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called at every last word of an engine that is still to come."""

    def end(self, cause: Cause) -> None:
        """Ask for the end; the terminal output still comes."""

    def end_at(self, cause: Cause) -> Place | None:
        """The same, but telling the engine at that place is left to the caller."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...


class Engines(Protocol):
    """What the API asks of engines; `headgate.engine.replicas.Replicas` is one."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> int:
        """Of the weights that engines must hold to be given requests."""

    @property
    def asked(self) -> Pause | Resume | None:
        """Of all engines, last."""

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[ChunkStream]: ...

    async def stop_at(self, places: Collection[Place], cause: Cause, timeout_s: float) -> set[Place]:
        """End what is made there and see home all it owns; where something is still owned when time is up."""

    async def call_all(self, command: Command, timeout_s: float = ...) -> dict[int, Result | HeadgateError]:
        """Have every engine carry out `command`; what became of it, by engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    max_choices: int = 64  # answers to one request: its prompts times n
    keep_alive_s: float = 15.0  # a stream is never silent for longer


@dataclass(frozen=True, kw_only=True)
class Api:
    engines: Engines
    ledger: Ledger
    model_name: str
    created: int  # when the model was loaded, in seconds since 1970
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    tool_format: ToolFormat = ToolFormat.HERMES  # how the model writes tool calls
    settings: ApiSettings = ApiSettings()
    departures: Departures = field(default_factory=lambda: Departures(log))
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
    )
    turns: Admission = field(init=False)  # who may use the pool

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", Admission(TEXT_THREADS, TEXT_QUEUE, self.ledger.sharing))

    @property
    def words(self) -> Tokenizer:
        """The tokenizer, for those who cannot do without."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; send and ask for token ids")
        return self.tokenizer

    async def off_loop(self, share: str, size: int, work: Callable[[], T]) -> T:
        """Do `work` on `size` characters or tokens: at once if they are few, in a thread if they are many.

        Threads are shared among tenants as places are; `share` is the caller's.
        """
        if size < LONG_TEXT:
            return work()
        self.ledger.sharing.takes(share)
        await self.turns.enter(share)
        working = asyncio.get_running_loop().run_in_executor(self.pool, work)
        working.add_done_callback(lambda done: self._leave(share, done))
        # A caller that leaves does not stop a thread, which keeps its place until it is done.
        return await asyncio.shield(working)

    def _leave(self, share: str, done: asyncio.Future[T]) -> None:
        self.turns.leave(share)
        if not done.cancelled():
            done.exception()  # is the caller's to hear, if it is still there


def api_of(request: Request) -> Api:
    api: Api = request.app.state.api
    return api
