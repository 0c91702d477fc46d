"""Operations that are compatible with vLLM's API."""

from __future__ import annotations

from functools import partial
from typing import Final

from headgate.contract.operations.operation import Access, AskAll, AskOne, Relay, RouterHandler
from headgate.contract.operations.other_system import named_by
from headgate.contract.vllm import (
    AbortIds,
    FinishTransfer,
    InitTransfer,
    RemoteCall,
    StartTransfer,
    TokensRequest,
    UpdateTransfer,
)

_vllm = partial(named_by, "vLLM")

PAUSE: Final = _vllm("POST", "/pause", Access.ADMIN, AskAll(pauses=True, drops_prefixes=True))
RESUME: Final = _vllm(
    "POST",
    "/resume",
    Access.ADMIN,
    AskAll(resumes=True, updates_weights=True),  # if parts were collected
)
ABORT_REQUESTS: Final = _vllm("POST", "/abort_requests", Access.TENANT, RouterHandler(), body=AbortIds)
IS_PAUSED: Final = _vllm("GET", "/is_paused", Access.TENANT, RouterHandler())
SLEEP: Final = _vllm(
    "POST", "/sleep", Access.ADMIN, AskAll(pauses=True, moves_memory=True, drops_prefixes=True), answer=None
)
WAKE_UP: Final = _vllm("POST", "/wake_up", Access.ADMIN, AskAll(resumes=True, moves_memory=True), answer=None)
IS_SLEEPING: Final = _vllm("GET", "/is_sleeping", Access.TENANT, RouterHandler())
RESET_PREFIX_CACHE: Final = _vllm("POST", "/reset_prefix_cache", Access.ADMIN, AskAll(drops_prefixes=True))
INIT_WEIGHT_TRANSFER_ENGINE: Final = _vllm(
    "POST", "/init_weight_transfer_engine", Access.ADMIN, AskAll(assigns_ranks=True), body=InitTransfer
)
START_WEIGHT_UPDATE: Final = _vllm(
    "POST", "/start_weight_update", Access.ADMIN, AskAll(pauses=True, drops_prefixes=True), body=StartTransfer
)
UPDATE_WEIGHTS: Final = _vllm(
    "POST",
    "/update_weights",
    Access.ADMIN,
    AskAll(holds_requests=True, moves_memory=True, updates_weights=True, drops_prefixes=True),
    body=UpdateTransfer,
)
FINISH_WEIGHT_UPDATE: Final = _vllm(
    "POST",
    "/finish_weight_update",
    Access.ADMIN,
    AskAll(resumes=True, moves_memory=True, updates_weights=True, drops_prefixes=True),
    body=FinishTransfer,
)
SHUTDOWN_WEIGHT_TRANSFER_ENGINE: Final = _vllm("POST", "/shutdown_weight_transfer_engine", Access.ADMIN, AskAll())
# Only on servers: SkyRL calls each server itself, and not a router.
COLLECTIVE_RPC: Final = _vllm("POST", "/collective_rpc", Access.ADMIN, None, body=RemoteCall)
WEIGHT_INFO: Final = _vllm("GET", "/weight_info", Access.TENANT, AskOne())
GENERATE: Final = _vllm("POST", "/inference/v1/generate", Access.TENANT, Relay(), body=TokensRequest, generates=True)
VERSION: Final = _vllm("GET", "/version", Access.OPEN, RouterHandler())
GET_WORLD_SIZE: Final = _vllm("GET", "/get_world_size", Access.TENANT, RouterHandler())
LIVENESS: Final = _vllm("GET", "/liveness", Access.OPEN, RouterHandler())
