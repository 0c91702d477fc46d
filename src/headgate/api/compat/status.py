"""Server information, load and weight versions, in the form that clients of SGLang and vLLM read."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.accounting.metrics import EngineView, query_engines
from headgate.api.control import abort
from headgate.api.control.health import PING_TIMEOUT_S
from headgate.api.control.lifecycle import controls_of
from headgate.api.host import host_of
from headgate.api.state import Api, api_of
from headgate.contract.vllm import NewVersion, config_format
from headgate.edge.gate import caller_of
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response


async def server_info(request: Request) -> Response:
    api, host, info = api_of(request), host_of(request), api_of(request).engines.info
    form = config_format(request.query_params)
    fleet = await controls_of(request).status()
    config = vllm_config(api, len(host.replicas))
    return json_response(
        {
            "model_path": api.model_name,
            "served_model_name": api.model_name,
            "version": host.version,
            "dp_size": len(host.replicas),
            "tp_size": info.ranks,
            "pp_size": 1,
            "ep_size": 1,
            "context_length": info.max_context,
            "max_total_num_tokens": info.kv_tokens,
            "max_running_requests": info.max_running,
            "page_size": info.block_size,
            "dtype": info.dtype,
            "device": info.device,
            "enable_memory_saver": True,  # memory can be released while the server is paused
            "disaggregation_mode": "null",  # SGLang's word; routers assign prefill and decode, servers do both
            "weight_version": fleet.weight_label,
            "internal_states": msgspec.to_builtins(fleet.engines),
            "vllm_config": config if form == "json" else _as_text(config),
        }
    )


def vllm_config(api: Api, replicas: int) -> dict[str, dict[str, Any]]:
    """The part of vLLM's configuration that describes this server too."""
    info = api.engines.info
    return {
        "model_config": {
            "model": api.model_name,
            "served_model_name": api.model_name,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_context,
            "logprobs_mode": f"{api.settings.logprobs_mode}_logprobs",
        },
        "cache_config": {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "enable_prefix_caching": True,
        },
        "parallel_config": {
            "tensor_parallel_size": info.ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": replicas,
            "world_size": info.ranks,
        },
        "weight_transfer_config": {"backend": "nccl"},
        "scheduler_config": {"max_num_seqs": info.max_running, "max_model_len": info.max_context},
    }


def _as_text(config: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{name}={value!r}" for part in config.values() for name, value in part.items())


async def get_load(request: Request) -> Response:
    views = await query_engines(host_of(request).replicas, PING_TIMEOUT_S)
    return json_response([load for view in views if (load := _load(view))])


def _load(view: EngineView) -> dict[str, Any] | None:
    if view.pong is None or view.info is None:
        return None
    status = view.pong.status
    return {
        "dp_rank": view.index,
        "num_reqs": status.running + status.waiting,
        "num_waiting_reqs": status.waiting,
        "num_tokens": status.held_blocks * view.info.block_size // view.info.groups,
        "ts_tic": time.perf_counter(),
    }


async def weight_version(request: Request) -> Response:
    return json_response({"weight_version": (await controls_of(request).status()).weight_label})


async def update_weight_version(request: Request) -> Response:
    """Give the weights another label; they stay the same."""
    body, api = await read_control(request, NewVersion), api_of(request)
    controls_of(request).relabel(body.new_version)
    if body.abort_all_requests:
        abort.accept(abort.find_all(api.ledger, caller_of(request)))
    message = f"Weight version updated to {body.new_version}"
    return json_response({"success": True, "message": message, "new_version": body.new_version})
