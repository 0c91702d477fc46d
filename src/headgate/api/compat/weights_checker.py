"""SGLang's `/weights_checker`: checksums of the weights in service, and their comparison with earlier ones.

slime and miles call it before and after an update. A snapshot keeps checksums, not tensors. `reset_tensors`, with which
they make sure that the update has written every tensor, releases the weights instead of overwriting them: requests wait
until an update has brought new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from headgate.api.control.lifecycle import Controls, controls_of, followed, pause_of
from headgate.api.host import host_of
from headgate.api.state import api_of
from headgate.contract.control import UPDATE_TIMEOUT_S
from headgate.contract.orders import Order
from headgate.contract.sglang import CheckBody, Checked, RankChecksums, combined
from headgate.edge.reading import read_control
from headgate.edge.responses import json_response
from headgate.errors import RequestError
from headgate.protocol.command import ChecksumWeights, WeightChecksums

MOST_NAMED = 8  # tensors that a failed comparison names

Checksums = Mapping[int, Mapping[str, str]]  # of each engine, by tensor


class WeightSnapshot:
    """The checksums that the last snapshot found; one per server."""

    def __init__(self) -> None:
        self.checksums: Checksums | None = None


async def weights_checker(request: Request) -> Response:
    body = await read_control(request, CheckBody)
    body.check()
    snapshot: WeightSnapshot = request.app.state.weight_snapshot
    if body.action == "reset_tensors":
        await _release(controls_of(request), Order.of(request.headers))
        return json_response(Checked())
    found = await _checksums(request)
    match body.action:
        case "snapshot":
            snapshot.checksums = found
            return json_response(Checked())
        case "compare":
            return _compared(snapshot.checksums, found, body.skip_tensor_list or ())
    return json_response(combined(_ranks(request, found, body.skip_tensor_list or ())))


async def _release(controls: Controls, order: Order) -> None:
    """Hold all requests and release the weights. An update wakes them, and `/continue_generation` resumes."""
    if not (await controls.status()).is_paused:
        followed(await controls.pause(pause_of("freeze"), order))
    followed(await controls.sleep(("weights",)))


async def _checksums(request: Request) -> Checksums:
    results = await controls_of(request).call(ChecksumWeights(), UPDATE_TIMEOUT_S)
    return {index: result.sha256 for index, result in results.items() if isinstance(result, WeightChecksums)}


def _compared(before: Checksums | None, now: Checksums, skipped: Collection[str]) -> Response:
    if before is None:
        raise RequestError("there is no snapshot to compare with; take one first", param="action", code="no_snapshot")
    differing = {
        name
        for engine, checksums in now.items()
        for name, checksum in checksums.items()
        if before.get(engine, {}).get(name) != checksum and not _is_skipped(name, skipped)
    }
    if not differing:
        return json_response(Checked())
    named = ", ".join(sorted(differing)[:MOST_NAMED]) + (", ..." if len(differing) > MOST_NAMED else "")
    return json_response(Checked(success=False, message=f"{len(differing)} tensors differ: {named}"), 400)


def _ranks(request: Request, found: Checksums, skipped: Collection[str]) -> list[RankChecksums]:
    engines, ranks = len(host_of(request).replicas), api_of(request).engines.info.ranks
    return [
        _rank(
            engine,
            {name: value for name, value in checksums.items() if not _is_skipped(name, skipped)},
            engines,
            ranks,
        )
        for engine, checksums in found.items()
    ]


def _rank(engine: int, checksums: dict[str, str], engines: int, ranks: int) -> RankChecksums:
    whole = sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()
    sizes = {"tp_rank": 0, "tp_size": ranks, "dp_rank": engine, "dp_size": engines, "pp_rank": 0, "pp_size": 1}
    info = sizes | {"rank": engine, "size": engines}
    return RankChecksums(checksums=checksums, per_gpu_checksum=whole, parallelism_info=info)


def _is_skipped(name: str, skipped: Collection[str]) -> bool:
    return any(part in name for part in skipped)
