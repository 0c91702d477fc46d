"""Weight transfer with SGLang's calls, and what it shares with vLLM's (`vllm_weights.py`).

SGLang's trainers send a model in parts, which are collected (`collecting.py`): broadcast in a process group with the
engines, or as handles of GPU memory (`handles.py`). The group with the name `headgate` uses our own protocol.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.compat.collecting import WeightCollection
from headgate.api.compat.handles import sglang_part
from headgate.api.control.lifecycle import Controls, controls_of, followed, pause_of
from headgate.contract.control import FleetResult, new_version_of
from headgate.contract.sglang import BeginUpdate, FromDistributed, FromTensor, GroupBody, InitGroup
from headgate.contract.vllm import VllmNcclGroup
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response
from headgate.errors import HeadgateError, RequestError, Unavailable
from headgate.protocol.command import (
    BroadcastSource,
    GroupPart,
    Part,
    PauseMode,
    Source,
    StagedSource,
    TensorSpec,
)

OURS = "headgate"


class Transfers:
    """The weight transfer that a trainer has set up; one per server."""

    def __init__(self) -> None:
        self.group: BroadcastSource | None = None
        self.holding = False  # a started update has paused the engines, and its end resumes them
        self.begun_at: int | None = None  # the version when an update was started
        self.vllm_group: VllmNcclGroup | None = None
        self.announced: tuple[TensorSpec, ...] = ()  # in the last update over vLLM's group
        self.collection = WeightCollection()

    @property
    def arranged(self) -> BroadcastSource:
        if self.group is None:
            raise RequestError("no process group is set up; initialize the weight transfer first", code="no_group")
        return self.group


def transfers_of(request: Request) -> Transfers:
    transfers: Transfers = request.app.state.transfers
    return transfers


async def update_held(
    controls: Controls,
    source: Source,
    version: int | None = None,
    *,
    label: str | None = None,
    abort: bool = False,
    recompute: bool = True,
    checksum: Mapping[str, str] | None = None,
) -> FleetResult:
    """Update engines that may be running, and restore their state afterwards."""
    paused = (await controls.status()).is_paused
    if not paused:
        await hold(controls, "abort" if abort else "freeze")
    try:
        updating = controls.update(source, version, label=label, recompute=recompute, checksum=checksum)
        return followed(await updating)
    finally:
        if not paused and (await controls.status()).state == "paused":
            await controls.resume()


async def hold(controls: Controls, mode: PauseMode) -> None:
    """Pause all engines for an update. If one does not follow in time, resume all of them and raise."""
    try:
        followed(await controls.pause(pause_of(mode)))
    except Unavailable:
        await controls.resume()
        raise


# ------------------------------------------------------------------------------------------------------------- SGLang


class Outcome(msgspec.Struct, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int = 0


async def init_weights_update_group(request: Request) -> Response:
    body = await read_control(request, InitGroup)
    if body.group_name != OURS:
        return await _joined(request, body)
    transfers_of(request).group = body.group()
    return json_response(Outcome(success=True, message="Succeeded to arrange a group; it is joined for each update."))


async def _joined(request: Request, body: InitGroup) -> Response:
    try:
        await transfers_of(request).collection.join(controls_of(request), body.joined(body.group_name))
    except HeadgateError as error:
        return _failed(error)
    return json_response(Outcome(success=True, message="Succeeded to initialize custom process group."))


def _failed(error: HeadgateError) -> Response:
    """SGLang answers every failure of a weight update with this body and 400."""
    return json_response(Outcome(success=False, message=str(error)), 400)


async def destroy_weights_update_group(request: Request) -> Response:
    body = await read_control(request, GroupBody) if await request.body() else GroupBody(group_name=OURS)
    if body.group_name == OURS:
        transfers_of(request).group = None
        return json_response(Outcome(success=True, message="Succeeded to forget the group."))
    try:
        await transfers_of(request).collection.leave(controls_of(request), body.group_name)
    except HeadgateError as error:
        return _failed(error)
    return json_response(Outcome(success=True, message="Succeeded to destroy custom process group."))


async def begin_weight_update(request: Request) -> Response:
    await read_control(request, BeginUpdate)
    try:
        transfers_of(request).collection.begin()
    except HeadgateError as error:
        return _failed(error)
    return json_response(Outcome(success=True, message="Success"))


async def end_weight_update(request: Request) -> Response:
    if not transfers_of(request).collection.open:
        return _failed(RequestError("no update has begun; call /begin_weight_update first"))
    try:
        await commit_collected(request)
    except HeadgateError as error:
        return _failed(error)
    return json_response(Outcome(success=True, message="Success"))


async def commit_collected(request: Request) -> FleetResult | None:
    """Make the collected parts visible, if an update is being collected. An incomplete one is dropped and refused."""
    controls, collection = controls_of(request), transfers_of(request).collection
    if not collection.parts and not collection.open:
        return None
    label, recompute, checksum = collection.label, collection.recompute, collection.checksum
    collection.forget()
    version = new_version_of(request.headers)
    try:
        return await update_held(
            controls, StagedSource(), version, label=label, recompute=recompute, checksum=checksum
        )
    except HeadgateError as error:
        await collection.discard(controls, str(error))
        raise


async def update_weights_from_distributed(request: Request) -> Response:
    body, controls = await read_control(request, FromDistributed), controls_of(request)
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise RequestError("names, dtypes and shapes must have the same length", param="names")
    if body.group_name != OURS:
        return await _collected(request, body)
    group = transfers_of(request).arranged
    try:
        result = await update_held(
            controls,
            group,
            new_version_of(request.headers),
            label=body.weight_version,
            abort=body.abort_all_requests,
            recompute=body.flush_cache,
            checksum=body.verify_checksum,
        )
    except HeadgateError as error:
        return json_response(Outcome(success=False, message=str(error)), 400)
    message = f"Succeeded to update model weights. The version is {result.weight_label}."
    return json_response(Outcome(success=True, message=message))


FLATTENED = 2**62  # bytes; one buffer for all tensors of a part


async def _collected(request: Request, body: FromDistributed) -> Response:
    tensors = map(TensorSpec, body.names, body.dtypes, map(tuple, body.shapes))
    part = GroupPart(body.group_name, tuple(tensors), FLATTENED if is_flattened(body.load_format) else None)
    return await _collected_part(request, body, part)


def is_flattened(load_format: str | None) -> bool:
    if load_format not in (None, "auto", "flattened_bucket"):
        message = f"load_format must be flattened_bucket or left out, not {load_format!r}"
        raise RequestError(message, param="load_format")
    return load_format == "flattened_bucket"


async def _collected_part(request: Request, body: FromDistributed | FromTensor, part: Part) -> Response:
    """Collect a part; it is visible at once if the whole model has arrived and the server is not paused."""
    controls, collection = controls_of(request), transfers_of(request).collection
    try:
        paused = (await controls.status()).is_paused
        state = await collection.add(
            controls,
            part,
            label=body.weight_version,
            recompute=body.flush_cache or not paused,
            paused=paused,
            checksum=body.verify_checksum,
        )
        if not state.missing and not paused and not collection.open:
            await commit_collected(request)
    except HeadgateError as error:
        return _failed(error)
    message = f"Succeeded to receive tensors; {state.tensors} have arrived, {state.missing} are missing."
    return json_response(Outcome(success=True, message=message))


async def update_weights_from_tensor(request: Request) -> Response:
    body = await read_control(request, FromTensor)
    part = sglang_part(body.serialized_named_tensors, is_flattened(body.load_format), "serialized_named_tensors")
    return await _collected_part(request, body, part)
