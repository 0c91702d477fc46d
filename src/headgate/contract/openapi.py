"""The OpenAPI description: every endpoint with its body, its answers and its errors, from the types that are used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from headgate.contract.abort import AbortAnswer, AbortRequest
from headgate.contract.answers import ChatCompletion, Completion, Detokenized, Tokenized
from headgate.contract.control import ControlAnswer, ControlBody, MemoryRequest, PauseRequest, UpdateRequest
from headgate.contract.errors import ErrorBody
from headgate.contract.requests import RequestDetails, RequestList
from headgate.contract.responses import ResponseObject
from headgate.contract.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from headgate.contract.sglang import (
    AbortBody,
    FromDisk,
    FromDistributed,
    FromTensor,
    GenerateBody,
    InitGroup,
    MemoryBody,
    PauseBody,
)
from headgate.contract.status import Health, Model, ModelList, Readiness
from headgate.contract.vllm import FinishTransfer, InitTransfer, TokensRequest, UpdateTransfer

ERRORS = {
    400: "The request cannot be understood or is out of range; `param` names the field",
    401: "No API key, or one that is not known",
    403: "The key does not allow this call",
    404: "There is no such thing",
    409: "A request with the same id is still running, or the engines are not in a state for this",
    413: "The body is too large",
    422: "The Idempotency-Key was used for another request",
    429: "The queue is full; `Retry-After` says when to try again",
    500: "The server made a mistake",
    502: "The weights that were promised did not come",
    503: "Not now: shutting down, paused, or the engine was lost; `Retry-After` says when to try again",
}
ANY = (400, 401, 403, 500)  # a bad X-Request-Id, keys, our bugs
POSTED = (*ANY, 404, 413)
GENERATED = (*POSTED, 409, 422, 429, 503)
CONTROLLED = (*POSTED, 409, 502, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    method: str
    path: str
    summary: str
    answer: Any = None  # a type, or None for plain text
    body: Any = None
    errors: tuple[int, ...] = ANY
    streams: bool = False
    unwell: bool = False  # also answers 503 in its own words
    accepts: bool = False  # also answers 202, before all is done
    empty: bool = False  # has nothing to say but that it is done


# Of other systems' calls, those whose answer has no body.
SAY_NOTHING = (
    "/abort_request",
    "/health_generate",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
)

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="The next message of a conversation",
        body=ChatRequest,
        answer=ChatCompletion,
        errors=GENERATED,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="What comes after a text",
        body=CompletionRequest,
        answer=Completion,
        errors=GENERATED,
        streams=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="The next message of a conversation, as OpenAI's newer API says it; nothing is stored",
        body=ResponsesRequest,
        answer=ResponseObject,
        errors=GENERATED,
        streams=True,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="The token ids of a text or of a conversation",
        body=TokenizeRequest,
        answer=Tokenized,
        errors=POSTED,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="The text of token ids",
        body=DetokenizeRequest,
        answer=Detokenized,
        errors=POSTED,
    ),
    Operation(method="get", path="/v1/models", summary="The models that are served", answer=ModelList),
    Operation(
        method="get", path="/v1/models/{model}", summary="One model that is served", answer=Model, errors=(*ANY, 404)
    ),
    Operation(method="get", path="/live", summary="Whether the process answers", answer=dict[str, str]),
    Operation(
        method="get", path="/ready", summary="Whether a request would be taken now", answer=Readiness, unwell=True
    ),
    Operation(method="get", path="/health", summary="Whether the engines move", answer=Health, unwell=True),
    Operation(method="get", path="/metrics", summary="Numbers for Prometheus"),
    Operation(method="get", path="/openapi.json", summary="This description", answer=dict[str, Any]),
    Operation(
        method="post",
        path="/v1/abort_requests",
        summary="End requests; their clients get what there is",
        body=AbortRequest,
        answer=AbortAnswer,
        errors=POSTED,
        accepts=True,
    ),
    Operation(method="get", path="/v1/requests", summary="What is in flight", answer=RequestList),
    Operation(
        method="get",
        path="/v1/requests/{id}",
        summary="What happened to a request, and what it cost when it has ended",
        answer=RequestDetails,
        errors=(*ANY, 404),
    ),
    Operation(
        method="delete",
        path="/v1/requests/{id}",
        summary="End a request",
        answer=AbortAnswer,
        errors=(*ANY, 404),
        accepts=True,
    ),
    *(
        Operation(
            method="post",
            path=path,
            summary=summary,
            body=body,
            answer=ControlAnswer,
            errors=CONTROLLED,
            accepts=True,
        )
        for path, summary, body in (
            ("/v1/pause", "Hold all engines", PauseRequest),
            ("/v1/resume", "Let them go on", ControlBody),
            ("/v1/update_weights", "Give paused engines other weights", UpdateRequest),
            ("/v1/sleep", "Have paused engines give memory back", MemoryRequest),
            ("/v1/wakeup", "Have them take it again", MemoryRequest),
            ("/v1/flush_cache", "Forget cached prefixes that nobody uses", ControlBody),
        )
    ),
    Operation(method="get", path="/v1/is_paused", summary="Where the engines stand", answer=ControlAnswer),
    *(
        Operation(
            method=method,
            path=path,
            summary=f"As in {of}",
            body=body,
            answer=None if path == "/flush_cache" else Any,
            errors=GENERATED,
            streams=path.endswith("/generate"),
            empty=path in SAY_NOTHING,
        )
        for of, method, path, body in (
            ("SGLang", "post", "/generate", GenerateBody),
            ("SGLang", "post", "/abort_request", AbortBody),
            ("SGLang", "post", "/pause_generation", PauseBody),
            ("SGLang", "post", "/continue_generation", None),
            ("SGLang", "post", "/update_weights_from_disk", FromDisk),
            ("SGLang", "post", "/init_weights_update_group", InitGroup),
            ("SGLang", "post", "/destroy_weights_update_group", None),
            ("SGLang", "post", "/update_weights_from_distributed", FromDistributed),
            ("SGLang", "post", "/update_weights_from_tensor", FromTensor),
            ("SGLang", "get", "/flush_cache", None),
            ("SGLang", "post", "/flush_cache", None),
            ("SGLang", "post", "/release_memory_occupation", MemoryBody),
            ("SGLang", "post", "/resume_memory_occupation", MemoryBody),
            ("SGLang", "get", "/model_info", None),
            ("SGLang", "get", "/get_model_info", None),
            ("SGLang", "get", "/server_info", None),
            ("SGLang", "get", "/get_server_info", None),
            ("SGLang", "get", "/v1/loads", None),
            ("SGLang", "get", "/health_generate", None),
            ("vLLM", "post", "/pause", None),
            ("vLLM", "post", "/resume", None),
            ("vLLM", "get", "/is_paused", None),
            ("vLLM", "post", "/sleep", None),
            ("vLLM", "post", "/wake_up", None),
            ("vLLM", "get", "/is_sleeping", None),
            ("vLLM", "post", "/reset_prefix_cache", None),
            ("vLLM", "post", "/init_weight_transfer_engine", InitTransfer),
            ("vLLM", "post", "/start_weight_update", None),
            ("vLLM", "post", "/update_weights", UpdateTransfer),
            ("vLLM", "post", "/finish_weight_update", FinishTransfer),
            ("vLLM", "post", "/inference/v1/generate", TokensRequest),
            ("vLLM", "get", "/version", None),
            ("vLLM", "get", "/get_world_size", None),
        )
    ),
)


@cache
def description(version: str) -> bytes:
    return msgspec.json.encode(describe(version))


def describe(version: str) -> dict[str, Any]:
    schemas, components = msgspec.json.schema_components(_types(), ref_template="#/components/schemas/{name}")
    named = dict(zip(map(repr, _types()), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headgate", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _types() -> list[Any]:
    used = [kind for operation in OPERATIONS for kind in (operation.body, operation.answer) if kind is not None]
    return [*dict.fromkeys(used), ErrorBody]


def _operation(operation: Operation, named: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".replace("/", "_")
        .replace(".", "_")
        .replace("{model}", "one")
        .replace("{id}", "one"),
        "responses": _responses(operation, named),
    }
    if operation.body is not None:
        content = {"application/json": {"schema": named[repr(operation.body)]}}
        described["requestBody"] = {"required": True, "content": content}
    if names := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    return described


def _responses(operation: Operation, named: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {"application/json": {"schema": named[repr(operation.answer)]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "Done"}}
    if not operation.empty:
        responses = {"200": {"description": "The answer", "content": content}}
    if operation.accepts:
        responses["202"] = {"description": "Accepted, and not all of it is done", "content": content}
    if operation.unwell:
        responses["503"] = {"description": "No", "content": content}
    error = {"application/json": {"schema": named[repr(ErrorBody)]}}
    for status in sorted(operation.errors):
        responses[str(status)] = {"description": ERRORS[status], "content": error}
    return responses
