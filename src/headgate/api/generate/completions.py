"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.constraints import constraint_for
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.jobs import check_choices, make_jobs, sampling_params
from headgate.api.generate.logprobs import completion_logprobs, joined, prompt_offsets
from headgate.api.generate.prompts import text_prompts
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import AnswerFormat, RequestContext, exchange
from headgate.api.generate.usage import usage_of
from headgate.api.generate.wire import (
    EventFrame,
    cut_problem,
    cut_short,
    encode,
    error_event,
    extras,
    finish_reason,
    usage_asked,
)
from headgate.api.state import LONG_TEXT, Api, api_of
from headgate.contract.answers import CompletionChoice, CompletionLogprobs, TextCompletion, Usage
from headgate.contract.decoding import refuse
from headgate.contract.sampling import SAMPLING, TextParams, sampling_given, text_params
from headgate.contract.schema import CompletionRequest, prompts_of
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.plan import Logprobs

DEFAULT_MAX_TOKENS: int = SAMPLING["max_tokens"].defaults["completions"]


async def completions(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    refuse(body, "suffix")
    api, prompts, text = api_of(request), prompts_of(body.prompt), text_params(body, "completions")
    choices = len(prompts) * text.n
    check_choices(choices, api.settings.max_choices)
    if body.best_of is not None and body.best_of != text.n:
        raise RequestError("best_of other than n is not supported; leave it out", param="best_of")
    return exchange(request, body, "completion", choices, partial(prepare, api, body, text, prompts))


async def prepare(
    api: Api, body: CompletionRequest, text: TextParams, prompts: Sequence[str | list[int]], call: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    grammar = None
    if body.response_format is not None:
        grammar = await api.off_loop(
            call.share, LONG_TEXT, partial(constraint_for, response_format=body.response_format)
        )
    given = sampling_given(body, "completions")
    given.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, given.get("min_tokens", 0)))
    prompt_logprobs = given.get("logprobs") if body.echo else None
    sampling = sampling_params(given, prompt_logprobs=prompt_logprobs, grammar=grammar)
    add_special = body.add_special_tokens is not False
    read = await text_prompts(api, prompts, call.share, add_special=add_special, echo=bool(body.echo))
    scored = sampling.logprobs is not None
    return make_jobs(body, read, sampling, text), CompletionFormat(api, body, text.n, call, scored=scored)


class CompletionFormat:
    def __init__(self, api: Api, body: CompletionRequest, n: int, call: RequestContext, *, scored: bool) -> None:
        self._api, self._body, self._n, self._call, self._scored = api, body, n, call, scored
        self._id = call.id("cmpl-")
        self._finishes: dict[int, Finish] = {}
        self._scores: dict[int, list[Logprobs]] = {}  # of the prompts of streams that have not begun
        self._begun: dict[int, tuple[bytes, bytes]] = {}  # by choice, what stands around the text of a piece
        self._plain = not (scored or body.return_token_ids or body.return_weight_versions)
        head = {"id": self._id, "object": "text_completion", "created": call.created, "model": api.model_name}
        self._frame = EventFrame(head, with_usage=usage_asked(body))

    # -- streams ----------------------------------------------------------------

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        begun = self._begun.get(job.index)
        if begun is not None and self._plain and piece.finish is None:
            # What is done for nearly every token: keep it short.
            return begun[0] + encode(piece.text) + begun[1] if piece.text else b""
        return self._full_event(job, piece, first=begun is None)

    def _full_event(self, job: ChoiceJob, piece: Piece, *, first: bool) -> bytes:
        if first:
            if self._waits_for_scores(job, piece):
                return b""
            self._begin(job)
        choice = self._choice(job, piece, first=first)
        error = cut_short(piece.finish) if piece.finish and self._call.strict else None
        return self._frame.event(choice) + (error_event(error) if error else b"")

    def _begin(self, job: ChoiceJob) -> None:
        self._begun[job.index] = self._frame.around(
            b'{"index":%d,"text":' % job.index, b',"logprobs":null,"finish_reason":null}'
        )

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        self._begin(job)
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish

    def _waits_for_scores(self, job: ChoiceJob, piece: Piece) -> bool:
        """An echoed prompt is told with the first token: only then are its log-probabilities complete."""
        piece.prompt_logprobs = self._scores.setdefault(job.index, []) + piece.prompt_logprobs
        self._scores[job.index] = piece.prompt_logprobs
        return not piece.tokens and piece.finish is None

    def closing(self) -> bytes:
        usage = self._frame.usage(self._usage()) if usage_asked(self._body) else b""
        return usage + DONE

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)

    # -- whole answers ----------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        choices = [self._choice(job, answer, first=True) for job, answer in zip(jobs, answers, strict=True)]
        completion = TextCompletion(
            id=self._id,
            created=self._call.created,
            model=self._api.model_name,
            choices=choices,
            usage=self._usage(),
            error=cut_problem(self._finishes.values()) if self._call.strict else UNSET,
        )
        return encode(completion)

    # -- both -------------------------------------------------------------------

    def _choice(self, job: ChoiceJob, piece: Piece, *, first: bool) -> CompletionChoice:
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish
        echoed = job.prompt_text or ""
        return CompletionChoice(
            index=job.index,
            text=echoed + piece.text if first else piece.text,
            logprobs=self._logprobs(job, piece, first=first) if self._scored else None,
            finish_reason=finish_reason(piece.finish, strict=self._call.strict),
            **extras(self._body, job, piece, first=first),
        )

    def _logprobs(self, job: ChoiceJob, piece: Piece, *, first: bool) -> CompletionLogprobs:
        tokenizer, echoed = self._api.tokenizer, len(job.prompt_text or "")
        offsets = [echoed + offset for offset in piece.offsets]
        answer = completion_logprobs(tokenizer, piece.tokens, piece.logprobs, offsets)
        if not first or job.prompt_text is None:
            return answer
        prompt = job.request.prompt
        scores = [None, *piece.prompt_logprobs]
        told = completion_logprobs(tokenizer, prompt[: len(scores)], scores, prompt_offsets(tokenizer, prompt))
        return joined(told, answer)

    def _usage(self) -> Usage:
        return usage_of([finish for _, finish in sorted(self._finishes.items())], self._n)
