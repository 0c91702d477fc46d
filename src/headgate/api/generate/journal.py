"""Writes a journal into an answer, streamed or complete; `contract/journal.py` defines its grammar.

An end that another server may continue from is withheld. Its `:f` line has the actual finish reason, even if the client
requested only OpenAI's values (`X-OpenAI-Strict`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf

from starlette.requests import Request

from headgate.api.generate.answer_format import AnswerFormat, ResumableFormat
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.contract import journal
from headgate.contract.errors import status_of
from headgate.contract.journal import HEADER, RESCHEDULED, bind, is_movable, token_lines, withhold
from headgate.edge.sse import ResponseWriter
from headgate.errors import EngineDead, HeadgateError, RequestError

Report = Callable[[HeadgateError], bytes]  # the event that reports an error

WHOLE_EVERY_S = 0.05  # how often the journal of a complete answer is sent while it is generated


def asked_at(request: Request) -> int | None:
    """The Unix time in the header `X-Headgate-Journal`; None if the header is absent: the caller wants no journal."""
    value = request.headers.get(HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise RequestError("must be a time in seconds since 1970", param=HEADER)
    return int(value)


def seed_of(request_id: str) -> int:
    """The seed of a request that has none: the same on every server, so that a resumed answer samples identically."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) >> 1


class StreamJournal:
    """Writes a stream with its journal, event by event."""

    def __init__(self, answer_format: AnswerFormat, writer: ResponseWriter, jobs: Sequence[ChoiceJob]) -> None:
        self._format, self._writer = answer_format, writer
        self._opening = prompt_line(jobs)  # written with the first block that is not withheld
        self._chars: dict[int, int] = {}  # characters that the client has, by choice
        self._withholds = False

    async def send(self, job: ChoiceJob, piece: Piece) -> None:
        if piece.delivered:
            self._prime(job, piece)
            return
        event = self._format.event(job, piece)
        chars = self._chars[job.index] = self._chars.get(job.index, 0) + len(piece.text)
        lines = token_lines(job.index, piece.versions, piece.tokens, chars)
        if movable(piece.finish):
            # The last tokens are withheld too: the server that continues generates them and their event again.
            self._withholds = True
            self._writer.given_back |= is_given_back(piece.finish)
            await self._writer.send_event(withhold(lines + finish_line(job, piece) + event))
            return
        if block := lines + self._finish(job, piece, event):
            block, self._opening = self._opening + block, b""
            await self._writer.send_event(block if event else block + b"\n")

    def _finish(self, job: ChoiceJob, piece: Piece, event: bytes) -> bytes:
        return finish_line(job, piece) + bind(event)

    def _prime(self, job: ChoiceJob, piece: Piece) -> None:
        assert isinstance(self._format, ResumableFormat)
        self._format.prime(job, piece)
        self._chars[job.index] = len(piece.text)

    async def close(self) -> None:
        closing = self._format.closing()
        await self._writer.end(withhold(closing) if self._withholds else bind(closing))

    async def fail(self, error: HeadgateError) -> None:
        await self._writer.end(failure(error, self._format.failure(error)))


class WholeJournal:
    """Writes a complete answer with its journal: token lines while it is generated, then the answer as one event."""

    def __init__(
        self, answer_format: AnswerFormat, writer: ResponseWriter, jobs: Sequence[ChoiceJob], report: Report
    ) -> None:
        self._format, self._writer, self._jobs, self._report = answer_format, writer, jobs, report
        self._answers = {job.index: Piece() for job in jobs}
        self._opening = prompt_line(jobs)
        self._lines = b""
        self._clock = asyncio.get_running_loop().time
        self._sent_s = -inf
        self._withheld = b""  # `:f` lines of ends that are not final

    async def send(self, job: ChoiceJob, piece: Piece) -> None:
        self._answers[job.index].add(piece)
        if piece.delivered:
            return
        self._lines += token_lines(job.index, piece.versions, piece.tokens, 0)
        if movable(piece.finish):
            self._withheld += finish_line(job, piece)
            self._writer.given_back |= is_given_back(piece.finish)
        else:
            self._lines += finish_line(job, piece)
        now_s = self._clock()
        if self._lines and (piece.finish is not None or now_s - self._sent_s >= WHOLE_EVERY_S):
            self._sent_s = now_s
            await self._writer.send_event(self._take_lines() + b"\n")

    async def close(self) -> None:
        answer = b"data: " + self._format.whole(self._jobs, list(self._answers.values())) + b"\n\n"
        await self._writer.end(withhold(self._withheld + answer) if self._withheld else answer)

    async def fail(self, error: HeadgateError) -> None:
        if self._lines:
            await self._writer.send_event(self._take_lines() + b"\n")
        await self._writer.end(failure(error, self._report(error)))

    def _take_lines(self) -> bytes:
        lines, self._opening, self._lines = self._opening + self._lines, b"", b""
        return lines


# ------------------------------------------------------------------------------------------------------------- lines


def prompt_line(jobs: Sequence[ChoiceJob]) -> bytes:
    """A prompt counts once for all its choices, which are adjacent in `jobs`."""
    prompts = [job.request.prompt for job in jobs]
    lengths = [len(prompt) for i, prompt in enumerate(prompts) if not i or prompt is not prompts[i - 1]]
    return journal.prompt_line(sum(lengths))


def finish_line(job: ChoiceJob, piece: Piece) -> bytes:
    if (finish := piece.finish) is None:
        return b""
    counts = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
    return journal.finish_line(job.index, finish.reason, finish.cause, *counts)


def failure(error: HeadgateError, event: bytes) -> bytes:
    # Another server may be able to serve what this one cannot, but it would refuse an invalid request too.
    status = status_of(error)
    may_move = status == 503 or isinstance(error, EngineDead)
    return journal.failure_line(status) + (withhold(event) if may_move else event)


def movable(finish: Finish | None) -> bool:
    """Whether another server may continue the choice."""
    return finish is not None and is_movable(finish.reason, finish.cause)


def is_given_back(finish: Finish | None) -> bool:
    """Whether the choice goes on elsewhere: the engine had no room for it, or a router has begun another attempt."""
    return finish is not None and (finish.reason == RESCHEDULED or finish.cause == "superseded")
