"""The parts of an answer that chat and completions write alike: the stream's frame, its end, and the usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.serve import RequestContext
from headgate.api.generate.usage import usage_of, usage_so_far
from headgate.api.generate.wire import EventFrame, cut_problem, cut_short, error_event, usage_asked, usage_in_chunks
from headgate.api.state import Api
from headgate.contract.answers import Usage
from headgate.contract.errors import Problem
from headgate.contract.event_json import encode
from headgate.contract.schema import Sampled
from headgate.contract.tickets import kept_kv
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError


class ChoicesFormat(ABC):
    """`fast_path`: the pieces of a choice, between its first and its last, add nothing but text."""

    # The JSON of a choice before and after the text of a piece, on the fast path.
    before_text: ClassVar[bytes]  # with %d for the index
    after_text: ClassVar[bytes]

    def __init__(
        self, api: Api, body: Sampled, n: int, context: RequestContext, *, prefix: str, object: str, fast_path: bool
    ) -> None:
        self._api, self._n, self._context = api, n, context
        self._id = context.id(prefix)
        self._with_usage = usage_asked(body.stream_options)
        self._usage_in_chunks = usage_in_chunks(body.stream_options)
        self._fast_path = fast_path and not self._usage_in_chunks
        # The tokenizer that spells tokens in log-probabilities; None: they are written as ids.
        self._spelling = None if body.return_tokens_as_token_ids else api.tokenizer
        self._transfer = body.kv_transfer_params
        self._counts: dict[int, int] = {}  # tokens so far, by choice; kept if every chunk reports them
        self._finishes: dict[int, Finish] = {}
        self._begun: dict[int, tuple[bytes, bytes]] = {}  # by choice: the bytes before and after the text of a piece
        head = {"id": self._id, "object": object, "created": context.created, "model": api.model_name}
        self._frame = EventFrame(head, with_usage=self._with_usage)

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        begun = self._begun.get(job.index)
        if begun is not None and self._fast_path and piece.finish is None:
            # Runs for nearly every token: keep it short.
            return begun[0] + encode(piece.text) + begun[1] if piece.text else b""
        return self._full_event(job, piece, first=begun is None)

    @abstractmethod
    def _full_event(self, job: ChoiceJob, piece: Piece, *, first: bool) -> bytes: ...

    def _chunk(self, job: ChoiceJob, piece: Piece, choice: msgspec.Struct, **more: Any) -> bytes:
        if self._usage_in_chunks:
            self._count(job, piece)
            more["usage"] = usage_so_far(job, piece, self._counts[job.index])
        return self._frame.event(choice, **more) + self._cut_event(piece)

    def _count(self, job: ChoiceJob, piece: Piece) -> None:
        self._counts[job.index] = self._counts.get(job.index, len(job.request.generated)) + len(piece.tokens)

    def _begin(self, job: ChoiceJob) -> None:
        self._begun[job.index] = self._frame.around(self.before_text % job.index, self.after_text)

    def _cut_event(self, piece: Piece) -> bytes:
        """The error event after a choice that was cut short, for clients that accept only OpenAI's values."""
        error = cut_short(piece.finish) if piece.finish and self._context.strict else None
        return error_event(error) if error else b""

    def closing(self) -> bytes:
        return (self._frame.usage(self._usage()) if self._with_usage else b"") + DONE

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)

    def _envelope(self, answers: Sequence[Piece]) -> dict[str, Any]:
        """The fields of a complete answer other than its choices, which must have been built before."""
        return {
            "id": self._id,
            "created": self._context.created,
            "model": self._api.model_name,
            "usage": self._usage(),
            "kv_transfer_params": kept_kv(self._transfer, answers[0].ticket, self._api.engines.info.block_size),
            "error": self._first_problem() if self._context.strict else UNSET,
        }

    def _first_problem(self) -> Problem | UnsetType:
        return next((problem for finish in self._finishes.values() if (problem := cut_problem(finish))), UNSET)

    def _usage(self) -> Usage:
        return usage_of([finish for _, finish in sorted(self._finishes.items())], self._n)
