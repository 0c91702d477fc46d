"""POST /v1/responses: chat with OpenAI's Responses API. Stateless: nothing is stored.

A request is converted to a chat request; this module writes the answer. An answer is a list of items (messages and
function calls). In a stream each item is opened, grows by deltas, and is closed before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.answer_parts import Readers, read
from headgate.api.generate.chat import chat_jobs, warn_about_tools
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.logprobs import chat_logprobs
from headgate.api.generate.reading import read_body
from headgate.api.generate.response_events import Events
from headgate.api.generate.response_input import as_chat
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.usage import version_spans
from headgate.api.generate.wire import cut_short
from headgate.api.state import Api, api_of
from headgate.contract.answers import PromptDetails, TokenLogprob
from headgate.contract.compatible import check_compatible
from headgate.contract.event_json import encode
from headgate.contract.responses import (
    Incomplete,
    OutputDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from headgate.contract.sampling import SamplingParams, text_params
from headgate.contract.schema import ChatRequest, ResponsesRequest
from headgate.errors import HeadgateError
from headgate.text.parsers.events import CallDelta, Content, Event, Reasoning


async def responses(request: Request) -> Response:
    body = await read_body(request, ResponsesRequest)
    check_compatible(body, "responses")
    return exchange(request, body, "response", 1, partial(prepare, api_of(request), body))


async def prepare(api: Api, body: ResponsesRequest, context: RequestContext) -> tuple[list[ChoiceJob], AnswerFormat]:
    chat = as_chat(body)
    warn_about_tools(api, chat, context)
    jobs = await chat_jobs(api, chat, text_params(chat, "chat"), context.share)
    return jobs, ResponsesFormat(api, body, chat, jobs[0].request.sampling, context)


class ResponsesFormat:
    def __init__(
        self, api: Api, body: ResponsesRequest, chat: ChatRequest, sampling: SamplingParams, context: RequestContext
    ) -> None:
        self._body, self._strict, self._tokenizer = body, context.strict, api.tokenizer
        self._response = _new_response(body, sampling, context, api.model_name)
        self._readers = Readers(api, chat, seed=self._response.id)
        self._scored = bool(chat.logprobs)
        self._labels = api.labels
        self._all = Piece()  # the sum of all pieces, for the response object
        self._begun = False
        self._events = Events(context.id(""))

    # -- streams ----------------------------------------------------------------

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        events = b"" if self._begun else self._beginning()
        self._note(job, piece)
        scores = self._scores(piece)
        for part in self._parts(job, piece):
            match part:
                case Reasoning(text):
                    events += self._events.add_reasoning(text)
                case Content(text):
                    events += self._events.add_text(text, scores)
                    scores = []
                case CallDelta():
                    events += self._events.add_call(part)
        if scores or (piece.finish and not self._events.items):
            events += self._events.add_text("", scores)
        return events

    def _beginning(self) -> bytes:
        self._begun = True
        opening = (
            self._events.about_response(f"response.{name}", self._response) for name in ("created", "in_progress")
        )
        return b"".join(opening)

    def closing(self) -> bytes:
        events = self._complete()
        return events + self._events.about_response(f"response.{self._response.status}", self._response)

    def failure(self, error: HeadgateError) -> bytes:
        return self._events.error(error)

    # -- complete answers -------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        for job, answer in zip(jobs, answers, strict=True):
            self.event(job, answer)
        self._complete()
        return encode(self._response)

    # -- both -------------------------------------------------------------------

    def _note(self, job: ChoiceJob, piece: Piece) -> None:
        if self._body.return_token_ids or self._body.return_weight_versions:
            self._all.tokens += piece.tokens
            self._all.versions += piece.versions
        if self._body.return_token_ids:
            self._response.prompt_token_ids = job.request.prompt
        self._all.finish = piece.finish

    def _parts(self, job: ChoiceJob, piece: Piece) -> Sequence[Event]:
        reader = self._readers.get(job)
        if reader is not None:
            return read(reader, piece)
        return [Content(piece.text)] if piece.text else []

    def _scores(self, piece: Piece) -> list[TokenLogprob]:
        if not self._scored:
            return []
        return chat_logprobs(self._tokenizer, piece.tokens, piece.logprobs).content

    def _complete(self) -> bytes:
        """Close the open item, and set the fields that are known only at the end."""
        response, finish, body = self._response, self._all.finish, self._body
        assert finish is not None
        response.status = "completed" if finish.reason == "stop" else "incomplete"
        events = self._events.close(response.status)
        response.output = list(self._events.items)
        response.incomplete_details = self._why_incomplete(finish)
        response.error = self._why_cut(finish)
        response.usage = _usage(finish)
        response.cause = finish.cause
        if body.return_token_ids:
            response.completion_token_ids = self._all.tokens
        if body.return_weight_versions:
            response.weight_versions = version_spans(self._all.versions, self._labels)
        return events

    def _why_incomplete(self, finish: Finish) -> Incomplete | None:
        if finish.reason == "stop":
            return None
        return Incomplete("max_output_tokens" if finish.reason == "length" or self._strict else finish.reason)

    def _why_cut(self, finish: Finish) -> ResponseError | None:
        error = cut_short(finish)
        return ResponseError("server_error" if self._strict else finish.cause, str(error)) if error else None


def _new_response(
    body: ResponsesRequest, sampling: SamplingParams, context: RequestContext, model: str
) -> ResponseObject:
    return ResponseObject(
        id=context.id("resp_"),
        created_at=context.created,
        instructions=body.instructions,
        max_output_tokens=sampling.max_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        text={"format": (body.text and body.text.format) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
        metadata=body.metadata or {},
    )


def _usage(finish: Finish) -> ResponseUsage:
    return ResponseUsage(
        finish.prompt_tokens,
        PromptDetails(finish.cached_tokens),
        finish.output_tokens,
        OutputDetails(),
        finish.prompt_tokens + finish.output_tokens,
    )
