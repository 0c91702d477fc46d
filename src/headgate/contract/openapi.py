"""The OpenAPI descriptions of a server and of a router, generated from their operations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import msgspec

from headgate.contract.operations.operation import ERRORS, Operation
from headgate.contract.operations.table import ON_ROUTERS, ON_SERVERS

NO_WORKER: Final = (502, 503)  # for any call to a router: no worker is available, or the worker was lost


@cache
def server_description(version: str) -> bytes:
    return msgspec.json.encode(describe("Headgate", version, ON_SERVERS))


@cache
def router_description(version: str) -> bytes:
    return msgspec.json.encode(describe("Headgate router", version, map(_on_router, ON_ROUTERS)))


def _on_router(operation: Operation) -> Operation:
    body = operation.router_body or operation.body
    return replace(operation, body=body, errors=tuple({*operation.errors, *NO_WORKER}))


def describe(title: str, version: str, operations: Iterable[Operation]) -> dict[str, Any]:
    described = [operation for operation in operations if operation.in_api]
    types = _types(described)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    named = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in described:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _types(operations: Sequence[Operation]) -> list[Any]:
    used = [kind for operation in operations for kind in (operation.body, operation.answer) if kind is not None]
    return list(dict.fromkeys([*used, *(operation.error for operation in operations)]))


def _operation(operation: Operation, named: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"[/.]", "_", re.sub(r"{\w+}", "one", operation.method.lower() + operation.path)),
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
    content = _content(operation, named)
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    if operation.answer is None:
        responses = {"200": {"description": "Done"}}
    if operation.answers_202:
        responses["202"] = {"description": "Accepted; not complete yet", "content": content}
    if operation.answers_503:
        responses["503"] = {"description": "Not ready or not healthy", "content": content}
    error = {"application/json": {"schema": named[repr(operation.error)]}}
    for status in sorted(operation.errors):
        responses.setdefault(str(status), {"description": ERRORS[status], "content": error})
    return responses


def _content(operation: Operation, named: dict[str, Any]) -> dict[str, Any]:
    if operation.answer is str:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": named.get(repr(operation.answer))}}
    if operation.generates and not operation.restarts:  # answers that start anew are never streamed
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content
