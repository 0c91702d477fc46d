"""Weight transfer with vLLM's and SGLang's calls, for a trainer that sends with `headgate.weights`.

In both projects, a trainer first sets up a process group and then requests updates. We accept their HTTP calls, but not
their transfer protocols: vLLM's trainer sends its NCCL id pickled, and SGLang's sends a model in parts, each of which is
written at once. A trainer must therefore declare our protocol (`transport`, or the group's name, is `headgate`); any other
is refused before it waits for the engines. Pickled data is never read.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.control.lifecycle import Controls, controls_of, followed, pause_of
from headgate.contract.control import FleetResult
from headgate.contract.decoding import convert
from headgate.contract.sglang import FromDistributed, FromTensor, InitGroup
from headgate.contract.vllm import FinishTransfer, InitTransfer, Parameters, UpdateTransfer, VllmTrainerGroup
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response
from headgate.errors import HeadgateError, RequestError, Unavailable
from headgate.protocol.command import BroadcastSource, FileSource, PauseMode, SharedMemorySource, Source

OURS = "headgate"
INSTEAD = "send weights as headgate.weights does, or call /v1/update_weights with a path"


class Transfers:
    """The weight transfer that a trainer has set up; one per server."""

    def __init__(self) -> None:
        self.group: BroadcastSource | None = None
        self.holding = False  # a started update has paused the engines, and its end resumes them

    @property
    def arranged(self) -> BroadcastSource:
        if self.group is None:
            raise RequestError("no process group is set up; initialize the weight transfer first", code="no_group")
        return self.group


def transfers_of(request: Request) -> Transfers:
    transfers: Transfers = request.app.state.transfers
    return transfers


def refuse(why: str, param: str) -> RequestError:
    return RequestError(f"{why}; {INSTEAD}", param=param, code="unsupported_transfer")


async def update_held(
    controls: Controls, source: Source, version: int | None, *, abort: bool = False, recompute: bool = True
) -> FleetResult:
    """Update engines that may be running, and restore their state afterwards."""
    paused = (await controls.status()).is_paused
    if not paused:
        await _hold(controls, "abort" if abort else "freeze")
    try:
        return followed(await controls.update(source, version, recompute=recompute))
    finally:
        if not paused and (await controls.status()).state == "paused":
            await controls.resume()


async def _hold(controls: Controls, mode: PauseMode) -> None:
    """Pause all engines for an update. If one does not follow in time, resume all of them and raise."""
    try:
        followed(await controls.pause(pause_of(mode)))
    except Unavailable:
        await controls.resume()
        raise


def number_of(version: str | None, param: str = "weight_version") -> int | None:
    try:
        return None if version is None else int(version)
    except ValueError:
        raise RequestError(f"{param} must be a number, written as text", param=param) from None


# ------------------------------------------------------------------------------------------------------------- SGLang


class Outcome(msgspec.Struct, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int = 0


async def init_weights_update_group(request: Request) -> Response:
    body = await read_control(request, InitGroup)
    if body.group_name != OURS:
        raise refuse("SGLang's own protocol sends a model in parts, each written at once", "group_name")
    transfers_of(request).group = body.group()
    return json_response(Outcome(success=True, message="Succeeded to arrange a group; it is joined for each update."))


async def destroy_weights_update_group(request: Request) -> Response:
    transfers_of(request).group = None
    return json_response(Outcome(success=True, message="Succeeded to forget the group."))


async def update_weights_from_distributed(request: Request) -> Response:
    body, controls = await read_control(request, FromDistributed), controls_of(request)
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise RequestError("names, dtypes and shapes must have the same length", param="names")
    group, version = transfers_of(request).arranged, number_of(body.weight_version)
    try:
        result = await update_held(
            controls, group, version, abort=body.abort_all_requests, recompute=body.flush_cache
        )
    except HeadgateError as error:
        return json_response(Outcome(success=False, message=str(error)), 400)
    message = f"Succeeded to update model weights. The version is {result.weight_version}."
    return json_response(Outcome(success=True, message=message))


async def update_weights_from_tensor(request: Request) -> Response:
    await read_control(request, FromTensor)
    raise refuse("serialized tensors are pickled, and pickled data is not read", "serialized_named_tensors")


# --------------------------------------------------------------------------------------------------------------- vLLM


async def init_weight_transfer_engine(request: Request) -> Response:
    info = (await read_control(request, InitTransfer)).init_info
    if info.get("transport") != OURS:
        raise refuse("vLLM's own trainer passes its NCCL id or its handles pickled", "init_info.transport")
    has_group = "master_address" in info  # weights in files or in GPU memory need no process group
    transfers_of(request).group = convert(info, VllmTrainerGroup, "init_info").group() if has_group else None
    return json_response({"message": "Weight transfer initialized"})


async def start_weight_update(request: Request) -> Response:
    controls, transfers = controls_of(request), transfers_of(request)
    if not (await controls.status()).is_paused:
        await _hold(controls, "freeze")
        transfers.holding = True
    return json_response({"message": "Weight update started"})


async def update_weights(request: Request) -> Response:
    info = (await read_control(request, UpdateTransfer)).update_info
    if {"ipc_handles", "ipc_handles_pickled"} & info.keys():
        raise refuse("these handles are pickled, and pickled data is not read", "update_info")
    update: Parameters = convert(info, Parameters, "update_info")
    if not len(update.names) == len(update.dtype_names) == len(update.shapes):
        raise RequestError("names, dtype_names and shapes must have the same length", param="update_info.names")
    result = followed(await controls_of(request).update(_source(update, transfers_of(request)), update.version))
    return json_response({"message": "Weights updated", "weight_version": str(result.weight_version)})


def _source(update: Parameters, transfers: Transfers) -> Source:
    if update.path is not None:
        return FileSource(update.path)
    if update.shared is not None:
        return SharedMemorySource(update.shared.gpu, update.shared.storages, update.shared.tensors)
    return transfers.arranged


async def finish_weight_update(request: Request) -> Response:
    asked, controls, transfers = (
        await read_control(request, FinishTransfer),
        controls_of(request),
        transfers_of(request),
    )
    fleet, version = await controls.status(), number_of(asked.weight_version)
    if version is not None and version != fleet.weight_version:
        message = f"the weights have version {fleet.weight_version}; to set another, use version in update_info"
        raise RequestError(message, param="weight_version")
    if transfers.holding:
        followed(await controls.resume())
        transfers.holding = False
    return json_response({"message": "Weight update finished", "weight_version": str(fleet.weight_version)})
