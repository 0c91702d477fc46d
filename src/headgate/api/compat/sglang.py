"""The SGLang-compatible API, for slime and other clients of an SGLang server.

As in SGLang, new requests wait during a pause until `/continue_generation`. `/update_weights_from_disk` pauses a running
server for the time of the update. Weight versions are our numbers, written as text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headgate.api.accounting.ledger import PROBE
from headgate.api.accounting.metrics import EngineView, query_engines
from headgate.api.compat.weights import Outcome, number_of, update_held
from headgate.api.control import abort
from headgate.api.control.health import PING_TIMEOUT_S, judge, overall
from headgate.api.control.lifecycle import controls_of, followed, pause_of
from headgate.api.generate.answer_format import AnswerFormat
from headgate.api.generate.constraints import response_format_grammar
from headgate.api.generate.generation import ChoiceJob, Piece, run
from headgate.api.generate.jobs import check_choices, make_jobs, sampling_params
from headgate.api.generate.logprobs import LOWEST
from headgate.api.generate.prompts import text_prompts
from headgate.api.generate.reading import read_body
from headgate.api.generate.serve import RequestContext, exchange
from headgate.api.generate.wire import encode, error_event
from headgate.api.host import ServerContext, host_of
from headgate.api.state import Api, api_of
from headgate.contract.decoding import convert, decode
from headgate.contract.errors import QueueFull
from headgate.contract.orders import Order
from headgate.contract.sampling import (
    SAMPLING,
    SGLANG_TO_COMPLETIONS,
    SamplingParams,
    TextParams,
    sampling_given,
    text_params,
)
from headgate.contract.schema import CompletionRequest, prompts_of
from headgate.contract.sglang import MODES, AbortBody, FromDisk, GenerateBody, MemoryBody, PauseBody
from headgate.edge.gate import caller_of
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response
from headgate.edge.sse import DONE
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.command import TAGS, FileSource, Tag
from headgate.protocol.plan import Logprobs
from headgate.protocol.request import GenerateRequest

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 20.0

# ---------------------------------------------------------------------------------------------------------- /generate

WITHOUT_EFFECT = ("spaces_between_special_tokens", "custom_params", "stream_interval")


Scored = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET  # only in streams


async def generate(request: Request) -> Response:
    asked = await read_body(request, GenerateBody)
    body = completion(asked)
    api, prompts, text = api_of(request), prompts_of(body.prompt), text_params(body, "completions")
    choices = len(prompts) * text.n
    check_choices(choices, api.settings.max_choices)
    return exchange(request, body, "generate", choices, partial(_prepare, api, asked, body, text, prompts))


def completion(asked: GenerateBody) -> CompletionRequest:
    """The equivalent body of a completions request."""
    if (asked.text is None) == (asked.input_ids is None):
        raise RequestError("give either text or input_ids", param="text")
    fields: dict[str, Any] = {
        "prompt": asked.text if asked.text is not None else asked.input_ids,
        "request_id": asked.rid,
        "stream": asked.stream,
        "priority": asked.priority,
        "resume": asked.resume,
        "max_tokens": SAMPLING["max_tokens"].defaults["sglang"],
    }
    for name, value in (asked.sampling_params or {}).items():
        if name == "json_schema" and value is not None:
            schema = decode(value.encode(), dict[str, Any]) if isinstance(value, str) else value
            schema = convert(schema, dict[str, Any], name)
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        elif name in SGLANG_TO_COMPLETIONS:
            fields[SGLANG_TO_COMPLETIONS[name]] = value
        elif name not in WITHOUT_EFFECT and value is not None:
            raise RequestError(f"{name} is not supported; leave it out", param=f"sampling_params.{name}")
    body: CompletionRequest = convert(fields, CompletionRequest, "sampling_params")
    return body


async def _prepare(
    api: Api,
    asked: GenerateBody,
    body: CompletionRequest,
    text: TextParams,
    prompts: Sequence[str | list[int]],
    context: RequestContext,
) -> tuple[list[ChoiceJob], AnswerFormat]:
    grammar = await response_format_grammar(api, body.response_format, context.share)
    start = asked.logprob_start_len
    scores_prompt = asked.return_logprob and start is not None and start >= 0
    sampling = sampling_params(
        sampling_given(body, "completions"),
        logprobs=(asked.top_logprobs_num or 0) if asked.return_logprob else None,
        prompt_logprobs=0 if scores_prompt else None,
        grammar=grammar,
    )
    read = await text_prompts(api, prompts, context.share)
    return make_jobs(body, read, sampling, text), SglangFormat(api, asked, context)


class SglangFormat:
    """Every event repeats the answer so far, as in SGLang."""

    def __init__(self, api: Api, asked: GenerateBody, context: RequestContext) -> None:
        self._api, self._asked, self._context = api, asked, context
        self._began_s = time.perf_counter()
        self._so_far: dict[int, Piece] = {}
        self._choices = 1

    def event(self, job: ChoiceJob, piece: Piece) -> bytes:
        so_far = self._so_far.setdefault(job.index, Piece())
        so_far.add(piece)
        if not piece.tokens and piece.finish is None:
            return b""
        generated = self._generated(job, so_far)
        generated.index = job.index
        return b"data: " + encode(generated) + b"\n\n"

    def prime(self, job: ChoiceJob, piece: Piece) -> None:
        if self._asked.return_logprob:
            raise RequestError(
                "resume cannot be combined with return_logprob: every event repeats those of all tokens; start over",
                param="resume",
            )
        self._so_far[job.index] = piece

    def closing(self) -> bytes:
        return DONE

    def failure(self, error: HeadgateError) -> bytes:
        return error_event(error)

    def whole(self, jobs: Sequence[ChoiceJob], answers: Sequence[Piece]) -> bytes:
        several = len(jobs) > 1 or isinstance(self._asked.text, list) or _is_batch(self._asked.input_ids)
        self._choices = len(jobs)
        generated = [self._generated(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        return encode(generated if several else generated[0])

    def _generated(self, job: ChoiceJob, piece: Piece) -> Generated:
        finish = piece.finish
        meta = MetaInfo(
            id=self._context.request_id if self._choices == 1 else f"{self._context.request_id}-{job.index}",
            finish_reason=_finish_reason(job, piece),
            prompt_tokens=finish.prompt_tokens if finish else len(job.request.prompt),
            completion_tokens=finish.output_tokens if finish else len(piece.tokens),
            cached_tokens=finish.cached_tokens if finish else 0,
            weight_version=str(piece.versions[-1]) if piece.versions else "",
            e2e_latency=round(time.perf_counter() - self._began_s, 6),
        )
        if self._asked.return_logprob:
            self._add_scores(meta, job, piece)
        return Generated(text=piece.text, output_ids=piece.tokens, meta_info=meta)

    def _add_scores(self, meta: MetaInfo, job: ChoiceJob, piece: Piece) -> None:
        meta.output_token_logprobs = [
            self._scored(score.token, id) for id, score in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        if self._asked.top_logprobs_num:
            meta.output_top_logprobs = [self._top(score) for score in piece.logprobs]
        start = self._asked.logprob_start_len
        meta.input_token_logprobs = []
        if start is not None and start >= 0:
            values = [None, *(score.token for score in piece.prompt_logprobs)]
            pairs = zip(values, job.request.prompt, strict=False)
            meta.input_token_logprobs = [self._scored(value, id) for value, id in pairs][start:]

    def _top(self, score: Logprobs) -> list[Scored]:
        return [self._scored(value, id) for value, id in zip(score.top, score.top_ids, strict=True)]

    def _scored(self, value: float | None, id: int) -> Scored:
        text = None
        if self._asked.return_text_in_logprobs and self._api.tokenizer is not None:
            text = self._api.tokenizer.decode([id], skip_special=False)
        return (None if value is None else max(value, LOWEST), id, text)


def _is_batch(ids: list[Any] | None) -> bool:
    return ids is not None and len(ids) > 0 and isinstance(ids[0], list)


def _finish_reason(job: ChoiceJob, piece: Piece) -> dict[str, Any] | None:
    finish = piece.finish
    if finish is None:
        return None
    if finish.reason == "stop":
        if finish.cause == "stop_string":
            return {"type": "stop", "matched": finish.stop or job.stop[0]}
        return {"type": "stop", "matched": piece.tokens[-1] if piece.tokens else None}
    if finish.reason == "length":
        return {"type": "length", "length": finish.output_tokens}
    return {"type": "abort", "message": f"aborted: {finish.cause}"}


# ------------------------------------------------------------------------------------------------------------ control


async def abort_request(request: Request) -> Response:
    body, api, caller = await read_control(request, AbortBody), api_of(request), caller_of(request)
    if body.abort_all:
        abort.accept(abort.find_all(api.ledger, caller))
    elif body.rid:
        abort.accept(abort.find(api.ledger, caller, [body.rid]))
    else:
        api.ledger.metrics.aborts_ignored += 1
        log.warning("%s: ignored an abort without a rid", request.state.request_id)
    return Response()


async def pause_generation(request: Request) -> Response:
    body = await read_control(request, PauseBody)
    followed(await controls_of(request).pause(pause_of(MODES[body.mode]), Order.of(request.headers)))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    followed(await controls_of(request).resume(order=Order.of(request.headers)))
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def update_weights_from_disk(request: Request) -> Response:
    body, controls = await read_control(request, FromDisk), controls_of(request)
    version = number_of(body.weight_version)
    held = len(api_of(request).ledger.live)
    try:
        result = await update_held(
            controls, FileSource(body.model_path), version, abort=body.abort_all_requests, recompute=body.flush_cache
        )
    except HeadgateError as error:
        return json_response(Outcome(success=False, message=str(error), num_paused_requests=held), 400)
    message = f"Succeeded to update model weights. The version is {result.weight_version}."
    return json_response(Outcome(success=True, message=message, num_paused_requests=held))


async def flush_cache(request: Request) -> Response:
    followed(await controls_of(request).flush())
    return PlainTextResponse("Cache flushed.\nPlease check backend logs for more details.\n")


def _memory_tags(body: MemoryBody) -> list[Tag]:
    # SGLang has more tags than we do; the others are ignored.
    return list(TAGS) if body.tags is None else [tag for tag in TAGS if tag in body.tags]


async def release_memory(request: Request) -> Response:
    """As in SGLang the server must be idle, so it is drained; new requests wait until all memory is restored."""
    tags, controls = _memory_tags(await read_control(request, MemoryBody)), controls_of(request)
    if not (await controls.status()).is_paused:
        followed(await controls.pause(pause_of("drain")))
    if tags:
        followed(await controls.sleep(tags))
    return Response()


async def resume_memory(request: Request) -> Response:
    tags, controls = _memory_tags(await read_control(request, MemoryBody)), controls_of(request)
    result = followed(await controls.wake(tags)) if tags else await controls.status()
    if not result.asleep and result.is_paused:
        followed(await controls.resume())
    return Response()


# ------------------------------------------------------------------------------------------------------------- status


async def model_info(request: Request) -> Response:
    api = api_of(request)
    fleet = await controls_of(request).status()
    return json_response(
        {
            "model_path": api.model_name,
            "tokenizer_path": api.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(fleet.weight_version),
        }
    )


async def server_info(request: Request) -> Response:
    api, host, info = api_of(request), host_of(request), api_of(request).engines.info
    fleet = await controls_of(request).status()
    return json_response(
        {
            "model_path": api.model_name,
            "served_model_name": api.model_name,
            "version": host.version,
            "dp_size": len(host.replicas),
            "tp_size": info.ranks,
            "context_length": info.max_context,
            "max_total_num_tokens": info.num_blocks * info.block_size,
            "max_running_requests": info.max_running,
            "page_size": info.block_size,
            "dtype": info.dtype,
            "device": info.device,
            "weight_version": str(fleet.weight_version),
            "internal_states": msgspec.to_builtins(fleet.engines),
        }
    )


async def loads(request: Request) -> Response:
    host = host_of(request)
    views = await query_engines(host.replicas, PING_TIMEOUT_S)
    engine_loads = [load for view in views if (load := load_of(view))]
    return json_response(
        {
            "timestamp": time.time(),
            "life": host.boot_id,
            "dp_rank_count": len(engine_loads),
            "loads": engine_loads,
            # The most recent horizon of all engines: a prefix used since then is still cached, whichever engine has it.
            "cache_horizon_age_s": min((load["cache_horizon_age_s"] for load in engine_loads), default=None),
        }
    )


def load_of(view: EngineView) -> dict[str, Any] | None:
    if view.pong is None or view.info is None:
        return None
    status, info = view.pong.status, view.info
    return {
        "dp_rank": view.index,
        "num_running_reqs": status.running,
        "num_waiting_reqs": status.waiting,
        "num_total_reqs": status.running + status.waiting,
        "num_used_tokens": status.held_blocks * info.block_size,
        "max_total_num_tokens": info.num_blocks * info.block_size,
        "num_free_blocks": info.num_blocks - status.held_blocks,
        "num_total_blocks": info.num_blocks,
        "block_size": info.block_size,
        "cache_horizon_age_s": round(view.pong.quiet_s + status.turn_s - status.horizon_s, 3),
        "max_running_requests": info.max_running,
        "token_usage": status.held_blocks / info.num_blocks,
        "weight_version": str(status.version),
        "state": "outdated" if view.outdated and status.state == "running" else status.state,
    }


async def health_generate(request: Request) -> Response:
    """Whether a token can be generated; for a paused server, whether its engines are healthy."""
    api, host = api_of(request), host_of(request)
    if not await _alive(host):
        return Response(status_code=503)
    if (await controls_of(request).status()).state == "running":
        probe = GenerateRequest(0, (0,), SamplingParams(max_tokens=1, temperature=0.0))
        try:
            # Admitted like any other request, so that its cost is accounted.
            probing = api.ledger.admit(kind=PROBE, share=request.state.share)
            async with asyncio.timeout(PROBE_TIMEOUT_S), probing as record:
                await run(api, record, ChoiceJob(index=0, request=probe), _discard)
        except QueueFull:
            pass  # a busy server is healthy
        except (TimeoutError, HeadgateError):
            return Response(status_code=503)
    return Response()


async def _discard(job: ChoiceJob, piece: Piece) -> None:
    pass


async def _alive(host: ServerContext) -> bool:
    views = await query_engines(host.replicas, PING_TIMEOUT_S)
    return overall({judge(view).state for view in views}) != "unhealthy"
