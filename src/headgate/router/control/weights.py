"""Weight updates of the whole fleet: all workers at once while the fleet is paused, or one worker after another.

All workers get the same version number. Once every worker that is up has loaded an update, workers with older weights
get no requests. The last update from files is kept for workers that were down (`fleet/catch_up.py`); an update from a
trainer's group cannot be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from headgate.contract.control import NEW_VERSION_HEADER, FleetUpdate, Refusal, source_of
from headgate.contract.operations import control as control_ops
from headgate.contract.operations import vllm as vllm_ops
from headgate.contract.orders import Overtaken
from headgate.errors import RequestError
from headgate.router.control.fan_out import SLACK_S, CallerHeaders, WorkerCall, WorkerReply, call_of, is_down, to_all
from headgate.router.control.lifecycle import ONLY_IF_OWN, ONLY_IF_RUNNING, FleetControls
from headgate.router.control.results import ACCEPTED, ControlReport, Partial, RouterResult, require_all
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode


class WorldSize(msgspec.Struct):
    world_size: Annotated[int, Meta(ge=0, le=1_000_000)]


GET_WORLD_SIZE = call_of(vllm_ops.GET_WORLD_SIZE, reads=WorldSize)


class WeightUpdates:
    def __init__(self, router: Router, controls: FleetControls) -> None:
        self._router = router
        self._fleet = router.fleet
        self._controls = controls
        self.last_update: dict[str, Any] | None = None  # body of the last update, if it can be repeated
        self._applied: dict[Worker, bytes] = {}  # the last update that each worker has followed

    async def update(self, body: FleetUpdate, caller: CallerHeaders) -> RouterResult:
        source_of(body)  # raises before any worker is asked
        if body.strategy == "rolling":
            async with self._controls.exclusive("the weights are being updated, worker by worker"):
                return await self._roll(body, caller)
        async with self._controls.exclusive("the weights are being updated"):
            return await self._update_all(body, caller)

    async def _update_all(self, body: FleetUpdate, caller: CallerHeaders) -> RouterResult:
        due_s = self._router.loop.time() + body.timeout
        status = await self._controls.status(caller, body.timeout)
        if unpaused := [url for url, each in status.workers.items() if each.state in ("running", "pausing")]:
            raise Partial(
                f"pause the fleet before an update; not paused: {', '.join(unpaused)}",
                status,
                status=409,
                code="not_paused",
            )
        version = self._new_version(body, status)
        calls = await self._update_calls(body, version, caller, self._controls.remaining_s(due_s))
        done = [WorkerReply(worker, 200) for worker, call in calls.items() if self._has(worker, call, version)]
        for reply in done:
            del calls[reply.worker]
        replies = await self._router.worker_calls.fan_out(calls, caller, self._controls.remaining_s(due_s) + SLACK_S)
        for reply in replies:
            self.note_update(reply, calls[reply.worker].body, version)
        result = self._controls.merge([*replies, *done])
        require_all(result, replies)
        self.set_wanted(_worker_update(body, version) if body.path is not None else None, version)
        result.weight_version, result.weight_label = version, body.label or str(version)
        if body.verify_checksum:
            result.checksum = body.verify_checksum
        return result

    def _new_version(self, body: FleetUpdate, status: RouterResult) -> int:
        """Return the version number for an update of all workers."""
        if body.version is not None:
            return body.version
        return 1 + max(status.weight_version, self._fleet.wanted_version or 0)

    def new_version_header(self) -> tuple[bytes, bytes]:
        """Return a header for updates that are passed on unchanged: the version of all workers, newer than any has."""
        known = [worker.version for worker in self._fleet if worker.version is not None]
        newest = max((*known, self._fleet.wanted_version or 0))
        return NEW_VERSION_HEADER.encode(), b"%d" % (newest + 1)

    def _has(self, worker: Worker, call: WorkerCall, version: int) -> bool:
        """Whether the worker already has this same update, from an earlier call that failed at other workers."""
        return worker.version == version and self._applied.get(worker) == call.body

    def note_update(self, reply: WorkerReply, body: bytes, version: int) -> None:
        if reply.ok and reply.status != ACCEPTED:
            self._applied[reply.worker] = body
            self._fleet.set_version(reply.worker, version)
            self._controls.forget_prefixes([reply.worker])

    def set_wanted(self, update: dict[str, Any] | None, version: int) -> None:
        """Record that all live workers have `version`, so that workers with older weights get no requests.

        `update` is sent to workers that come back later; None: they cannot get these weights from the router.
        """
        self.last_update = update
        self._fleet.wanted_version = version
        self._fleet.set_floor()

    def relabel(self, label: str) -> None:
        """Workers that come back later get the last update with this label."""
        if self.last_update is not None:
            self.last_update = self.last_update | {"label": label}

    async def _update_calls(
        self, body: FleetUpdate, version: int, caller: CallerHeaders, timeout_s: float
    ) -> dict[Worker, WorkerCall]:
        """Return the call for each worker. In a trainer's group, each engine has its own rank."""
        workers = self._controls.workers_up()
        update = _worker_update(body, version)
        if body.group is None:
            return to_all(workers, update_call(update))
        group = body.group
        ranks = await assign_ranks(self._router, workers, caller, group.rank, group.world_size, timeout_s)
        return {
            worker: update_call(update | {"group": update["group"] | {"rank": rank}})
            for worker, rank in ranks.items()
        }

    async def _roll(self, body: FleetUpdate, caller: CallerHeaders) -> RouterResult:
        """Update one worker after another. A worker's requests finish first, or resume at another worker."""
        if body.group is not None:
            raise RequestError("a group updates all workers at once; use strategy all, or path", param="strategy")
        status = await self._controls.status(caller)
        if self._router.holding or any(each.state != "running" for each in status.workers.values()):
            raise Partial(
                "a rolling update needs a running fleet; resume it, or use strategy all",
                status,
                status=409,
                code="not_running",
            )
        version, replies = self._new_version(body, status), []
        self._fleet.rolling = True
        try:
            for worker in self._controls.workers_up():
                if worker not in self._fleet:
                    continue  # the worker was removed before its turn
                replies.append(await self._roll_one(worker, body, version, caller))
                if not replies[-1].ok:
                    raise self._stopped(replies)
            self.set_wanted(_worker_update(body, version), version)
        finally:
            self._fleet.rolling = False
            self._fleet.set_floor()
        return require_all(self._controls.merge(replies), replies)

    async def _roll_one(self, worker: Worker, body: FleetUpdate, version: int, caller: CallerHeaders) -> WorkerReply:
        """Pause, update and resume one worker. Returns the first reply that is not a success, or else the last reply.

        A worker that another caller has paused is not updated. If another caller pauses it meanwhile, it stays
        paused.
        """
        log.info("%s gets version %d", worker.name, version)
        update = update_call(_worker_update(body, version))
        self._fleet.set_state(worker, "draining")
        drain = encode({"mode": "drain", "timeout": body.drain_timeout})
        pause = self._controls.ordered(control_ops.PAUSE, drain, ONLY_IF_RUNNING)
        try:
            paused = await self._router.worker_calls.ask(worker, pause, caller, body.drain_timeout + SLACK_S)
            if not paused.ok:
                return paused
            updated = await self._router.worker_calls.ask(worker, update, caller, body.timeout + SLACK_S)
            self.note_update(updated, update.body, version)
            resumed = await self._controls.resume_one(worker, caller, ONLY_IF_OWN)
            return resumed if updated.ok and resumed.code != Overtaken.code else updated
        finally:
            if worker in self._fleet:  # a worker that was removed meanwhile continues to drain
                self._fleet.set_state(worker, "paused")
                await self._controls.probe(worker)

    def _stopped(self, replies: Sequence[WorkerReply]) -> Partial:
        last = replies[-1]
        share = f"{len(replies) - 1} of {len(self._controls.workers_up())} workers have it"
        message = f"the update stopped at {last.worker.name}: {last.error} ({share})"
        status = 502 if len(replies) > 1 else last.status or 502
        return Partial(message, self._controls.merge(replies), status=status)


async def assign_ranks(
    router: Router, workers: Iterable[Worker], caller: CallerHeaders, first: int, world_size: int, timeout_s: float
) -> dict[Worker, int]:
    """Return the rank of each worker's first engine in a trainer's group. Every engine has its own rank."""
    sizes = await router.worker_calls.fan_out(
        to_all(workers, GET_WORLD_SIZE), caller, min(timeout_s, router.config.control_timeout_s)
    )
    if silent := [reply.worker.name for reply in sizes if not reply.ok and not is_down(reply.worker)]:
        raise Refusal(
            502, "partial", f"no worker was asked, because {', '.join(silent)} did not report its number of engines"
        )
    ranks, rank = {}, first
    for reply in sizes:
        if reply.ok:
            ranks[reply.worker] = rank
            rank += reply.answer.world_size
    if rank > world_size:
        raise RequestError(f"there are ranks up to {rank - 1}, so world_size must be {rank}", param="group")
    return ranks


def _worker_update(body: FleetUpdate, version: int) -> dict[str, Any]:
    """Return the body of an update as it is sent to one worker."""
    fields: dict[str, Any] = msgspec.to_builtins(body)
    for name in ("strategy", "drain_timeout"):
        del fields[name]
    return {name: value for name, value in fields.items() if value is not None} | {"version": version}


def update_call(body: Mapping[str, Any]) -> WorkerCall:
    return call_of(control_ops.UPDATE_WEIGHTS, encode(body), ControlReport)
