"""The path of requests whose answers are made of vectors: one choice per text, all computed before the answer begins.

Such an answer has no finish reason. A choice that ends without its vector is therefore an error, with the codes that a
router uses for requests that end before a worker has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.answer_format import AnswerFormat, WholeFormat
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.jobs import Prompt, make_jobs, sampling_params
from headgate.api.generate.prompts import text_prompts
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.usage import usage_of
from headgate.api.state import Api, api_of
from headgate.contract.answers import Usage
from headgate.contract.event_json import encode
from headgate.contract.journal import is_movable
from headgate.contract.sampling import TextParams
from headgate.contract.schema import CompletionRequest
from headgate.contract.vectors import VectorRequest
from headgate.errors import ContextTooLong, HeadgateError, RequestError, Unavailable

Texts = Sequence[str | list[int]]
# Takes the context, the vectors as `write` has made them, and the usage of all texts; returns the answer.
Compose = Callable[[RequestContext, list[Any], Usage], Any]


class Unfinished(RequestError):
    status = 409
    code = "aborted"


def pooled(
    request: Request,
    body: VectorRequest,
    kind: str,
    texts: Texts,
    param: str,
    write: Callable[[bytes], Any],
    compose: Compose,
) -> Response:
    """The answer that `compose` makes of the vectors of `texts`, which the request has in the field `param`."""
    api = api_of(request)
    if len(texts) > (most := api.settings.max_choices):
        raise RequestError(
            f"{len(texts)} texts were given; a request may have at most {most}. Send several requests",
            param=param,
            code="too_many_choices",
        )
    generation = body.generation()
    add_special = body.add_special_tokens is not False
    prepare = partial(_prepare, api, generation, texts, param, write, compose, add_special=add_special)
    return exchange(request, generation, kind, len(texts), prepare)


async def _prepare(
    api: Api,
    generation: CompletionRequest,
    texts: Texts,
    param: str,
    write: Callable[[bytes], Any],
    compose: Compose,
    context: RequestContext,
    *,
    add_special: bool,
) -> tuple[list[ChoiceJob], AnswerFormat]:
    prompts = await text_prompts(api, texts, context.share, add_special=add_special)
    _check_lengths(prompts, param, api.engines.info.max_context)
    jobs = make_jobs(generation, prompts, sampling_params({"max_tokens": 0}), TextParams())
    pooling = api.settings.pooling
    requests = [structs.replace(job.request, pooling=pooling) for job in jobs]
    jobs = [replace(job, request=each, write_vector=write) for job, each in zip(jobs, requests, strict=True)]
    return jobs, WholeFormat(partial(_composed, context, compose))


def _check_lengths(prompts: Sequence[Prompt], param: str, most: int) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise RequestError(f"text {i} of {param} is empty", param=param, code="invalid_value")
        if (length := len(prompt.token_ids)) > most:
            raise ContextTooLong(f"text {i} of {param} has {length} tokens; this model takes {most}", param=param)


def _composed(
    context: RequestContext, compose: Compose, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]
) -> bytes:
    finishes = [_finish_of(answer) for answer in answers]
    return encode(compose(context, [answer.vector for answer in answers], usage_of(finishes, 1)))


def _finish_of(answer: Piece) -> Finish:
    finish = answer.finish
    assert finish is not None
    if answer.vector is None:
        raise unfinished(finish)
    return finish


def unfinished(finish: Finish) -> HeadgateError:
    """The error for a text that ended without its vector."""
    if finish.cause == "pause":
        return Unavailable("this request was ended by a pause; send it again after the resume", code="paused")
    if is_movable(finish.reason, finish.cause):
        return Unavailable(f"this server could not finish this request ({finish.cause}); send it again")
    code = finish.cause if finish.cause == "deadline" else None
    return Unfinished(f"this request ended before its vectors were computed ({finish.cause})", code=code)
