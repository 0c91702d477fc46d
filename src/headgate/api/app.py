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

from headgate.api import abort, control, dashboard, requests
from headgate.api.chat import chat_completions
from headgate.api.completions import completions
from headgate.api.control import Controls
from headgate.api.dialects import sglang, transfer, vllm
from headgate.api.health import health, live, ready
from headgate.api.host import Host
from headgate.api.idempotency import Replays
from headgate.api.intake import Intake
from headgate.api.ledger import Ledger
from headgate.api.metrics import metrics
from headgate.api.models import list_models, show_model
from headgate.api.openapi import openapi
from headgate.api.responses import responses
from headgate.api.state import Api
from headgate.api.tokenize import detokenize, tokenize
from headgate.contract.keys import Keys
from headgate.dashboard import page
from headgate.dashboard.feed import Feed
from headgate.edge.dashboard import show_page
from headgate.edge.gate import Gate

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


def by_method(path: str, **handlers: Handler) -> Route:
    """One path, several methods; a path that is routed twice would answer 405 to the second one's."""

    async def choose(request: Request) -> Response:
        # Starlette lets HEAD in where GET is.
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, Endpoint(choose), methods=list(handlers), name=path)


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
    post("/v1/abort_requests", abort.abort_requests),
    get("/v1/requests", requests.list_requests),
    by_method("/v1/requests/{id:path}", GET=requests.show_request, DELETE=requests.delete_request),
    post("/v1/pause", control.pause),
    post("/v1/resume", control.resume),
    get("/v1/is_paused", control.is_paused),
    post("/v1/update_weights", control.update_weights),
    post("/v1/sleep", control.sleep),
    post("/v1/wakeup", control.wakeup),
    post("/v1/flush_cache", control.flush_cache),
    # SGLang's names
    post("/generate", sglang.generate),
    post("/abort_request", sglang.abort_request),
    post("/pause_generation", sglang.pause_generation),
    post("/continue_generation", sglang.continue_generation),
    post("/update_weights_from_disk", sglang.update_weights_from_disk),
    post("/init_weights_update_group", transfer.init_weights_update_group),
    post("/destroy_weights_update_group", transfer.destroy_weights_update_group),
    post("/update_weights_from_distributed", transfer.update_weights_from_distributed),
    post("/update_weights_from_tensor", transfer.update_weights_from_tensor),
    by_method("/flush_cache", GET=sglang.flush_cache, POST=sglang.flush_cache),
    post("/release_memory_occupation", sglang.release_memory),
    post("/resume_memory_occupation", sglang.resume_memory),
    get("/model_info", sglang.model_info),
    get("/get_model_info", sglang.model_info),
    get("/server_info", sglang.server_info),
    get("/get_server_info", sglang.server_info),
    get("/v1/loads", sglang.loads),
    get("/health_generate", sglang.health_generate),
    # vLLM's names
    post("/pause", vllm.pause),
    post("/resume", vllm.resume),
    get("/is_paused", vllm.is_paused),
    post("/sleep", vllm.sleep),
    post("/wake_up", vllm.wake_up),
    get("/is_sleeping", vllm.is_sleeping),
    post("/reset_prefix_cache", vllm.reset_prefix_cache),
    post("/init_weight_transfer_engine", transfer.init_weight_transfer_engine),
    post("/start_weight_update", transfer.start_weight_update),
    post("/update_weights", transfer.update_weights),
    post("/finish_weight_update", transfer.finish_weight_update),
    post("/inference/v1/generate", vllm.generate),
    get("/version", vllm.version),
    get("/get_world_size", vllm.get_world_size),
)

# For people with a browser, and no part of the API.
PAGE_ROUTES: tuple[BaseRoute, ...] = (
    *(get(path, show_page) for path in page.ASSETS),
    get(page.EVENTS, dashboard.watch),
    get(page.NUMBERS, dashboard.tell_numbers),
)


class App(Starlette):
    """Starlette's router and state, with our gate in place of its middleware."""

    def __init__(self, routes: Sequence[BaseRoute], keys: Keys, ledger: Ledger, max_body_bytes: int) -> None:
        super().__init__(routes=routes)
        self.router.redirect_slashes = False
        self._intake = Intake(self.router, keys, ledger, max_body_bytes)
        self._gate = Gate(self._intake, keys, refused=ledger.refuse)

    def begin(self, scope: Scope, start: Callable[[], None]) -> None:
        self._intake.begin(scope, start)

    def build_middleware_stack(self) -> ASGIApp:
        return self._gate


def build_app(api: Api, host: Host, keys: Keys, max_body_bytes: int) -> App:
    app = App((*ROUTES, *PAGE_ROUTES), keys, api.ledger, max_body_bytes)
    app.state.api = api
    app.state.host = host
    app.state.controls = Controls(api, host)
    app.state.transfers = transfer.Transfers()
    app.state.replays = Replays()
    app.state.feed = Feed(dashboard.ServerSource(api, host))
    return app
