"""The interface between the API and its engines: what handlers and the ledger require of them.

`headgate.engine.replicas` implements it; tests use fakes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from headgate.engine.client import Chunk
from headgate.engine.moving_stream import Place
from headgate.errors import HeadgateError
from headgate.protocol.command import Command, Pause, Result, Resume
from headgate.protocol.message import EngineInfo
from headgate.protocol.output import Cause
from headgate.protocol.request import GenerateRequest


class ChunkStream(Protocol):
    """The output of an engine for one choice. Leaving the stream early aborts the choice with `cause`."""

    cause: Cause

    place: Place | None  # the engine and sequence that compute it; None before an engine has it

    @property
    def made(self) -> int:
        """Tokens that engines have generated for it, delivered or not; final once `settled`."""

    @property
    def settled(self) -> bool:
        """True once no engine will send more output for this stream."""

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` each time an engine sends its last output for this stream."""

    def end(self, cause: Cause) -> None:
        """Request the end; the terminal output still follows."""

    def end_at(self, cause: Cause) -> Place | None:
        """Like `end`, but the caller has to stop the sequence at the returned place."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...


class Engines(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> int:
        """The version of the weights that an engine needs to receive requests."""

    @property
    def asked(self) -> Pause | Resume | None:
        """The last pause or resume of all engines."""

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[ChunkStream]: ...

    async def stop_at(self, places: Collection[Place], cause: Cause, timeout_s: float) -> set[Place]:
        """End the sequences at `places`. Returns the places that still own something after the timeout."""

    async def call_all(self, command: Command, timeout_s: float = ...) -> dict[int, Result | HeadgateError]:
        """Send `command` to every engine. Returns the results by engine."""
