"""Runs one choice: converts the engine's tokens to pieces of the answer, up to its end.

`ChoiceText` is pure: it takes chunks and returns pieces. A piece has exactly the tokens that count, up to the one that
completed a stop string. The text of all pieces adds up to the text of the answer, however the chunks were split. Only the
last piece has `finish`.

A choice that another server has begun is replayed: `ChoiceText` processes its tokens again, and the part that the client
has is emitted as one piece marked `delivered`. Afterwards the choice continues like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from headgate.api.accounting.ledger import Record
from headgate.api.engines import ChunkStream
from headgate.api.state import Api
from headgate.contract.errors import QueueFull
from headgate.contract.journal import is_movable
from headgate.edge.sse import innermost
from headgate.engine.client import Chunk
from headgate.engine.routed import AnswerExperts, RoutedTokens
from headgate.errors import EngineDead, RequestError
from headgate.protocol.output import Cause, Ended, FinishReason, Timings
from headgate.protocol.plan import Logprobs, RoutedShape
from headgate.protocol.request import GenerateRequest, Ticket
from headgate.text.detokenizer import Detokenizer
from headgate.text.stops import StopStrings
from headgate.text.tokenizer import Tokenizer

BEGUN_AT_ONCE = 4  # choices of a request that are started per iteration of the event loop

# With these causes, the last token is not part of the text.
STOP_TOKEN_CAUSES = ("eos", "stop_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceJob:
    index: int
    request: GenerateRequest
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    kept: frozenset[int] = frozenset()  # special tokens that are not skipped
    opened: bool = False  # the answer begins with reasoning, because the prompt ends in it
    delivered_chars: int = 0
    prompt_text: str | None = None  # set if the answer begins with the prompt (echo)
    resumed: Resumed | None = None
    encode_experts: Callable[[AnswerExperts], str] = AnswerExperts.npy  # how its API writes the experts of tokens
    write_vector: Callable[[bytes], Any] = bytes  # how its API writes the vector of the prompt

    @property
    def rest(self) -> GenerateRequest:
        """The request for an engine, with the tokens that another server generated."""
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
    stop: str = ""  # the stop string that ended it, if this server found it


@dataclass(frozen=True, slots=True)
class Resumed:
    """What another server has generated for a choice."""

    token_ids: tuple[int, ...]
    versions: tuple[int, ...]  # of the weights, one per token
    delivered_chars: int
    finish: Finish | None
    end: Cause | None = None  # why the choice must end now


@dataclass(slots=True)
class Piece:
    """What one chunk adds to an answer; a complete answer is the sum of its pieces."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights, one per token
    logprobs: list[Logprobs] = field(default_factory=list)  # one per token, if requested
    offsets: list[int] = field(default_factory=list)  # start of each token in the text; only with logprobs
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None
    delivered: bool = False  # by another server: the client has this piece already
    ticket: Ticket | None = None  # for exported KV
    routed: AnswerExperts | None = None  # of all tokens of the choice, with its end, if requested and complete
    experts: str | None = None  # `routed` as the API writes it
    vector: Any = None  # of the prompt, as the API writes it; with the end
    generated_ids: list[int] | None = None  # all tokens of a choice that another server must continue

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.versions += piece.versions
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.prompt_logprobs += piece.prompt_logprobs
        self.finish = piece.finish or self.finish
        self.ticket = piece.ticket or self.ticket
        self.experts = self.experts if piece.experts is None else piece.experts
        self.vector = self.vector if piece.vector is None else piece.vector
        if piece.generated_ids is not None:
            # The server that continues sends the complete text, so none of it is sent here.
            self.text, self.generated_ids = "", piece.generated_ids


class ChoiceText:
    """Converts the tokens of one choice to text, and finds stop strings."""

    def __init__(self, job: ChoiceJob, tokenizer: Tokenizer | None, routed: RoutedShape | None = None) -> None:
        request = job.request
        self._job = job
        self._detokenizer = None if tokenizer is None else _detokenizer(job, tokenizer)
        self._stops = StopStrings(job.stop, include_stop=job.include_stop)
        self._scored = request.sampling.logprobs is not None
        self._by_token = self._scored or bool(job.stop)
        self._output_tokens = len(request.generated)
        self._chars = 0
        self._ids = list(request.generated)
        self._owed = ""  # text that another server generated and did not deliver
        sampling = request.sampling
        asked = routed is not None and sampling.return_routed_experts
        self._routed = RoutedTokens(routed, sampling.routed_experts_prompt_start) if routed and asked else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; later tokens of the engine do not count."""
        return self._stops.matched is not None

    def push(self, chunk: Chunk) -> Piece:
        ended = chunk.ended
        self._ids += chunk.tokens
        if self._routed is not None:
            self._routed.add(chunk.routed)
        if self.stopped:
            return Piece() if ended is None else self._last(self.finish(ended))
        piece = Piece(
            "", chunk.tokens, chunk.versions, chunk.logprobs, [], chunk.prompt_logprobs, ticket=chunk.ticket
        )
        if self._detokenizer is not None:
            shown = chunk.tokens
            if ended is not None and ended.cause in STOP_TOKEN_CAUSES and not self._job.include_stop:
                shown = shown[:-1]
            piece.text = self._push_each(piece, shown) if self._by_token else self._detokenizer.push(shown)
        self._output_tokens += len(piece.tokens)
        if self._owed:
            piece.text = self._take_owed() + piece.text
        if ended is not None:
            if ended.finish_reason == "pd_reschedule" and not self.stopped:
                piece.generated_ids = self._ids
            else:
                piece.text += self.rest()
            piece.finish = self.finish(ended)
            piece.routed = self._experts(piece.finish)
        if chunk.vector is not None:
            piece.vector = self._job.write_vector(chunk.vector)
        return piece

    def cut_off(self, cause: Cause) -> Piece:
        """The last piece, if the engine failed to report the end."""
        text = self.rest()
        return self._last(self.cut(cause), text)

    def _last(self, finish: Finish, text: str = "") -> Piece:
        return Piece(text, finish=finish, routed=self._experts(finish))

    def _experts(self, finish: Finish) -> AnswerExperts | None:
        if self._routed is None:
            return None
        return self._routed.of_answer(len(self._job.request.prompt) + finish.output_tokens)

    def finish(self, ended: Ended) -> Finish:
        """How the choice ended: with a stop string if one was found, otherwise as the engine reports."""
        # Resumed tokens may be cached too, but are not part of the client's prompt.
        cached_tokens = min(ended.cached_tokens, ended.prompt_tokens)
        if self.stopped:
            stop = self._stops.matched or ""
            return Finish("stop", "stop_string", ended.prompt_tokens, cached_tokens, self._output_tokens, stop)
        return Finish(ended.finish_reason, ended.cause, ended.prompt_tokens, cached_tokens, ended.output_tokens)

    def cut(self, cause: Cause) -> Finish:
        """How the choice ended if the engine failed before it reported the end."""
        counts = len(self._job.request.prompt), 0, self._output_tokens
        if self.stopped:
            return Finish("stop", "stop_string", *counts, self._stops.matched or "")
        return Finish("abort", cause, *counts)

    def _push_each(self, piece: Piece, shown: Sequence[int]) -> str:
        """Detokenise one token at a time, so that a stop string cuts the piece after the token that completed it."""
        assert self._detokenizer is not None
        # The text of resumed tokens comes first, and may complete a stop string by itself.
        text = self._push(self._detokenizer.push(()))
        for count, token in enumerate(shown):
            if self.stopped:
                _cut(piece, count)
                return text
            if self._scored:
                piece.offsets.append(self._chars)
            text += self._push(self._detokenizer.push((token,)))
        if self.stopped:
            _cut(piece, len(shown))
        elif self._scored:
            piece.offsets += [self._chars] * (len(piece.tokens) - len(shown))
        return text

    def _push(self, delta: str) -> str:
        self._chars += len(delta)
        return self._stops.push(delta)

    def rest(self) -> str:
        """Text that was held back because later tokens could have changed it or completed a stop string."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._take_owed() + self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    # -- resuming -----------------------------------------------------------------

    def replay(self, resumed: Resumed, eos: Collection[int]) -> tuple[Piece, Piece | None]:
        """Process resumed tokens. Returns the piece that the client has, and the rest if the choice ends there."""
        finish = resumed.finish or self._at_stop_token(resumed.token_ids, eos) or self._asked_end(resumed)
        ended = None if finish is None else _ended(finish)
        piece = self.push(Chunk(list(resumed.token_ids), list(resumed.versions), ended=ended))
        piece.delivered = True
        if resumed.finish is not None:
            return piece, None
        self._owe(piece, resumed.delivered_chars)
        if self.stopped:
            counts = len(self._job.request.prompt), 0, self._output_tokens
            finish = Finish("stop", "stop_string", *counts, self._stops.matched or "")
        piece.finish = None
        return piece, None if finish is None else Piece(self._take_owed(), finish=finish)

    def _at_stop_token(self, ids: Sequence[int], eos: Collection[int]) -> Finish | None:
        """The end, if the last of `ids` is a token that ends the choice."""
        request, sampling = self._job.request, self._job.request.sampling
        count = len(request.generated) + len(ids)
        if not ids or count <= sampling.min_tokens:
            return None
        if not sampling.ignore_eos and ids[-1] in eos:
            return Finish("stop", "eos", len(request.prompt), 0, count)
        if ids[-1] in sampling.stop_token_ids:
            return Finish("stop", "stop_token", len(request.prompt), 0, count)
        return None

    def _asked_end(self, resumed: Resumed) -> Finish | None:
        if resumed.end is None:
            return None
        request = self._job.request
        return Finish("abort", resumed.end, len(request.prompt), 0, len(request.generated) + len(resumed.token_ids))

    def _owe(self, piece: Piece, delivered_chars: int) -> None:
        if delivered_chars > len(piece.text):
            raise RequestError(
                f"{delivered_chars} characters of choice {self._job.index} are claimed to be delivered, "
                f"but the text of its ids has only {len(piece.text)}",
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
        kept=job.kept,
    )


def _ended(finish: Finish) -> Ended:
    tokens = finish.prompt_tokens, finish.cached_tokens, finish.output_tokens
    return Ended(0, finish.reason, finish.cause, *tokens, Timings(0, None, None, 0))


def _cut(piece: Piece, tokens: int) -> None:
    del piece.tokens[tokens:], piece.versions[tokens:], piece.logprobs[tokens:]


Emit = Callable[[ChoiceJob, Piece], Awaitable[None]]


async def run(api: Api, record: Record, job: ChoiceJob, emit: Emit) -> None:
    """Run one choice, emitting its pieces as they are generated."""
    record.prompt(len(job.request.prompt), job.index)
    if generated := job.rest.generated:
        record.resume(job.index, len(generated))
    text = ChoiceText(job, api.tokenizer, api.engines.info.routed)
    if job.resumed is not None and await _replay(api, record, job, text, emit):
        return
    try:
        async with api.engines.generate(_for_engine(api, record, _with_remaining_time(job.rest, record))) as stream:
            record.begin(job.index, stream)
            await _follow(stream, text, record, job, partial(_emit_encoded, api, record, emit))
    except EngineDead:
        note(record, job, text.cut("engine_lost"))
        raise


async def _emit_encoded(api: Api, record: Record, emit: Emit, job: ChoiceJob, piece: Piece) -> None:
    """Emit a piece whose experts, if it has any, are encoded: of a long answer that takes up to a second."""
    if piece.routed is not None:
        encode = partial(job.encode_experts, piece.routed)
        try:
            piece.experts = await api.off_loop(record.share, len(piece.routed.ids), encode)
        except QueueFull:  # the answer is complete, and is not lost because many others are too
            piece.experts = encode()
    await emit(job, piece)


def _for_engine(api: Api, record: Record, request: GenerateRequest) -> GenerateRequest:
    """Add the share that `request` uses, and whether it was accepted before the current pause."""
    if api.ledger.sharing.several:
        request = structs.replace(request, tenant=record.share)
    return structs.replace(request, accepted=True) if record.accepted else request


def _with_remaining_time(request: GenerateRequest, record: Record) -> GenerateRequest:
    """Subtract the age of the request: a deadline counts from its arrival, not from the end of tokenisation."""
    if request.timeout_s is None:
        return request
    return structs.replace(request, timeout_s=max(request.timeout_s - record.age_s, 1e-3))


async def _replay(api: Api, record: Record, job: ChoiceJob, text: ChoiceText, emit: Emit) -> bool:
    """Emit what another server has generated for a choice. Returns whether the choice ends there."""
    resumed = job.resumed
    assert resumed is not None
    replay = partial(text.replay, resumed, api.engines.info.eos_token_ids)
    delivered, rest = await api.off_loop(record.share, len(resumed.token_ids), replay)
    if resumed.token_ids or resumed.finish is not None:  # otherwise the client has received nothing
        await emit(job, delivered)
    last = delivered if rest is None else rest
    if last.finish is None:
        return False
    note(record, job, last.finish)
    if rest is not None:
        await emit(job, rest)
    return True


async def _follow(stream: ChunkStream, text: ChoiceText, record: Record, job: ChoiceJob, emit: Emit) -> None:
    async for chunk in stream:
        ending = text.stopped
        if chunk.ended is not None:
            chunk.ended = _as_asked(chunk.ended, record.asked_to_end(job.index))
        piece = text.push(chunk)
        if piece.tokens:
            record.tokens(len(piece.tokens), job.index)
        if piece.finish is not None:
            note(record, job, piece.finish)
            await emit(job, piece)
            return
        if text.stopped and not ending:
            stream.end("stop_string")  # the terminal output still follows, with the number of cached tokens
        if piece.tokens or piece.text or piece.prompt_logprobs or piece.ticket:
            await emit(job, piece)
    # No engine had it yet, or the engine died after it was asked to end the choice and before it confirmed.
    last = text.cut_off(stream.cause)
    assert last.finish is not None
    note(record, job, last.finish)
    await emit(job, last)


def _as_asked(ended: Ended, cause: Cause | None) -> Ended:
    """The end of a choice that was asked to end: even if the engine gave another cause, no other server continues it."""
    if cause is None or is_movable("abort", cause) or not is_movable(ended.finish_reason, ended.cause):
        return ended
    return structs.replace(ended, finish_reason="abort", cause=cause)


def note(record: Record, job: ChoiceJob, finish: Finish) -> None:
    record.finish(
        job.index,
        finish.reason,
        finish.cause,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        output_tokens=finish.output_tokens,
    )


async def run_all(api: Api, record: Record, jobs: Sequence[ChoiceJob], emit: Emit) -> None:
    """Run all choices; the first failure ends all of them."""
    if len(jobs) == 1:
        return await run(api, record, jobs[0], emit)
    try:
        async with asyncio.TaskGroup() as tasks:
            for i, job in enumerate(jobs, 1):
                tasks.create_task(run(api, record, job, emit))
                if i % BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(0)  # so that a request with many choices does not block the event loop
    except BaseExceptionGroup as failures:
        raise innermost(failures) from None


Run = Callable[[Api, Record, Sequence[ChoiceJob], Emit], Awaitable[None]]


async def collect(api: Api, record: Record, jobs: Sequence[ChoiceJob], run: Run = run_all) -> list[Piece]:
    """Run all choices. Returns their complete answers in the order of `jobs`."""
    answers = {job.index: Piece() for job in jobs}

    async def keep(job: ChoiceJob, piece: Piece) -> None:
        answers[job.index].add(piece)

    await run(api, record, jobs, keep)
    return list(answers.values())
