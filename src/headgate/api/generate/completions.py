"""POST /v1/completions: the prompt is text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.choices_format import ChoicesFormat
from headgate.api.generate.constraints import answer_grammar
from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.api.generate.jobs import asked_prompt_logprobs, check_choices, make_jobs, recommended, sampling_params
from headgate.api.generate.logprobs import completion_logprobs, joined, prompt_logprobs, prompt_offsets
from headgate.api.generate.prompts import text_prompts
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.wire import extras, finish_reason
from headgate.api.state import Api, api_of
from headgate.contract.answers import CompletionChoice, CompletionLogprobs, TextCompletion
from headgate.contract.compatible import check_compatible
from headgate.contract.decoding import refuse
from headgate.contract.event_json import encode
from headgate.contract.sampling import SAMPLING, TextParams, sampling_given, text_params
from headgate.contract.schema import CompletionRequest, prompts_of
from headgate.errors import RequestError
from headgate.protocol.plan import Logprobs

DEFAULT_MAX_TOKENS: int = SAMPLING["max_tokens"].defaults["completions"]


async def completions(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    refuse(body, "suffix")
    check_compatible(body, "completions")
    api, prompts, text = api_of(request), prompts_of(body.prompt), text_params(body, "completions")
    choices = len(prompts) * text.n
    check_choices(choices, api.settings.max_choices)
    if body.best_of is not None and body.best_of != text.n:
        raise RequestError("best_of other than n is not supported; leave it out", param="best_of")
    return exchange(request, body, "completion", choices, partial(prepare, api, body, text, prompts))


async def prepare(
    api: Api, body: CompletionRequest, text: TextParams, prompts: Sequence[str | list[int]], context: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    grammar = await answer_grammar(api, body, context.share)
    given = sampling_given(body, "completions")
    given.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, given.get("min_tokens", 0)))
    asked = asked_prompt_logprobs(given, body)
    echoed = given.get("logprobs") if body.echo else None
    sampling = sampling_params(
        recommended(api, given), prompt_logprobs=echoed if asked is None else asked, grammar=grammar
    )
    add_special = body.add_special_tokens is not False
    read = await text_prompts(api, prompts, context.share, add_special=add_special, echo=bool(body.echo))
    scored, prompt_scored = sampling.logprobs is not None, asked is not None
    answer_format = CompletionFormat(api, body, text.n, context, scored=scored, prompt_scored=prompt_scored)
    return make_jobs(body, read, sampling, text), answer_format


class CompletionFormat(ChoicesFormat):
    before_text = b'{"index":%d,"text":'
    after_text = b',"logprobs":null,"finish_reason":null}'

    def __init__(
        self,
        api: Api,
        body: CompletionRequest,
        n: int,
        context: RequestContext,
        *,
        scored: bool,
        prompt_scored: bool = False,
    ) -> None:
        self._body, self._scored, self._prompt_scored = body, scored, prompt_scored
        self._scores: dict[int, list[Logprobs]] = {}  # by choice, until its stream begins: of the prompt
        simple = not (scored or body.return_token_ids or body.return_weight_versions)
        super().__init__(api, body, n, context, prefix="cmpl-", object="text_completion", fast_path=simple)

    # -- streams ----------------------------------------------------------------

    def _full_event(self, job: ChoiceJob, piece: Piece, *, first: bool) -> bytes:
        if first:
            if self._waits_for_scores(job, piece):
                return b""
            self._begin(job)
        return self._chunk(job, piece, self._choice(job, piece, first=first))

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        self._begin(job)
        self._count(job, piece)
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish

    def _waits_for_scores(self, job: ChoiceJob, piece: Piece) -> bool:
        """Whether to wait for the first token: an echoed prompt has all its log-probabilities only then."""
        piece.prompt_logprobs = self._scores.setdefault(job.index, []) + piece.prompt_logprobs
        self._scores[job.index] = piece.prompt_logprobs
        return not piece.tokens and piece.finish is None

    # -- complete answers -------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        choices = [self._choice(job, answer, first=True) for job, answer in zip(jobs, answers, strict=True)]
        if self._prompt_scored:
            for choice, job, answer in zip(choices, jobs, answers, strict=True):
                scores = answer.prompt_logprobs
                choice.prompt_logprobs = prompt_logprobs(self._api.tokenizer, job.request.prompt, scores)
        return encode(TextCompletion(choices=choices, **self._envelope(answers)))

    # -- both -------------------------------------------------------------------

    def _choice(self, job: ChoiceJob, piece: Piece, *, first: bool) -> CompletionChoice:
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish
        prompt = job.prompt_text or ""
        return CompletionChoice(
            index=job.index,
            text=prompt + piece.text if first else piece.text,
            logprobs=self._logprobs(job, piece, first=first) if self._scored else None,
            finish_reason=finish_reason(piece.finish, strict=self._context.strict),
            **extras(self._body, job, piece, self._api.labels, first=first, strict=self._context.strict),
        )

    def _logprobs(self, job: ChoiceJob, piece: Piece, *, first: bool) -> CompletionLogprobs:
        tokenizer, echoed = self._api.tokenizer, len(job.prompt_text or "")
        offsets = [echoed + offset for offset in piece.offsets]
        answer = completion_logprobs(self._spelling, piece.tokens, piece.logprobs, offsets)
        if not first or job.prompt_text is None:
            return answer
        prompt = job.request.prompt
        scores = [None, *piece.prompt_logprobs]
        echo = completion_logprobs(self._spelling, prompt[: len(scores)], scores, prompt_offsets(tokenizer, prompt))
        return joined(echo, answer)
