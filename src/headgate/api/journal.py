"""The journal: an answer that says, beside what its client sees, all that another server needs to go on with it.

It is written in comments between the events, which clients skip, so a router can pass the bytes on as they are:

    :p TOKENS                          how long the prompts are together; once, before the first tokens
    :j INDEX VERSION CHARS ID,ID,...   tokens of a choice, and how many characters of it the client has with this block
    :f INDEX REASON CAUSE PROMPT_TOKENS CACHED_TOKENS OUTPUT_TOKENS   a choice has ended
    :e STATUS                          the answer has failed; the status that this would have had at its beginning
    :m LINE                            withheld: a line for the client if no server goes on, or one of the above about it
    :+                                 this block is none without the next one

A block, up to its empty line, is the unit: whoever reads the journal passes it on whole or, if its end never comes, not
at all.
The end of a choice that was not asked for is withheld. Its `:f` line names the true reason, whatever the client's own
words for it are (`X-OpenAI-Strict`). docs/decisions/0006-the-journal.md has the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from starlette.requests import Request

from headgate.api.generation import Finish, Job, Piece
from headgate.api.wire import error_event
from headgate.contract.errors import status_of
from headgate.edge.sse import Reply
from headgate.errors import EngineDead, HeadgateError, RequestError

if TYPE_CHECKING:
    from headgate.api.serve import Dialect

HEADER = "X-Headgate-Journal"
MOVABLE_CAUSES = frozenset(("pause", "shutdown", "preempted", "transfer_failed", "engine_lost"))
WHOLE_EVERY_S = 0.05  # how often an answer that is told whole tells of its tokens


@runtime_checkable
class Resumable(Protocol):
    """A dialect whose streams another server can go on with."""

    def prime(self, job: Job, piece: Piece) -> None:
        """Be as if `piece` had been told here."""


def asked_at(request: Request) -> int | None:
    """When the answer was asked for first, in seconds since 1970; None if no journal is wanted."""
    value = request.headers.get(HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise RequestError("must be a time in seconds since 1970", param=HEADER)
    return int(value)


def seed_of(request_id: str) -> int:
    """The same on every server, so that an answer without a seed of its own goes on in the same random stream."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) >> 1


class StreamJournal:
    """A stream, event by event."""

    def __init__(self, dialect: Dialect, reply: Reply, jobs: Sequence[Job]) -> None:
        self._dialect, self._reply = dialect, reply
        self._opening = prompt_line(jobs)  # of the first block that is not withheld
        self._chars: dict[int, int] = {}  # of the text of each choice, that the client has
        self._veiled = False

    async def tell(self, job: Job, piece: Piece) -> None:
        if piece.told:
            self._prime(job, piece)
            return
        event = self._dialect.event(job, piece)
        chars = self._chars[job.index] = self._chars.get(job.index, 0) + len(piece.text)
        if movable(piece.finish):
            # The last tokens go unsaid with it: whoever goes on makes them again, and their event.
            self._veiled = True
            self._reply.given_back |= is_given_back(piece.finish)
            await self._reply.send_event(veil(token_lines(job, piece, chars) + finish_line(job, piece) + event))
            return
        if block := token_lines(job, piece, chars) + self._finish(job, piece, event):
            block, self._opening = self._opening + block, b""
            await self._reply.send_event(block if event else block + b"\n")

    def _finish(self, job: Job, piece: Piece, event: bytes) -> bytes:
        return event if piece.finish is None else finish_line(job, piece) + bound(event)

    def _prime(self, job: Job, piece: Piece) -> None:
        assert isinstance(self._dialect, Resumable)
        self._dialect.prime(job, piece)
        self._chars[job.index] = len(piece.text)

    async def close(self) -> None:
        closing = self._dialect.closing()
        await self._reply.end(veil(closing) if self._veiled else bound(closing))

    async def fail(self, error: HeadgateError) -> None:
        await self._reply.end(failure(error, self._dialect.failure(error)))


class WholeJournal:
    """An answer that is told whole: its tokens as they come, and then one event, which is the answer."""

    def __init__(self, dialect: Dialect, reply: Reply, jobs: Sequence[Job]) -> None:
        self._dialect, self._reply, self._jobs = dialect, reply, jobs
        self._answers = {job.index: Piece() for job in jobs}
        self._opening = prompt_line(jobs)
        self._lines = b""
        self._clock = asyncio.get_running_loop().time
        self._sent_s = -inf
        self._withheld = b""  # ends that are not final, as `:f` lines

    async def tell(self, job: Job, piece: Piece) -> None:
        self._answers[job.index].add(piece)
        if piece.told:
            return
        self._lines += token_lines(job, piece, 0)
        if movable(piece.finish):
            self._withheld += finish_line(job, piece)
            self._reply.given_back |= is_given_back(piece.finish)
        else:
            self._lines += finish_line(job, piece)
        now_s = self._clock()
        if self._lines and (piece.finish is not None or now_s - self._sent_s >= WHOLE_EVERY_S):
            self._sent_s = now_s
            await self._reply.send_event(self._take_lines() + b"\n")

    async def close(self) -> None:
        answer = b"data: " + self._dialect.whole(self._jobs, list(self._answers.values())) + b"\n\n"
        await self._reply.end(veil(self._withheld + answer) if self._withheld else answer)

    async def fail(self, error: HeadgateError) -> None:
        if self._lines:
            await self._reply.send_event(self._take_lines() + b"\n")
        await self._reply.end(failure(error, error_event(error)))

    def _take_lines(self) -> bytes:
        lines, self._opening, self._lines = self._opening + self._lines, b"", b""
        return lines


# ------------------------------------------------------------------------------------------------------------- lines


def prompt_line(jobs: Sequence[Job]) -> bytes:
    """A prompt counts once, whatever the number of its choices, which come one after another."""
    prompts = [job.request.prompt for job in jobs]
    lengths = [len(prompt) for i, prompt in enumerate(prompts) if not i or prompt is not prompts[i - 1]]
    return b":p %d\n" % sum(lengths)


def token_lines(job: Job, piece: Piece, chars: int) -> bytes:
    """One line for each version of the weights."""
    made = groupby(zip(piece.versions, piece.tokens, strict=True), itemgetter(0))
    return b"".join(
        b":j %d %d %d %b\n" % (job.index, version, chars, b",".join(b"%d" % id for _, id in ids))
        for version, ids in made
    )


def finish_line(job: Job, piece: Piece) -> bytes:
    if (finish := piece.finish) is None:
        return b""
    why = finish.reason.encode(), finish.cause.encode()
    return b":f %d %b %b %d %d %d\n" % (
        *(job.index, *why),
        *(finish.prompt_tokens, finish.cached_tokens, finish.output_tokens),
    )


def failure(error: HeadgateError, event: bytes) -> bytes:
    # What cannot be served here now may well be elsewhere; what is wrong with the request is wrong everywhere.
    status = status_of(error)
    return b":e %d\n" % status + (veil(event) if status == 503 or isinstance(error, EngineDead) else event)


def bound(events: bytes) -> bytes:
    """Several events as one block: nobody could say which of them a client has."""
    *firsts, last, _ = events.split(b"\n\n")
    return b"".join(b":+\n%b\n\n" % first for first in firsts) + last + b"\n\n"


def veil(event: bytes) -> bytes:
    """A block that says nothing to a client. Without the `:m ` of its lines it is `event` again."""
    return b"".join(b":m %b\n" % line for line in event.split(b"\n")[:-1]) + b"\n"


def movable(finish: Finish | None) -> bool:
    """Whether it ended here and not for good."""
    if finish is None:
        return False
    return is_given_back(finish) or (finish.reason == "abort" and finish.cause in MOVABLE_CAUSES)


def is_given_back(finish: Finish | None) -> bool:
    """Whether there was no room for it."""
    return finish is not None and finish.reason == "pd_reschedule"
