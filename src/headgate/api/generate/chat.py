"""POST /v1/chat/completions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.answer_parts import (
    Parts,
    Readers,
    call_pieces,
    cut_part,
    declared_tools,
    message_calls,
    read,
)
from headgate.api.generate.choices_format import ChoicesFormat
from headgate.api.generate.constraints import constraint_for, constraint_of
from headgate.api.generate.generation import ChoiceJob, Piece
from headgate.api.generate.jobs import asked_prompt_logprobs, check_choices, make_jobs, recommended, sampling_params
from headgate.api.generate.logprobs import chat_logprobs, prompt_logprobs
from headgate.api.generate.prompts import chat_prompt
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.wire import extras, finish_reason
from headgate.api.state import LONG_TEXT, Api, api_of
from headgate.contract.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from headgate.contract.compatible import check_compatible
from headgate.contract.event_json import encode
from headgate.contract.sampling import SamplingParams, TextParams, sampling_given, text_params
from headgate.contract.schema import ChatRequest
from headgate.errors import RequestError
from headgate.text.parsers.events import Content, Reasoning
from headgate.text.parsers.reader import AnswerReader

log = logging.getLogger(__name__)

TOOLS_IGNORED = "the chat template of this model ignores tools"


async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatRequest)
    check_compatible(body, "chat")
    api, text = api_of(request), text_params(body, "chat")
    check_choices(text.n, api.settings.max_choices)
    return exchange(request, body, "chat", text.n, partial(prepare, api, body, text))


async def prepare(
    api: Api, body: ChatRequest, text: TextParams, context: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    warn_about_tools(api, body, context)
    return await chat_jobs(api, body, text, context.share), ChatFormat(api, body, text.n, context)


async def chat_jobs(api: Api, body: ChatRequest, text: TextParams, share: str) -> list[ChoiceJob]:
    given = sampling_given(body, "chat")
    sampling = sampling_params(
        recommended(api, given),
        logprobs=_asked_logprobs(body),
        prompt_logprobs=asked_prompt_logprobs(given, body),
        grammar=await grammar_for(api, body, share),
    )
    prompt = await chat_prompt(
        api,
        body.messages,
        share,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return make_jobs(body, [prompt], sampling, text, kept=_kept(api, body, sampling))


def _kept(api: Api, body: ChatRequest, sampling: SamplingParams) -> frozenset[int]:
    """The special tokens that a reader of the answer needs; none if there is no reader."""
    constrained = sampling.grammar is not None
    reader = api.parsers.reader(declared_tools(body), seed="", constrained=constrained, opened=False)
    return frozenset() if reader is None else api.marker_ids


def warn_about_tools(api: Api, body: ChatRequest, context: RequestContext) -> None:
    """Warn if the model is not shown the tools of the request, because its chat template ignores them."""
    if not declared_tools(body) or api.template is None or api.template.takes_tools:
        return
    context.warnings.append(TOOLS_IGNORED)
    if not api.warned:
        api.warned.append(TOOLS_IGNORED)
        log.warning("%s; requests with tools get this warning in a header", TOOLS_IGNORED)


def _asked_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def grammar_for(api: Api, body: ChatRequest, share: str) -> str | None:
    if (constraint := constraint_of(body)) is not None:
        if body.tools is not None and body.tool_choice != "none":
            raise RequestError(
                f"{constraint.field} excludes tools, unless tool_choice is none", param=constraint.field
            )
        return await api.off_loop(share, LONG_TEXT, constraint.grammar)
    if body.response_format is None and body.tools is None and body.tool_choice is None:
        return None
    constrain = partial(
        constraint_for,
        response_format=body.response_format,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        markup=api.parsers.markup,
    )
    return await api.off_loop(share, LONG_TEXT, constrain)  # always in a thread: even a short schema may take long


class ChatFormat(ChoicesFormat):
    before_text = b'{"index":%d,"delta":{"content":'
    before_reasoning = b'{"index":%d,"delta":{"reasoning_content":'
    after_text = b'},"logprobs":null,"finish_reason":null}'

    def __init__(self, api: Api, body: ChatRequest, n: int, context: RequestContext) -> None:
        self._body = body
        prefix = "chatcmpl-"
        self._readers = Readers(api, body, seed=context.id(prefix))
        self._thoughts: dict[int, tuple[bytes, bytes]] = {}  # like `_begun`, for reasoning
        simple = not (body.logprobs or body.return_token_ids or body.return_weight_versions)
        super().__init__(api, body, n, context, prefix=prefix, object="chat.completion.chunk", fast_path=simple)

    # -- streams ----------------------------------------------------------------

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        reader = self._readers.get(job)
        if reader is None:
            return super().event(job, piece)
        events = read(reader, piece)
        begun = self._begun.get(job.index)
        if begun is not None and self._fast_path and piece.finish is None:
            # Runs for nearly every token: keep it short.
            match events:
                case [Content(text)]:
                    return begun[0] + encode(text) + begun[1]
                case [Reasoning(text)]:
                    (before, after), thought = self._thoughts[job.index], encode(text)
                    return before + thought + b',"reasoning":' + thought + after
        return self._event_of(job, piece, Parts.of(events), reader, first=begun is None)

    def _full_event(self, job: ChoiceJob, piece: Piece, *, first: bool) -> bytes:
        return self._event_of(job, piece, Parts(content=piece.text), None, first=first)

    def _event_of(
        self, job: ChoiceJob, piece: Piece, parts: Parts, reader: AnswerReader | None, *, first: bool
    ) -> bytes:
        if piece.finish is None and self._fast_path and not parts:
            return b""
        called = reader is not None and reader.called
        choice = ChunkChoice(
            index=job.index,
            delta=_delta(parts, first=first, silent=reader is not None or (piece.finish is not None and not first)),
            logprobs=self._logprobs(piece),
            finish_reason=finish_reason(piece.finish, strict=self._context.strict, called=called),
            cut=cut_part(reader, piece) or UNSET,
            **extras(self._body, job, piece, self._api.labels, first=first, strict=self._context.strict),
        )
        more = {}
        if first:
            self._begin(job)
            if self._body.return_token_ids:
                more["prompt_token_ids"] = job.request.prompt
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish
        return self._chunk(job, piece, choice, **more)

    def _begin(self, job: ChoiceJob) -> None:
        super()._begin(job)
        self._thoughts[job.index] = self._frame.around(self.before_reasoning % job.index, self.after_text)

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        reader = self._readers.get(job)
        shown = piece.text if reader is None else reader.feed(piece.text)
        if shown or not self._fast_path:
            self._begin(job)
        self._count(job, piece)
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish

    # -- complete answers -------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        choices = [self._choice(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        answer = ChatCompletion(choices=choices, **self._envelope(answers))
        if self._body.return_token_ids:
            answer.prompt_token_ids = jobs[0].request.prompt
        if jobs[0].request.sampling.prompt_logprobs is not None:
            scores = answers[0].prompt_logprobs
            answer.prompt_logprobs = prompt_logprobs(self._api.tokenizer, jobs[0].request.prompt, scores)
        return encode(answer)

    def _choice(self, job: ChoiceJob, answer: Piece) -> ChatChoice:
        assert answer.finish is not None
        self._finishes[job.index] = answer.finish
        reader = self._readers.get(job)
        message = (
            AssistantMessage(content=answer.text) if reader is None else _message(Parts.of(read(reader, answer)))
        )
        called = reader is not None and reader.called
        return ChatChoice(
            index=job.index,
            message=message,
            logprobs=self._logprobs(answer),
            finish_reason=finish_reason(answer.finish, strict=self._context.strict, called=called),
            cut=cut_part(reader, answer) or UNSET,
            **extras(self._body, job, answer, self._api.labels, first=True, strict=self._context.strict),
        )

    # -- both -------------------------------------------------------------------

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._spelling, piece.tokens, piece.logprobs)


def _delta(parts: Parts, *, first: bool, silent: bool) -> Delta:
    """`silent`: the delta has no content if there is none."""
    reasoning = parts.reasoning or UNSET
    return Delta(
        role="assistant" if first else UNSET,
        content=UNSET if silent and not parts.content else parts.content,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=call_pieces(parts.calls) or UNSET,
    )


def _message(parts: Parts) -> AssistantMessage:
    reasoning = parts.reasoning or UNSET
    return AssistantMessage(
        content=parts.content or None,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=message_calls(parts.calls) or UNSET,
    )
