"""POST /v1/messages and /v1/messages/count_tokens: chat with Anthropic's Messages API.

A request is converted to a chat request; this module writes the answer. An answer is a list of blocks (reasoning, texts
and tool calls). In a stream each block is opened, grows by deltas, and is closed before the next one. The first piece of
an answer opens the message, and the last one ends it, so a server that continues a stream knows what was written before
from the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.answer_parts import Readers, read
from headgate.api.generate.chat import chat_jobs, warn_about_tools
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.message_blocks import Blocks
from headgate.api.generate.message_input import as_chat
from headgate.api.generate.prompts import chat_prompt
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, check_model, exchange
from headgate.api.generate.tokenize import MOST_TOKENS
from headgate.api.generate.usage import version_spans
from headgate.api.generate.wire import cut_short
from headgate.api.state import Api, api_of
from headgate.contract.compatible import check_compatible
from headgate.contract.error_answers import error_event_at
from headgate.contract.event_json import encode
from headgate.contract.messages import (
    CountTokensRequest,
    MessageEnd,
    MessageErrorBody,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    TokenCount,
    event,
    message_delta,
    message_start,
    stop_reason_of,
)
from headgate.contract.sampling import text_params
from headgate.contract.schema import ChatRequest
from headgate.errors import HeadgateError

THINKING_IGNORED = "reasoning of this model is not separated from its answer; thinking has no effect"


async def messages(request: Request) -> Response:
    body = await read_body(request, MessagesRequest)
    check_compatible(body, "messages")
    return exchange(request, body, "message", 1, partial(prepare, api_of(request), body))


async def prepare(api: Api, body: MessagesRequest, context: RequestContext) -> tuple[list[ChoiceJob], AnswerFormat]:
    chat = as_chat(body)
    warn_about_tools(api, chat, context)
    if body.thinking is not None and body.thinking.type == "enabled" and api.parsers.reasoning is None:
        context.warnings.append(THINKING_IGNORED)
    jobs = await chat_jobs(api, chat, text_params(chat, "chat"), context.share)
    return jobs, MessagesFormat(api, chat, context, len(jobs[0].request.prompt))


async def count_tokens(request: Request) -> Response:
    given, api = await read_body(request, CountTokensRequest, MOST_TOKENS), api_of(request)
    check_model(api, given.model)
    body = MessagesRequest(**msgspec.structs.asdict(given))
    check_compatible(body, "messages")
    chat = as_chat(body)
    prompt = await chat_prompt(
        api,
        chat.messages,
        request.state.share,
        most=max(api.engines.info.max_context, MOST_TOKENS),
        tools=chat.tools if chat.tool_choice != "none" else None,
        continue_final_message=chat.continue_final_message,
        variables=chat.chat_template_kwargs,
    )
    answer = TokenCount(input_tokens=len(prompt.token_ids))
    return Response(msgspec.json.encode(answer), media_type="application/json")


class MessagesFormat:
    def __init__(self, api: Api, chat: ChatRequest, context: RequestContext, prompt_tokens: int) -> None:
        self._chat, self._context, self._labels = chat, context, api.labels
        usage = MessageUsage(prompt_tokens, 0, 0)  # the number of cached tokens is known at the end
        self._message = MessageObject(id=context.id("msg_"), model=api.model_name, usage=usage)
        self._readers = Readers(api, chat, seed=self._message.id)
        self._blocks = Blocks()
        self._all = Piece()  # the sum of all pieces, without their text
        self._begun = False

    # -- streams ----------------------------------------------------------------

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        events = b"" if self._begun else message_start(self._message)
        self._begun = True
        events += self._add(job, piece)
        if piece.finish is None:
            return events
        events += self._blocks.close()
        error = self._why_cut(piece.finish)
        events += message_delta(self._end(job, piece.finish), _usage(piece.finish))
        return events + (self.failure(error) if error else b"")

    def closing(self) -> bytes:
        return event("message_stop")

    def failure(self, error: HeadgateError) -> bytes:
        return error_event_at(self._context.path, error, self._context.request_id)

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        self.event(job, piece)

    # -- complete answers -------------------------------------------------------

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        (job,), (answer,) = jobs, answers
        assert answer.finish is not None
        self._add(job, answer)
        self._blocks.close()
        end = msgspec.structs.asdict(self._end(job, answer.finish))
        changes = {**end, "usage": _usage(answer.finish), "content": self._blocks.content}
        error = self._why_cut(answer.finish)
        problem = MessageErrorBody.of(error, self._context.request_id).error if error else UNSET
        return encode(msgspec.structs.replace(self._message, **changes, error=problem))

    # -- both -------------------------------------------------------------------

    def _add(self, job: ChoiceJob, piece: Piece) -> bytes:
        if self._chat.return_token_ids or self._chat.return_weight_versions:
            self._all.tokens += piece.tokens
            self._all.versions += piece.versions
        reader = self._readers.get(job)
        if reader is None:
            return self._blocks.add_text(piece.text) if piece.text else b""
        return b"".join(map(self._blocks.add, read(reader, piece)))

    def _why_cut(self, finish: Finish) -> HeadgateError | None:
        """The error for clients that do not accept the stop reason `abort`, if the answer was cut short."""
        return cut_short(finish) if self._context.strict else None

    def _end(self, job: ChoiceJob, finish: Finish) -> MessageEnd:
        reader = self._readers.get(job)
        called = reader is not None and reader.called
        reason = stop_reason_of(finish.reason, finish.cause, called=called, strict=self._context.strict)
        ids, spans = self._chat.return_token_ids, self._chat.return_weight_versions
        return MessageEnd(
            stop_reason=reason,
            stop_sequence=(finish.stop or None) if reason == "stop_sequence" else None,
            cause=finish.cause,
            prompt_token_ids=job.request.prompt if ids else UNSET,
            completion_token_ids=self._all.tokens if ids else UNSET,
            weight_versions=version_spans(self._all.versions, self._labels) if spans else UNSET,
        )


def _usage(finish: Finish) -> MessageUsage:
    return MessageUsage(finish.prompt_tokens - finish.cached_tokens, finish.cached_tokens, finish.output_tokens)
