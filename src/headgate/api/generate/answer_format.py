"""Answer formats: how one API writes an answer. A format turns pieces into bytes and depends on no engine or connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.api.generate.wire import error_event
from headgate.errors import HeadgateError


class AnswerFormat(Protocol):
    """Writes the answer to one request: either `whole`, or a stream of `event`s and then `closing` or `failure`."""

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        """The events for one piece; empty if the piece adds nothing."""

    def closing(self) -> bytes: ...

    def failure(self, error: HeadgateError) -> bytes: ...

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes: ...


@runtime_checkable
class ResumableFormat(Protocol):
    """An answer format whose streams another server can continue."""

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        """Set the state that the format would have after writing `piece`."""


class WholeFormat:
    """The format of answers that are never streamed; `compose` writes one."""

    def __init__(self, compose: Callable[[Sequence[ChoiceJob], Sequence[Piece]], bytes]) -> None:
        self.whole = compose

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        raise NotImplementedError

    def closing(self) -> bytes:
        raise NotImplementedError

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)
