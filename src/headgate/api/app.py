"""The app: which handler answers which path, behind one gate.

A handler is `async def name(request) -> Response` and raises what is wrong. It is called directly, without starlette's
exception layers, each of which would wrap `send` once more for every streamed token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headgate.api.chat import chat_completions
from headgate.api.completions import completions
from headgate.api.gate import Gate
from headgate.api.health import health, live, ready
from headgate.api.host import Host
from headgate.api.keys import Keys
from headgate.api.metrics import metrics
from headgate.api.models import list_models, show_model
from headgate.api.openapi import openapi
from headgate.api.responses import responses
from headgate.api.state import Api
from headgate.api.tokenize import detokenize, tokenize

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """A handler as an ASGI app."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


def get(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["GET"], name=path)


def post(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["POST"], name=path)


# The router tries them in this order: what is called most comes first.
ROUTES: tuple[BaseRoute, ...] = (
    post("/v1/chat/completions", chat_completions),
    post("/v1/completions", completions),
    post("/v1/responses", responses),
    post("/tokenize", tokenize),
    post("/detokenize", detokenize),
    get("/v1/models", list_models),
    get("/v1/models/{model:path}", show_model),
    get("/health", health),
    get("/ready", ready),
    get("/live", live),
    get("/metrics", metrics),
    get("/openapi.json", openapi),
)


class App(Starlette):
    """Starlette's router and state, with our gate in place of its middleware."""

    def __init__(self, routes: Sequence[BaseRoute], keys: Keys, max_body_bytes: int) -> None:
        super().__init__(routes=routes)
        self.router.redirect_slashes = False
        self._gate = Gate(self.router, keys, max_body_bytes)

    def build_middleware_stack(self) -> ASGIApp:
        return self._gate


def build_app(api: Api, host: Host, keys: Keys, max_body_bytes: int) -> App:
    app = App(ROUTES, keys, max_body_bytes)
    app.state.api = api
    app.state.host = host
    return app
