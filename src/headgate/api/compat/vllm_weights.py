"""Weight transfer with vLLM's calls, as TRL and SkyRL make them.

The parts of an update are collected (`collecting.py`): tensors that a trainer broadcasts by NCCL, or handles of its GPU
memory (`handles.py`). `/finish_weight_update` makes them visible together, and refuses if nothing has arrived. An update
that was not started is visible when the whole model has arrived, at the latest at `/resume`. With `transport: headgate`
a trainer uses our own protocol instead.
"""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from headgate.api.compat.handles import vllm_part
from headgate.api.compat.memory import wake
from headgate.api.compat.weights import OURS, Transfers, commit_collected, hold, transfers_of, update_held
from headgate.api.control.lifecycle import Controls, controls_of, followed
from headgate.api.host import host_of
from headgate.contract.control import new_version_of
from headgate.contract.decoding import convert
from headgate.contract.vllm import (
    FinishTransfer,
    InitTransfer,
    Parameters,
    RemoteCall,
    StartTransfer,
    UpdateTransfer,
    VllmNcclGroup,
    VllmTrainerGroup,
    WakeTags,
)
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response
from headgate.errors import HeadgateError, RequestError
from headgate.protocol.command import TAGS, FileSource, GroupPart, Part, SharedMemorySource, Source

GROUP = "vllm"


async def init_weight_transfer_engine(request: Request) -> Response:
    info, transfers = (await read_control(request, InitTransfer)).init_info, transfers_of(request)
    has_group = "world_size" in info  # weights in files or in GPU memory need no process group
    if info.get("transport") == OURS:
        transfers.group = convert(info, VllmTrainerGroup, "init_info").group() if has_group else None
        transfers.vllm_group = None
    elif "transport" in info:
        message = f"transport must be {OURS} or left out"
        raise RequestError(message, param="init_info.transport", code="unsupported_transfer")
    else:
        group: VllmNcclGroup | None = convert(info, VllmNcclGroup, "init_info") if has_group else None
        if group is not None:
            await transfers.collection.join(controls_of(request), group.joined(GROUP))
        transfers.group, transfers.vllm_group, transfers.announced = None, group, ()
    return json_response({"message": "Weight transfer initialized"})


async def shutdown_weight_transfer_engine(request: Request) -> Response:
    transfers = transfers_of(request)
    if transfers.vllm_group is not None:
        transfers.vllm_group = None
        await transfers.collection.leave(controls_of(request), GROUP)
    transfers.group = None
    return json_response({"message": "Weight transfer shut down"})


async def start_weight_update(request: Request) -> Response:
    asked = await read_control(request, StartTransfer) if await request.body() else StartTransfer()
    await _start(request, asked)
    return json_response({"message": "Weight update started"})


async def _start(request: Request, asked: StartTransfer) -> None:
    if not asked.is_checkpoint_format:
        raise RequestError("weights must have the checkpoint's names and shapes", param="is_checkpoint_format")
    controls, transfers = controls_of(request), transfers_of(request)
    if transfers.collection.parts:
        await transfers.collection.discard(controls, "another update was started")
    transfers.collection.forget()
    fleet = await controls.status()
    if not fleet.is_paused:
        await hold(controls, "freeze")
        transfers.holding = True
    transfers.begun_at = fleet.weight_version


async def update_weights(request: Request) -> Response:
    body, controls = await read_control(request, UpdateTransfer), controls_of(request)
    update: Parameters = convert(body.info, Parameters, "update_info")
    if (part := _part(update, transfers_of(request))) is not None:
        await _collect(request, update, part)
        return json_response({"message": "Weights received"})
    version = new_version_of(request.headers) if update.version is None else update.version
    source = _source(update, transfers_of(request))
    if body.weight_dir is not None:
        result = await update_held(controls, source, version)  # not every version of prime-rl pauses first
    else:
        promised = update.verify_checksum if update.file is None else None
        result = followed(await controls.update(source, version, label=update.weight_version, checksum=promised))
    return json_response({"message": "Weights updated", "weight_version": result.weight_label})


async def _collect(request: Request, update: Parameters, part: Part) -> None:
    controls, transfers = controls_of(request), transfers_of(request)
    paused = (await controls.status()).is_paused
    label = transfers.collection.label if update.weight_version is None else update.weight_version
    state = await transfers.collection.add(
        controls, part, label=label, recompute=True, paused=paused, checksum=update.verify_checksum
    )
    if transfers.begun_at is None and not state.missing:
        await commit_collected(request)


def _part(update: Parameters, transfers: Transfers) -> Part | None:
    """The part of an update in vLLM's own formats, or None."""
    tensors = update.tensors
    if update.ipc_handles is not None:
        message = "send handles as ipc_handles_pickled; JSON cannot have their bytes"
        raise RequestError(message, param="update_info.ipc_handles", code="unsupported_transfer")
    if update.ipc_handles_pickled is not None:
        return vllm_part(update.ipc_handles_pickled, tensors, "update_info.ipc_handles_pickled")
    if (group := transfers.vllm_group) is None or update.file is not None or update.shared is not None:
        return None
    transfers.announced = tensors or transfers.announced
    if not transfers.announced:
        raise RequestError("no tensors are announced", param="update_info.names")
    packed = group.packed if update.packed is None else update.packed
    most = update.packed_buffer_size_bytes or group.packed_buffer_size_bytes
    return GroupPart(GROUP, transfers.announced, most if packed else None)


def _source(update: Parameters, transfers: Transfers) -> Source:
    if update.file is not None:
        return FileSource(update.file, update.verify_checksum)
    if update.shared is not None:
        return SharedMemorySource(update.shared.gpu, update.shared.storages, update.shared.tensors)
    return transfers.arranged


async def finish_weight_update(request: Request) -> Response:
    asked = await read_control(request, FinishTransfer) if await request.body() else FinishTransfer()
    await _finish(request, asked)
    label = (await controls_of(request).status()).weight_label
    return json_response({"message": "Weight update finished", "weight_version": label})


async def _finish(request: Request, asked: FinishTransfer) -> None:
    controls, transfers = controls_of(request), transfers_of(request)
    try:
        if asked.weight_version is not None:
            transfers.collection.label = asked.weight_version
        await commit_collected(request)
        if transfers.begun_at == (await controls.status()).weight_version:
            message = "no weights have arrived since the update was started; they are unchanged"
            raise RequestError(message, code="no_update")
    except HeadgateError:
        with suppress(HeadgateError):
            await _let_go(controls, transfers)
        raise
    if asked.weight_version is not None:
        controls.relabel(asked.weight_version)
    await _let_go(controls, transfers)


async def _let_go(controls: Controls, transfers: Transfers) -> None:
    """Resume engines that were paused for the update."""
    transfers.begun_at = None
    if transfers.holding:
        transfers.holding = False
        followed(await controls.resume())


# -------------------------------------------------------------------------------------------------------------- SkyRL


async def collective_rpc(request: Request) -> Response:
    """The methods of SkyRL's worker extension; vLLM would call any method of its workers."""
    call = await read_control(request, RemoteCall)
    match call.method:
        case "skyrl_start_weight_update":
            await _start(request, convert(call.kwargs, StartTransfer, "kwargs"))
        case "update_weights_nccl" | "update_weights_ipc":
            await _receive(request, call)
        case "skyrl_finish_weight_update":
            await _finish(request, FinishTransfer())
        case "skyrl_sleep_for_weight_sync":
            # Held requests are computed again, whatever the value of `offload_kv`.
            followed(await controls_of(request).sleep(TAGS))
        case "skyrl_wake_for_weight_sync":
            await wake(controls_of(request), convert(call.kwargs, WakeTags, "kwargs").tags)
        case other:
            raise RequestError(f"there is no method {other!r:.100}", param="method", code="unsupported_method")
    return json_response({"results": [None] * len(host_of(request).replicas)})


async def _receive(request: Request, call: RemoteCall) -> None:
    transfers = transfers_of(request)
    if transfers.begun_at is None:
        raise RequestError("no update was started; call skyrl_start_weight_update first", code="no_update")
    update: Parameters = convert(call.kwargs.get("update_info"), Parameters, "kwargs.update_info")
    part = _part(update, transfers)
    if part is None or isinstance(part, GroupPart) != (call.method == "update_weights_nccl"):
        raise RequestError(f"the tensors do not fit {call.method}; set the transfer up first", code="no_group")
    await _collect(request, update, part)
