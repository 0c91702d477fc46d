"""POST /v1/chat/completions: messages in, messages out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.constraints import constraint_for
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.jobs import check_choices, make_jobs, sampling_params
from headgate.api.generate.logprobs import chat_logprobs
from headgate.api.generate.prompts import chat_prompt
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import AnswerFormat, RequestContext, exchange
from headgate.api.generate.tool_calls import Parsers, call_pieces, message_calls, read_calls
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
from headgate.contract.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    Usage,
)
from headgate.contract.sampling import TextParams, sampling_given, text_params
from headgate.contract.schema import ChatRequest
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError, RequestError


async def chat_completions(request: Request) -> Response:
    body = await read_body(request, ChatRequest)
    api, text = api_of(request), text_params(body, "chat")
    check_choices(text.n, api.settings.max_choices)
    return exchange(request, body, "chat", text.n, partial(prepare, api, body, text))


async def prepare(
    api: Api, body: ChatRequest, text: TextParams, call: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    return await chat_jobs(api, body, text, call.share), ChatFormat(api, body, text.n, call)


async def chat_jobs(api: Api, body: ChatRequest, text: TextParams, share: str) -> list[ChoiceJob]:
    sampling = sampling_params(
        sampling_given(body, "chat"),
        logprobs=_asked_logprobs(body),
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
    return make_jobs(body, [prompt], sampling, text)


def _asked_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def grammar_for(api: Api, body: ChatRequest, share: str) -> str | None:
    if body.response_format is None and body.tools is None and body.tool_choice is None:
        return None
    constrain = partial(
        constraint_for,
        response_format=body.response_format,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=api.tool_format,
    )
    return await api.off_loop(share, LONG_TEXT, constrain)  # a schema may take a while, however short


class ChatFormat:
    def __init__(self, api: Api, body: ChatRequest, n: int, call: RequestContext) -> None:
        self._api, self._body, self._n, self._call = api, body, n, call
        self._id = call.id("chatcmpl-")
        self._parsers = Parsers(body.tools, body.tool_choice, api.tool_format, seed=self._id)
        self._finishes: dict[int, Finish] = {}
        self._begun: dict[int, tuple[bytes, bytes]] = {}  # by choice, what stands around the text of a piece
        self._plain = not (body.logprobs or body.return_token_ids or body.return_weight_versions or self._parsers)
        head = {"id": self._id, "object": "chat.completion.chunk", "created": call.created, "model": api.model_name}
        self._frame = EventFrame(head, with_usage=usage_asked(body))

    # -- streams ----------------------------------------------------------------

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        begun = self._begun.get(job.index)
        if begun is not None and self._plain and piece.finish is None:
            # What is done for nearly every token: keep it short.
            return begun[0] + encode(piece.text) + begun[1] if piece.text else b""
        return self._full_event(job, piece, first=begun is None)

    def _full_event(self, job: ChoiceJob, piece: Piece, *, first: bool) -> bytes:
        delta, called = self._delta(job, piece, first=first)
        if piece.finish is None and self._plain and not piece.text:
            return b""
        choice = ChunkChoice(
            index=job.index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=finish_reason(piece.finish, strict=self._call.strict, called=called),
            **extras(self._body, job, piece, first=first),
        )
        if first:
            self._begin(job)
        return self._frame.event(choice) + self._ending(job, piece)

    def _begin(self, job: ChoiceJob) -> None:
        self._begun[job.index] = self._frame.around(
            b'{"index":%d,"delta":{"content":' % job.index, b'},"logprobs":null,"finish_reason":null}'
        )

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        if piece.text or not self._plain:
            self._begin(job)
        if parser := self._parsers.get(job.index):
            parser.push(piece.text)
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish

    def _delta(self, job: ChoiceJob, piece: Piece, *, first: bool) -> tuple[Delta, bool]:
        role = "assistant" if first else UNSET
        parser = self._parsers.get(job.index)
        if parser is None:
            silent = not piece.text and piece.finish is not None and not first
            return Delta(role=role, content=UNSET if silent else piece.text), False
        content, calls = read_calls(parser, piece.text, final=piece.finish is not None)
        return Delta(role=role, content=content or UNSET, tool_calls=call_pieces(calls) or UNSET), parser.called

    def _ending(self, job: ChoiceJob, piece: Piece) -> bytes:
        if piece.finish is None:
            return b""
        self._finishes[job.index] = piece.finish
        error = cut_short(piece.finish) if self._call.strict else None
        return error_event(error) if error else b""

    def closing(self) -> bytes:
        usage = self._frame.usage(self._usage()) if usage_asked(self._body) else b""
        return usage + DONE

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)

    # -- whole answers ----------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        choices = [self._choice(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        completion = ChatCompletion(
            id=self._id,
            created=self._call.created,
            model=self._api.model_name,
            choices=choices,
            usage=self._usage(),
            error=cut_problem(self._finishes.values()) if self._call.strict else UNSET,
        )
        return encode(completion)

    def _choice(self, job: ChoiceJob, answer: Piece) -> ChatChoice:
        assert answer.finish is not None
        self._finishes[job.index] = answer.finish
        message, called = AssistantMessage(content=answer.text), False
        if parser := self._parsers.get(job.index):
            content, calls = read_calls(parser, answer.text, final=True)
            message = AssistantMessage(content=content or None, tool_calls=message_calls(calls) or UNSET)
            called = parser.called
        return ChatChoice(
            index=job.index,
            message=message,
            logprobs=self._logprobs(answer),
            finish_reason=finish_reason(answer.finish, strict=self._call.strict, called=called),
            **extras(self._body, job, answer, first=True),
        )

    # -- both -------------------------------------------------------------------

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._api.tokenizer, piece.tokens, piece.logprobs)

    def _usage(self) -> Usage:
        return usage_of([finish for _, finish in sorted(self._finishes.items())], self._n)
