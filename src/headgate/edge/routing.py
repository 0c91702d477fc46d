"""Builds routes from declared operations and their handlers.

A handler is `async def name(request) -> Response` and raises errors. It is called directly, without Starlette's
exception layers, each of which would wrap `send` once more for every streamed token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headgate.contract.operations.operation import Operation

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """Wraps a handler as an ASGI app."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


def routes_of(operations: Iterable[Operation], handlers: Mapping[Operation, Handler]) -> list[Route]:
    """Return one route per path, in the order of `operations`. Raises unless `handlers` has exactly those."""
    paths: dict[str, dict[str, Handler]] = {}
    for operation in _paired(operations, handlers):
        paths.setdefault(operation.path, {})[operation.method] = handlers[operation]
    return [_route(path, methods) for path, methods in paths.items()]


def _paired(operations: Iterable[Operation], handlers: Mapping[Operation, Handler]) -> list[Operation]:
    declared = list(operations)
    if missing := [str(operation) for operation in declared if operation not in handlers]:
        raise ValueError(f"no handler for {', '.join(missing)}")
    if extra := [str(operation) for operation in handlers if operation not in declared]:
        raise ValueError(f"there is a handler for {', '.join(extra)}, which is not declared here")
    return declared


def _route(path: str, handlers: Mapping[str, Handler]) -> Route:
    handler = _by_method(handlers) if len(handlers) > 1 else next(iter(handlers.values()))
    template = path.replace("}", ":path}")
    return Route(template, Endpoint(handler), methods=list(handlers), name=template)


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    """Return one handler for all methods of a path.

    A path has one route: if it had two, the first would answer 405 to the methods of the second.
    """

    async def choose(request: Request) -> Response:
        # Starlette adds HEAD to routes with GET.
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return choose
