"""One choice: from the engine's tokens to what may be shown of them, and to its end.

`Speech` is pure: chunks in, pieces out. A piece holds exactly the tokens that count, up to the one that completed a stop
string; the text of all pieces adds up to the text of the answer, whatever the chunks were cut like. The last piece, and
no other, has `finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headgate.api.sse import innermost
from headgate.api.state import Api, ChunkStream
from headgate.engine.client import Chunk
from headgate.errors import EngineDead
from headgate.protocol.output import Cause, Ended, FinishReason
from headgate.protocol.plan import Logprobs
from headgate.protocol.request import GenerateRequest
from headgate.text.detokenizer import Detokenizer
from headgate.text.stops import StopStrings
from headgate.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headgate.api.ledger import Record

# These end with a token that is not part of the text.
STOP_TOKEN_CAUSES = ("eos", "stop_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to make."""

    index: int
    request: GenerateRequest
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    delivered_chars: int = 0
    prompt_text: str | None = None  # to be repeated before the answer


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Piece:
    """What one chunk adds to an answer; a whole answer is the sum of its pieces."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights, one per token
    logprobs: list[Logprobs] = field(default_factory=list)  # one per token, if asked
    offsets: list[int] = field(default_factory=list)  # in the text, where each token begins; with logprobs only
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.versions += piece.versions
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish = piece.finish


class Speech:
    """The words of one choice."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None) -> None:
        request = job.request
        self._job = job
        self._detokenizer = None if tokenizer is None else _detokenizer(job, tokenizer)
        self._stops = StopStrings(job.stop, include_stop=job.include_stop)
        self._scored = request.sampling.logprobs is not None
        self._by_token = self._scored or bool(job.stop)
        self._output_tokens = len(request.generated)
        self._chars = 0

    @property
    def stopped(self) -> bool:
        """A stop string has come; what the engine still says does not count."""
        return self._stops.matched is not None

    def hear(self, chunk: Chunk) -> Piece:
        ended = chunk.ended
        if self.stopped:
            return Piece(finish=None if ended is None else self.finish(ended))
        piece = Piece("", chunk.tokens, chunk.versions, chunk.logprobs, [], chunk.prompt_logprobs)
        if self._detokenizer is not None:
            spoken = chunk.tokens
            if ended is not None and ended.cause in STOP_TOKEN_CAUSES and not self._job.include_stop:
                spoken = spoken[:-1]
            piece.text = self._say_each(piece, spoken) if self._by_token else self._detokenizer.push(spoken)
        self._output_tokens += len(piece.tokens)
        if ended is not None:
            if ended.finish_reason != "pd_reschedule":
                piece.text += self.rest()
            piece.finish = self.finish(ended)
        return piece

    def finish(self, ended: Ended) -> Finish:
        """How it ended: by a stop string if there was one, else as the engine says."""
        if self.stopped:
            return Finish("stop", "stop_string", ended.prompt_tokens, ended.cached_tokens, self._output_tokens)
        return Finish(ended.finish_reason, ended.cause, ended.prompt_tokens, ended.cached_tokens, ended.output_tokens)

    def cut(self, cause: Cause) -> Finish:
        """How it ended, if the engine did not live to say so."""
        reason: FinishReason = "stop" if self.stopped else "abort"
        return Finish(reason, cause, len(self._job.request.prompt), 0, self._output_tokens)

    def _say_each(self, piece: Piece, spoken: Sequence[int]) -> str:
        """Token by token, so that a stop string cuts the piece after the token that completed it."""
        assert self._detokenizer is not None
        # Text of resumed tokens comes first, and may complete a stop string by itself.
        text = self._push(self._detokenizer.push(()))
        for heard, token in enumerate(spoken):
            if self.stopped:
                _cut(piece, heard)
                return text
            if self._scored:
                piece.offsets.append(self._chars)
            text += self._push(self._detokenizer.push((token,)))
        if self.stopped:
            _cut(piece, len(spoken))
        elif self._scored:
            piece.offsets += [self._chars] * (len(piece.tokens) - len(spoken))
        return text

    def _push(self, delta: str) -> str:
        self._chars += len(delta)
        return self._stops.push(delta)

    def rest(self) -> str:
        """Text that was held back in case more came."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()


def _detokenizer(job: Job, tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        prompt_ids=job.request.prompt,
        generated=job.request.generated,
        delivered_chars=job.delivered_chars,
        skip_special=job.skip_special,
    )


def _cut(piece: Piece, tokens: int) -> None:
    del piece.tokens[tokens:], piece.versions[tokens:], piece.logprobs[tokens:]


Tell = Callable[[Job, Piece], Awaitable[None]]


async def run(api: Api, record: Record, job: Job, tell: Tell) -> None:
    """Make one choice, telling its pieces as they come."""
    record.prompt(len(job.request.prompt), job.index)
    speech = Speech(job, api.tokenizer)
    try:
        async with api.engines.generate(job.request) as stream:
            record.begin(job.index, stream)
            await _listen(stream, speech, record, job, tell)
    except EngineDead:
        note(record, job, speech.cut("engine_lost"))
        raise


async def _listen(stream: ChunkStream, speech: Speech, record: Record, job: Job, tell: Tell) -> None:
    async for chunk in stream:
        ending = speech.stopped
        piece = speech.hear(chunk)
        if piece.tokens:
            record.tokens(len(piece.tokens), job.index)
        if piece.finish is not None:
            note(record, job, piece.finish)
            await tell(job, piece)
            return
        if speech.stopped and not ending:
            stream.end("stop_string")  # the terminal output still comes, and says what was cached
        if piece.tokens or piece.text or piece.prompt_logprobs:
            await tell(job, piece)
    # No engine had it yet, or its engine died after it had been told to end this and before it could confirm.
    finish = speech.cut(stream.cause)
    note(record, job, finish)
    await tell(job, Piece(speech.rest(), finish=finish))


def note(record: Record, job: Job, finish: Finish) -> None:
    record.finish(
        job.index,
        finish.reason,
        finish.cause,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        output_tokens=finish.output_tokens,
    )


async def run_all(api: Api, record: Record, jobs: Sequence[Job], tell: Tell) -> None:
    """Make all choices at once; the first failure ends them all."""
    if len(jobs) == 1:
        return await run(api, record, jobs[0], tell)
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(run(api, record, job, tell))
    except BaseExceptionGroup as failures:
        raise innermost(failures) from None


async def collect(api: Api, record: Record, jobs: Sequence[Job]) -> list[Piece]:
    """All choices, whole, in the order of `jobs`."""
    answers = {job.index: Piece() for job in jobs}

    async def keep(job: Job, piece: Piece) -> None:
        answers[job.index].add(piece)

    await run_all(api, record, jobs, keep)
    return list(answers.values())
