"""The table of operations, and routes, access and errors derived from it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router

from headgate.api.app import HANDLERS
from headgate.contract.access import access_of, declared_access
from headgate.contract.operations import control
from headgate.contract.operations.operation import ERRORS, Access, AskAll, Operation
from headgate.contract.operations.table import GENERATING, ON_ROUTERS, ON_SERVERS, OPERATIONS, RELAYED
from headgate.edge.routing import routes_of

LOOK = Operation(method="GET", path="/thing/{name}", summary="", fan_out=None)
REMOVE = replace(LOOK, method="DELETE")
OTHER = replace(LOOK, path="/other")


async def look(request: Request) -> Response:
    return PlainTextResponse(f"look {request.path_params['name']}")


async def remove(request: Request) -> Response:
    return PlainTextResponse(f"remove {request.path_params['name']}")


def test_an_operation_is_declared_once():
    assert [name for name, times in Counter(map(str, OPERATIONS)).items() if times > 1] == []


def test_every_operation_is_served_by_a_server_or_a_router():
    assert {*ON_SERVERS, *ON_ROUTERS} == set(OPERATIONS)


def test_every_error_that_an_operation_declares_has_a_meaning():
    assert {status for operation in OPERATIONS for status in operation.errors} <= set(ERRORS)


def test_operations_with_a_body_declare_that_it_can_be_too_large():
    assert [str(each) for each in OPERATIONS if each.body is not None and 413 not in each.errors] == []


def test_an_operation_without_declared_access_requires_the_admin_key():
    assert LOOK.access is Access.ADMIN
    assert access_of("/an/operation/that/is/not/declared") is Access.ADMIN


def test_the_methods_of_a_path_have_the_same_access():
    with pytest.raises(ValueError, match=r"/thing/{name} has methods with different access"):
        declared_access([LOOK, replace(REMOVE, access=Access.OPEN)])


def test_only_admin_operations_change_all_workers():
    effective = [each for each in OPERATIONS if isinstance(each.fan_out, AskAll)]
    assert effective and {each.access for each in effective} == {Access.ADMIN}


def test_the_router_relays_operations_declared_as_relayed():
    assert GENERATING < RELAYED


def test_an_operation_without_a_handler_fails_at_start():
    incomplete = {operation: handler for operation, handler in HANDLERS.items() if operation is not control.PAUSE}
    with pytest.raises(ValueError, match=r"no handler for POST /v1/pause$"):
        routes_of(ON_SERVERS, incomplete)


def test_a_handler_without_an_operation_fails_at_start():
    with pytest.raises(ValueError, match=r"a handler for GET /thing/{name}, which is not declared here"):
        routes_of(ON_SERVERS, {**HANDLERS, LOOK: look})


def test_one_path_has_one_route_and_a_parameter_is_the_rest_of_the_path():
    routes = routes_of([LOOK, OTHER, REMOVE], {LOOK: look, REMOVE: remove, OTHER: look})
    assert [(route.path, route.methods) for route in routes] == [
        ("/thing/{name:path}", {"GET", "HEAD", "DELETE"}),
        ("/other", {"GET", "HEAD"}),
    ]
    app = Router(routes)
    assert [answer(app, method, "/thing/a/b") for method in ("GET", "HEAD", "DELETE")] == [
        b"look a/b",
        b"look a/b",
        b"remove a/b",
    ]


def answer(app: Router, method: str, path: str) -> bytes:
    sent: list[Any] = []
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return b"".join(message.get("body", b"") for message in sent)
