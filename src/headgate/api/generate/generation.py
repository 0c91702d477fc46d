"""One choice: from the engine's tokens to what may be shown of them, and to its end.

`ChoiceText` is pure: chunks in, pieces out. A piece holds exactly the tokens that count, up to the one that completed a
stop string; the text of all pieces adds up to the text of the answer, whatever the chunks were cut like. The last piece,
and no other, has `finish`.

A choice that another server has begun is replayed: `ChoiceText` says all of it again, and what the client has of it is told
as one piece that is marked so. From there on it is as if this server had said it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from headgate.api.accounting.ledger import Record
from headgate.api.engines import ChunkStream
from headgate.api.state import Api
from headgate.edge.sse import innermost
from headgate.engine.client import Chunk
from headgate.errors import EngineDead, RequestError
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.plan import Logprobs
from headgate.protocol.request import GenerateRequest, Ticket
from headgate.text.detokenizer import Detokenizer
from headgate.text.stops import StopStrings
from headgate.text.tokenizer import Tokenizer

BEGUN_AT_ONCE = 4  # choices of a request

# These end with a token that is not part of the text.
STOP_TOKEN_CAUSES = ("eos", "stop_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceJob:
    """One choice to make."""

    index: int
    request: GenerateRequest
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    delivered_chars: int = 0
    prompt_text: str | None = None  # to be repeated before the answer
    resumed: Resumed | None = None

    @property
    def rest(self) -> GenerateRequest:
        """What there is left for an engine to do."""
        if self.resumed is None:
            return self.request
        return structs.replace(self.request, generated=self.request.generated + self.resumed.token_ids)


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    cause: Cause
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop: str = ""  # the string that ended it, if one did and this server saw it


@dataclass(frozen=True, slots=True)
class Resumed:
    """What another server has said of a choice."""

    token_ids: tuple[int, ...]
    versions: tuple[int, ...]  # of the weights, one per token
    delivered_chars: int
    finish: Finish | None


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
    told: bool = False  # by another server: the client has it already
    ticket: Ticket | None = None  # for KV that is exported
    said: list[int] | None = None  # every id of an answer that must go on elsewhere

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.versions += piece.versions
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish = piece.finish
        if piece.said is not None:
            # Whoever goes on with it says it whole; part of it would be text of nobody's.
            self.text, self.said = "", piece.said


class ChoiceText:
    """The words of one choice."""

    def __init__(self, job: ChoiceJob, tokenizer: Tokenizer | None) -> None:
        request = job.request
        self._job = job
        self._detokenizer = None if tokenizer is None else _detokenizer(job, tokenizer)
        self._stops = StopStrings(job.stop, include_stop=job.include_stop)
        self._scored = request.sampling.logprobs is not None
        self._by_token = self._scored or bool(job.stop)
        self._output_tokens = len(request.generated)
        self._chars = 0
        self._said = list(request.generated)
        self._owed = ""  # said before, elsewhere, and not delivered

    @property
    def stopped(self) -> bool:
        """A stop string has come; what the engine still says does not count."""
        return self._stops.matched is not None

    def hear(self, chunk: Chunk) -> Piece:
        ended = chunk.ended
        self._said += chunk.tokens
        if self.stopped:
            return Piece(finish=None if ended is None else self.finish(ended))
        piece = Piece(
            "", chunk.tokens, chunk.versions, chunk.logprobs, [], chunk.prompt_logprobs, ticket=chunk.ticket
        )
        if self._detokenizer is not None:
            spoken = chunk.tokens
            if ended is not None and ended.cause in STOP_TOKEN_CAUSES and not self._job.include_stop:
                spoken = spoken[:-1]
            piece.text = self._say_each(piece, spoken) if self._by_token else self._detokenizer.push(spoken)
        self._output_tokens += len(piece.tokens)
        if self._owed:
            piece.text = self._take_owed() + piece.text
        if ended is not None:
            if ended.finish_reason == "pd_reschedule" and not self.stopped:
                piece.said = self._said
            else:
                piece.text += self.rest()
            piece.finish = self.finish(ended)
        return piece

    def finish(self, ended: Ended) -> Finish:
        """How it ended: by a stop string if there was one, else as the engine says."""
        # What was generated before may be in the cache, too; to the client it is no part of the prompt.
        cached_tokens = min(ended.cached_tokens, ended.prompt_tokens)
        if self.stopped:
            stop = self._stops.matched or ""
            return Finish("stop", "stop_string", ended.prompt_tokens, cached_tokens, self._output_tokens, stop)
        return Finish(ended.finish_reason, ended.cause, ended.prompt_tokens, cached_tokens, ended.output_tokens)

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
        return self._take_owed() + self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    # -- said elsewhere -----------------------------------------------------------

    def replay(self, resumed: Resumed, eos: Collection[int]) -> tuple[Piece, Piece | None]:
        """Say it again. What the client has of it; and the rest, if it turns out that the answer has ended there."""
        finish = resumed.finish or self._at_stop_token(resumed.token_ids, eos)
        ended = None if finish is None else _ended(finish)
        piece = self.hear(Chunk(list(resumed.token_ids), list(resumed.versions), ended=ended))
        piece.told = True
        if resumed.finish is not None:
            return piece, None
        self._owe(piece, resumed.delivered_chars)
        if self.stopped:
            finish = Finish("stop", "stop_string", len(self._job.request.prompt), 0, self._output_tokens)
        piece.finish = None
        return piece, None if finish is None else Piece(self._take_owed(), finish=finish)

    def _at_stop_token(self, ids: Sequence[int], eos: Collection[int]) -> Finish | None:
        """The end that an engine would see in the last of `ids`."""
        request, sampling = self._job.request, self._job.request.sampling
        count = len(request.generated) + len(ids)
        if not ids or count <= sampling.min_tokens:
            return None
        if not sampling.ignore_eos and ids[-1] in eos:
            return Finish("stop", "eos", len(request.prompt), 0, count)
        if ids[-1] in sampling.stop_token_ids:
            return Finish("stop", "stop_token", len(request.prompt), 0, count)
        return None

    def _owe(self, piece: Piece, delivered_chars: int) -> None:
        if delivered_chars > len(piece.text):
            raise RequestError(
                f"{delivered_chars} characters of choice {self._job.index} are said to be delivered, "
                f"but its ids make only {len(piece.text)}",
                param="resume",
            )
        piece.text, self._owed = piece.text[:delivered_chars], piece.text[delivered_chars:]

    def _take_owed(self) -> str:
        owed, self._owed = self._owed, ""
        return owed


def _detokenizer(job: ChoiceJob, tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        prompt_ids=job.request.prompt,
        generated=job.request.generated,
        delivered_chars=job.delivered_chars,
        skip_special=job.skip_special,
    )


def _ended(finish: Finish) -> Ended:
    tokens = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
    return Ended(0, finish.reason, finish.cause, *tokens, Timings(0, None, None, 0))


def _cut(piece: Piece, tokens: int) -> None:
    del piece.tokens[tokens:], piece.versions[tokens:], piece.logprobs[tokens:]


Tell = Callable[[ChoiceJob, Piece], Awaitable[None]]


async def run(api: Api, record: Record, job: ChoiceJob, tell: Tell) -> None:
    """Make one choice, telling its pieces as they come."""
    record.prompt(len(job.request.prompt), job.index)
    if generated := job.rest.generated:
        record.resume(job.index, len(generated))
    speech = ChoiceText(job, api.tokenizer)
    if job.resumed is not None and await _replay(api, record, job, speech, tell):
        return
    try:
        async with api.engines.generate(_of(api, record, _in_time(job.rest, record))) as stream:
            record.begin(job.index, stream)
            await _listen(stream, speech, record, job, tell)
    except EngineDead:
        note(record, job, speech.cut("engine_lost"))
        raise


def _of(api: Api, record: Record, request: GenerateRequest) -> GenerateRequest:
    """`request` as an engine gets it: with the tenant whose share it takes, and whether a pause has found it accepted."""
    if api.ledger.sharing.several:
        request = structs.replace(request, tenant=record.share)
    return structs.replace(request, accepted=True) if record.accepted else request


def _in_time(request: GenerateRequest, record: Record) -> GenerateRequest:
    """A deadline counts from the arrival of the request, not from the end of its tokenising."""
    if request.timeout_s is None:
        return request
    return structs.replace(request, timeout_s=max(request.timeout_s - record.age_s, 1e-3))


async def _replay(api: Api, record: Record, job: ChoiceJob, speech: ChoiceText, tell: Tell) -> bool:
    """Tell what another server has said of a choice; whether that is all of it."""
    resumed = job.resumed
    assert resumed is not None
    replay = partial(speech.replay, resumed, api.engines.info.eos_token_ids)
    told, rest = await api.off_loop(record.share, len(resumed.token_ids), replay)
    await tell(job, told)
    last = told if rest is None else rest
    if last.finish is None:
        return False
    note(record, job, last.finish)
    if rest is not None:
        await tell(job, rest)
    return True


async def _listen(stream: ChunkStream, speech: ChoiceText, record: Record, job: ChoiceJob, tell: Tell) -> None:
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
        if piece.tokens or piece.text or piece.prompt_logprobs or piece.ticket:
            await tell(job, piece)
    # No engine had it yet, or its engine died after it had been told to end this and before it could confirm.
    finish = speech.cut(stream.cause)
    note(record, job, finish)
    await tell(job, Piece(speech.rest(), finish=finish))


def note(record: Record, job: ChoiceJob, finish: Finish) -> None:
    record.finish(
        job.index,
        finish.reason,
        finish.cause,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        output_tokens=finish.output_tokens,
    )


async def run_all(api: Api, record: Record, jobs: Sequence[ChoiceJob], tell: Tell) -> None:
    """Make all choices, a few begun in each turn of the event loop; the first failure ends them all."""
    if len(jobs) == 1:
        return await run(api, record, jobs[0], tell)
    try:
        async with asyncio.TaskGroup() as tasks:
            for i, job in enumerate(jobs, 1):
                tasks.create_task(run(api, record, job, tell))
                if i % BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(
                        0
                    )  # requests of many choices must not make a turn of the loop long for others
    except BaseExceptionGroup as failures:
        raise innermost(failures) from None


async def collect(api: Api, record: Record, jobs: Sequence[ChoiceJob]) -> list[Piece]:
    """All choices, whole, in the order of `jobs`."""
    answers = {job.index: Piece() for job in jobs}

    async def keep(job: ChoiceJob, piece: Piece) -> None:
        answers[job.index].add(piece)

    await run_all(api, record, jobs, keep)
    return list(answers.values())
