"""The vLLM-compatible API, for TRL, verl and other clients of a vLLM server.

As in vLLM, new requests wait during a pause. Sleep pauses first, and waking all memory resumes. Weight transfer
(`/init_weight_transfer_engine` and the calls after it) is in `vllm_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.compat.memory import resume_unless_asleep, wake_and_resume
from headgate.api.compat.weights import commit_collected
from headgate.api.control import abort
from headgate.api.control.lifecycle import controls_of, followed, pause_of
from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.constraints import answer_grammar
from headgate.api.generate.generation import ChoiceJob, Finish, Piece
from headgate.api.generate.jobs import asked_prompt_logprobs, check_choices, make_jobs, recommended, sampling_params
from headgate.api.generate.logprobs import chat_logprobs, prompt_logprobs
from headgate.api.generate.prompts import text_prompt
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.usage import usage_of, usage_so_far
from headgate.api.generate.wire import error_event, usage_asked, usage_in_chunks
from headgate.api.host import host_of
from headgate.api.state import Api, api_of
from headgate.contract.answers import ChatLogprobs, PromptLogprobs, Usage
from headgate.contract.compatible import check_compatible, check_sampling_field
from headgate.contract.decoding import convert
from headgate.contract.event_json import encode
from headgate.contract.orders import Order
from headgate.contract.sampling import VLLM_TO_COMPLETIONS, TextParams, sampling_given, text_params
from headgate.contract.schema import CompletionRequest
from headgate.contract.tickets import KeptKv, kept_kv
from headgate.contract.vllm import TokensRequest, abort_ids, flag, mode_of, sleep_tags, wake_tags
from headgate.edge.gate import caller_of
from headgate.edge.responses import json_response
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError


async def pause(request: Request) -> Response:
    followed(await controls_of(request).pause(pause_of(mode_of(request.query_params)), Order.of(request.headers)))
    if flag(request.query_params, "clear_cache", default=True):
        followed(await controls_of(request).flush())
    return json_response({"status": "paused"})


async def resume(request: Request) -> Response:
    await commit_collected(request)
    await resume_unless_asleep(controls_of(request), Order.of(request.headers))
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": (await controls_of(request).status()).is_paused})


async def sleep(request: Request) -> Response:
    controls, tags, mode = controls_of(request), sleep_tags(request.query_params), mode_of(request.query_params)
    if not (await controls.status()).is_paused:
        followed(await controls.pause(pause_of(mode)))
    if tags:
        followed(await controls.sleep(tags))
    return Response()


async def wake_up(request: Request) -> Response:
    await wake_and_resume(controls_of(request), wake_tags(request.query_params))
    return Response()


async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": bool((await controls_of(request).status()).asleep)})


async def reset_prefix_cache(request: Request) -> Response:
    followed(await controls_of(request).flush())
    return json_response({"success": True})


async def abort_requests(request: Request) -> Response:
    """Abort requests and wait for their ends. The answer has the number of requests that this call ended."""
    selected, api, caller = abort_ids(await request.body()), api_of(request), caller_of(request)
    ids = selected.req_ids
    found = abort.find_all(api.ledger, caller) if ids is None else abort.find(api.ledger, caller, ids)
    result = await abort.abort(api, found, selected.timeout)
    return json_response({"status": "aborted", "aborted": len(result.aborted)})


async def version(request: Request) -> Response:
    return json_response({"version": host_of(request).version})


async def get_world_size(request: Request) -> Response:
    """The number of engines that take part in a weight update."""
    return json_response({"world_size": len(host_of(request).replicas)})


# --------------------------------------------------------------------------------------------- /inference/v1/generate


class TokensChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    cause: str | UnsetType = UNSET
    routed_experts: str | UnsetType | None = UNSET  # with the finish reason


class TokensResponse(msgspec.Struct, kw_only=True):
    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: KeptKv | UnsetType | None = UNSET  # if the request has `do_remote_decode`


async def generate(request: Request) -> Response:
    asked = await read_body(request, TokensRequest)
    check_compatible(asked, "vllm")
    body, api = _completion(asked), api_of(request)
    text = text_params(body, "completions")
    check_choices(text.n, api.settings.max_choices)
    return exchange(request, body, "tokens", text.n, partial(_prepare, api, asked, body, text))


def _completion(asked: TokensRequest) -> CompletionRequest:
    fields: dict[str, Any] = {"prompt": asked.token_ids, "model": asked.model, "stream": asked.stream}
    fields |= {"request_id": asked.request_id, "priority": asked.priority, "cache_salt": asked.cache_salt}
    fields |= {"resume": asked.resume, "kv_transfer_params": asked.kv_transfer_params}
    return completion_of(asked.sampling_params, fields, "sampling_params")


def completion_of(params: Mapping[str, Any], fields: Mapping[str, Any], within: str) -> CompletionRequest:
    """A completions request with vLLM's sampling parameters. Errors name parameters as members of `within`."""
    fields = dict(fields)
    for name, value in params.items():
        if name in VLLM_TO_COMPLETIONS:
            fields[VLLM_TO_COMPLETIONS[name]] = value
        elif name in ("structured_outputs", "guided_decoding"):
            fields[name] = value
        else:
            check_sampling_field("vllm", name, value, within)
    body: CompletionRequest = convert(fields, CompletionRequest, within)
    return body


async def _prepare(
    api: Api, asked: TokensRequest, body: CompletionRequest, text: TextParams, context: RequestContext
) -> tuple[list[ChoiceJob], AnswerFormat]:
    given = sampling_given(body, "completions")
    # vLLM has no field for this: a server that keeps experts returns them with every answer.
    keeps, wanted = api.engines.info.routed is not None, asked.return_routed_experts
    given["return_routed_experts"] = keeps if wanted is None else wanted
    grammar = await answer_grammar(api, body, context.share)
    sampling = sampling_params(
        recommended(api, given), prompt_logprobs=asked_prompt_logprobs(given, body), grammar=grammar
    )
    assert isinstance(body.prompt, list)
    prompt = await text_prompt(api, body.prompt, context.share)
    return make_jobs(body, [prompt], sampling, text), VllmTokensFormat(api, asked, text.n, context)


class VllmTokensFormat:
    def __init__(self, api: Api, asked: TokensRequest, n: int, context: RequestContext) -> None:
        self._api, self._asked, self._n, self._context = api, asked, n, context
        self._counts: dict[int, int] = {}  # tokens so far, by choice
        self._finishes: dict[int, Finish] = {}

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        if not piece.tokens and piece.finish is None:
            return b""
        chunk = self._response([self._choice(job, piece)])
        if self._asked.return_token_ids and job.index not in self._counts:
            chunk.prompt_token_ids = job.request.prompt
        self.prime(job, piece)
        if usage_in_chunks(self._asked.stream_options):
            chunk.usage = usage_so_far(job, piece, self._counts[job.index])
        return _event(chunk)

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        self._counts[job.index] = self._counts.get(job.index, 0) + len(piece.tokens)
        self._note(job, piece)

    def closing(self) -> bytes:
        if not usage_asked(self._asked.stream_options):
            return DONE
        last = self._response([])
        last.usage = self._usage()
        return _event(last) + DONE

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        answer = self._response([self._choice(*each) for each in zip(jobs, answers, strict=True)])
        for job, piece in zip(jobs, answers, strict=True):
            self._note(job, piece)
        answer.usage = self._usage()
        block_size = self._api.engines.info.block_size
        answer.kv_transfer_params = kept_kv(self._asked.kv_transfer_params, answers[0].ticket, block_size)
        if self._asked.return_token_ids:
            answer.prompt_token_ids = jobs[0].request.prompt
        if jobs[0].request.sampling.prompt_logprobs is not None:
            scores = answers[0].prompt_logprobs
            answer.prompt_logprobs = prompt_logprobs(self._api.tokenizer, jobs[0].request.prompt, scores)
        return encode(answer)

    def _note(self, job: ChoiceJob, piece: Piece) -> None:
        if piece.finish is not None:
            self._finishes[job.index] = piece.finish

    def _usage(self) -> Usage:
        return usage_of([finish for _, finish in sorted(self._finishes.items())], self._n)

    def _response(self, choices: list[TokensChoice]) -> TokensResponse:
        return TokensResponse(request_id=self._context.request_id, choices=choices)

    def _choice(self, job: ChoiceJob, piece: Piece) -> TokensChoice:
        scored = job.request.sampling.logprobs is not None
        return TokensChoice(
            index=job.index,
            token_ids=piece.tokens,
            finish_reason=piece.finish.reason if piece.finish else None,
            logprobs=chat_logprobs(self._api.tokenizer, piece.tokens, piece.logprobs) if scored else None,
            cause=piece.finish.cause if piece.finish else UNSET,
            routed_experts=_experts(job, piece),
        )


def _experts(job: ChoiceJob, piece: Piece) -> str | UnsetType | None:
    if piece.finish is None or not job.request.sampling.return_routed_experts:
        return UNSET
    return piece.experts


def _event(chunk: TokensResponse) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"
