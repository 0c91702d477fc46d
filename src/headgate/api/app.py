"""The application: maps each operation to its handler, and puts the gate in front of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Scope

from headgate.api.accounting import dashboard
from headgate.api.accounting.ledger import Ledger
from headgate.api.compat import sglang, status, trl, vllm, vllm_weights
from headgate.api.compat import weights as transfer
from headgate.api.compat.weights_checker import WeightSnapshot, weights_checker
from headgate.api.control import abort, requests
from headgate.api.control import lifecycle as control
from headgate.api.control.health import health, live, ready
from headgate.api.control.lifecycle import Controls
from headgate.api.control.metrics import metrics
from headgate.api.control.models import list_models, show_model
from headgate.api.generate import embeddings
from headgate.api.generate.chat import chat_completions
from headgate.api.generate.completions import completions
from headgate.api.generate.idempotency import Replays
from headgate.api.generate.messages import count_tokens, messages
from headgate.api.generate.responses import responses
from headgate.api.generate.tokenize import detokenize, tokenize
from headgate.api.host import ServerContext
from headgate.api.intake import Intake
from headgate.api.openapi import openapi
from headgate.api.state import Api
from headgate.contract.keys import Keys
from headgate.contract.operations import control as control_ops
from headgate.contract.operations import generation as generation_ops
from headgate.contract.operations import pages
from headgate.contract.operations import sglang as sglang_ops
from headgate.contract.operations import status as status_ops
from headgate.contract.operations import trl as trl_ops
from headgate.contract.operations import vllm as vllm_ops
from headgate.contract.operations.operation import Operation
from headgate.contract.operations.table import ON_SERVERS
from headgate.dashboard.feed import Feed
from headgate.edge.app import GatedApp
from headgate.edge.cors import NO_PAGES, Cors
from headgate.edge.dashboard import show_page
from headgate.edge.gate import Gate
from headgate.edge.root import show_root
from headgate.edge.routing import Handler, routes_of

# One handler per operation of a server; `routes_of` raises at import if one is missing or not declared.
HANDLERS: Final[Mapping[Operation, Handler]] = {
    generation_ops.CHAT_COMPLETIONS: chat_completions,
    generation_ops.COMPLETIONS: completions,
    generation_ops.RESPONSES: responses,
    generation_ops.EMBEDDINGS: embeddings.embeddings,
    generation_ops.SCORE: embeddings.score,
    generation_ops.RERANK: embeddings.rerank,
    generation_ops.RERANK_V1: embeddings.rerank,
    generation_ops.MESSAGES: messages,
    generation_ops.COUNT_TOKENS: count_tokens,
    generation_ops.TOKENIZE: tokenize,
    generation_ops.DETOKENIZE: detokenize,
    status_ops.MODELS: list_models,
    status_ops.MODEL: show_model,
    status_ops.LIVE: live,
    status_ops.READY: ready,
    status_ops.HEALTH: health,
    status_ops.METRICS: metrics,
    status_ops.OPENAPI: openapi,
    control_ops.ABORT_REQUESTS: abort.abort_requests,
    control_ops.LIST_REQUESTS: requests.list_requests,
    control_ops.SHOW_REQUEST: requests.show_request,
    control_ops.DELETE_REQUEST: requests.delete_request,
    control_ops.PAUSE: control.pause,
    control_ops.RESUME: control.resume,
    control_ops.IS_PAUSED: control.is_paused,
    control_ops.UPDATE_WEIGHTS: control.update_weights,
    control_ops.SLEEP: control.sleep,
    control_ops.WAKEUP: control.wakeup,
    control_ops.FLUSH_CACHE: control.flush_cache,
    sglang_ops.GENERATE: sglang.generate,
    sglang_ops.ABORT_REQUEST: sglang.abort_request,
    sglang_ops.PAUSE_GENERATION: sglang.pause_generation,
    sglang_ops.CONTINUE_GENERATION: sglang.continue_generation,
    sglang_ops.UPDATE_WEIGHTS_FROM_DISK: sglang.update_weights_from_disk,
    sglang_ops.INIT_WEIGHTS_UPDATE_GROUP: transfer.init_weights_update_group,
    sglang_ops.DESTROY_WEIGHTS_UPDATE_GROUP: transfer.destroy_weights_update_group,
    sglang_ops.BEGIN_WEIGHT_UPDATE: transfer.begin_weight_update,
    sglang_ops.END_WEIGHT_UPDATE: transfer.end_weight_update,
    sglang_ops.UPDATE_WEIGHTS_FROM_DISTRIBUTED: transfer.update_weights_from_distributed,
    sglang_ops.UPDATE_WEIGHTS_FROM_TENSOR: transfer.update_weights_from_tensor,
    sglang_ops.GET_FLUSH_CACHE: sglang.flush_cache,
    sglang_ops.FLUSH_CACHE: sglang.flush_cache,
    sglang_ops.RELEASE_MEMORY_OCCUPATION: sglang.release_memory,
    sglang_ops.RESUME_MEMORY_OCCUPATION: sglang.resume_memory,
    sglang_ops.MODEL_INFO: sglang.model_info,
    sglang_ops.GET_MODEL_INFO: sglang.model_info,
    sglang_ops.SERVER_INFO: status.server_info,
    sglang_ops.GET_SERVER_INFO: status.server_info,
    sglang_ops.GET_WEIGHT_VERSION: status.weight_version,
    sglang_ops.WEIGHT_VERSION: status.weight_version,
    sglang_ops.UPDATE_WEIGHT_VERSION: status.update_weight_version,
    sglang_ops.WEIGHTS_CHECKER: weights_checker,
    sglang_ops.GET_LOAD: status.get_load,
    sglang_ops.LOADS: sglang.loads,
    sglang_ops.HEALTH_GENERATE: sglang.health_generate,
    vllm_ops.PAUSE: vllm.pause,
    vllm_ops.RESUME: vllm.resume,
    vllm_ops.IS_PAUSED: vllm.is_paused,
    vllm_ops.ABORT_REQUESTS: vllm.abort_requests,
    vllm_ops.SLEEP: vllm.sleep,
    vllm_ops.WAKE_UP: vllm.wake_up,
    vllm_ops.IS_SLEEPING: vllm.is_sleeping,
    vllm_ops.RESET_PREFIX_CACHE: vllm.reset_prefix_cache,
    vllm_ops.INIT_WEIGHT_TRANSFER_ENGINE: vllm_weights.init_weight_transfer_engine,
    vllm_ops.START_WEIGHT_UPDATE: vllm_weights.start_weight_update,
    vllm_ops.UPDATE_WEIGHTS: vllm_weights.update_weights,
    vllm_ops.FINISH_WEIGHT_UPDATE: vllm_weights.finish_weight_update,
    vllm_ops.SHUTDOWN_WEIGHT_TRANSFER_ENGINE: vllm_weights.shutdown_weight_transfer_engine,
    vllm_ops.COLLECTIVE_RPC: vllm_weights.collective_rpc,
    vllm_ops.WEIGHT_INFO: status.weight_version,
    vllm_ops.GENERATE: vllm.generate,
    vllm_ops.VERSION: vllm.version,
    vllm_ops.GET_WORLD_SIZE: vllm.get_world_size,
    vllm_ops.LIVENESS: live,
    trl_ops.GENERATE: trl.generate,
    trl_ops.CHAT: trl.chat,
    trl_ops.GET_SEQUENCE_LOGPROBS: trl.get_sequence_logprobs,
    trl_ops.HEALTH: health,
    trl_ops.GET_WORLD_SIZE: vllm.get_world_size,
    trl_ops.RESET_PREFIX_CACHE: trl.reset_prefix_cache,
    pages.ROOT: show_root,
    **dict.fromkeys(pages.ASSETS, show_page),
    pages.EVENTS: dashboard.watch,
    pages.NUMBERS: dashboard.show_numbers,
}

ROUTES: Final[Sequence[Route]] = routes_of(ON_SERVERS, HANDLERS)


class ServerApp(GatedApp):
    def __init__(
        self, routes: Sequence[BaseRoute], keys: Keys, ledger: Ledger, max_body_bytes: int, cors: Cors = NO_PAGES
    ) -> None:
        def gate(router: ASGIApp) -> Gate:
            self._intake = Intake(router, keys, ledger, max_body_bytes)
            return Gate(self._intake, keys, refused=ledger.refuse, cors=cors)

        super().__init__(routes, gate)

    def begin(self, scope: Scope, start: Callable[[], None]) -> None:
        self._intake.begin(scope, start)


def build_app(api: Api, host: ServerContext, keys: Keys, max_body_bytes: int, cors: Cors = NO_PAGES) -> ServerApp:
    app = ServerApp(ROUTES, keys, api.ledger, max_body_bytes, cors)
    app.state.api = api
    app.state.host = host
    app.state.controls = Controls(api, host)
    app.state.transfers = transfer.Transfers()
    app.state.weight_snapshot = WeightSnapshot()
    app.state.replays = Replays()
    app.state.feed = Feed(dashboard.ServerSource(api, host))
    return app
