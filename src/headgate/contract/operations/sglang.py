"""Operations that are compatible with SGLang's API."""

from __future__ import annotations

from functools import partial
from typing import Final

from headgate.contract.operations.operation import Access, AskAll, AskOne, Relay, RouterHandler
from headgate.contract.operations.other_system import named_by
from headgate.contract.sglang import (
    AbortBody,
    BeginUpdate,
    CheckBody,
    Checked,
    FromDisk,
    FromDistributed,
    FromTensor,
    GenerateBody,
    GroupBody,
    InitGroup,
    MemoryBody,
    PauseBody,
    WorkerSpec,
)
from headgate.contract.vllm import NewVersion

_sglang = partial(named_by, "SGLang")

_DROP_PREFIXES: Final = AskAll(drops_prefixes=True)
_UPDATE: Final = AskAll(holds_requests=True, moves_memory=True, updates_weights=True, drops_prefixes=True)

GENERATE: Final = _sglang("POST", "/generate", Access.TENANT, Relay(), body=GenerateBody, generates=True)
ABORT_REQUEST: Final = _sglang("POST", "/abort_request", Access.TENANT, RouterHandler(), body=AbortBody, answer=None)
PAUSE_GENERATION: Final = _sglang(
    "POST", "/pause_generation", Access.ADMIN, AskAll(pauses=True, drops_prefixes=True), body=PauseBody
)
CONTINUE_GENERATION: Final = _sglang(
    "POST",
    "/continue_generation",
    Access.ADMIN,
    AskAll(resumes=True, updates_weights=True),  # if parts were collected
)
UPDATE_WEIGHTS_FROM_DISK: Final = _sglang("POST", "/update_weights_from_disk", Access.ADMIN, _UPDATE, body=FromDisk)
INIT_WEIGHTS_UPDATE_GROUP: Final = _sglang(
    "POST", "/init_weights_update_group", Access.ADMIN, AskAll(assigns_ranks=True), body=InitGroup
)
DESTROY_WEIGHTS_UPDATE_GROUP: Final = _sglang(
    "POST", "/destroy_weights_update_group", Access.ADMIN, AskAll(), body=GroupBody
)
BEGIN_WEIGHT_UPDATE: Final = _sglang("POST", "/begin_weight_update", Access.ADMIN, AskAll(), body=BeginUpdate)
END_WEIGHT_UPDATE: Final = _sglang("POST", "/end_weight_update", Access.ADMIN, _UPDATE)
UPDATE_WEIGHTS_FROM_DISTRIBUTED: Final = _sglang(
    "POST", "/update_weights_from_distributed", Access.ADMIN, _UPDATE, body=FromDistributed
)
UPDATE_WEIGHTS_FROM_TENSOR: Final = _sglang(
    "POST", "/update_weights_from_tensor", Access.ADMIN, None, body=FromTensor
)
GET_FLUSH_CACHE: Final = _sglang("GET", "/flush_cache", Access.ADMIN, _DROP_PREFIXES, answer=str)
FLUSH_CACHE: Final = _sglang("POST", "/flush_cache", Access.ADMIN, _DROP_PREFIXES, answer=str)
RELEASE_MEMORY_OCCUPATION: Final = _sglang(
    "POST",
    "/release_memory_occupation",
    Access.ADMIN,
    AskAll(pauses=True, moves_memory=True, drops_prefixes=True),
    body=MemoryBody,
)
RESUME_MEMORY_OCCUPATION: Final = _sglang(
    "POST",
    "/resume_memory_occupation",
    Access.ADMIN,
    AskAll(resumes=True, moves_memory=True),
    body=MemoryBody,
)
MODEL_INFO: Final = _sglang("GET", "/model_info", Access.TENANT, AskOne())
GET_MODEL_INFO: Final = _sglang("GET", "/get_model_info", Access.TENANT, AskOne())
SERVER_INFO: Final = _sglang("GET", "/server_info", Access.TENANT, AskOne())
GET_SERVER_INFO: Final = _sglang("GET", "/get_server_info", Access.TENANT, AskOne())
GET_WEIGHT_VERSION: Final = _sglang("GET", "/get_weight_version", Access.TENANT, AskOne())
WEIGHT_VERSION: Final = _sglang("GET", "/weight_version", Access.TENANT, AskOne())
UPDATE_WEIGHT_VERSION: Final = _sglang(
    "POST", "/update_weight_version", Access.ADMIN, AskAll(names_weights=True), body=NewVersion
)
WEIGHTS_CHECKER: Final = _sglang(
    "POST", "/weights_checker", Access.ADMIN, AskAll(moves_memory=True), body=CheckBody, answer=Checked
)
GET_LOAD: Final = _sglang("GET", "/get_load", Access.TENANT, RouterHandler())
LOADS: Final = _sglang("GET", "/v1/loads", Access.TENANT, RouterHandler())
HEALTH_GENERATE: Final = _sglang("GET", "/health_generate", Access.TENANT, RouterHandler(), answer=None)

_router = partial(named_by, "SGLang's router", access=Access.ADMIN, fan_out=RouterHandler(), on_server=False)

LIST_WORKERS: Final = _router("GET", "/workers")
ADD_WORKER: Final = _router("POST", "/workers", body=WorkerSpec)
SHOW_WORKER: Final = _router("GET", "/workers/{id}")
REMOVE_WORKER: Final = _router("DELETE", "/workers/{id}")
ADD_WORKER_URL: Final = _router("POST", "/add_worker")
REMOVE_WORKER_URL: Final = _router("POST", "/remove_worker")
LIST_WORKER_URLS: Final = _router("GET", "/list_workers")
