"""Brings returning workers into the state of the fleet before they get requests.

A worker that returns while the fleet is paused is paused; a worker that missed a resume is resumed. If a worker shows
that another caller has resumed the fleet, the pause ends. A worker with older weights than the fleet gets the fleet's
last update, if that came from files; an update from a trainer's group cannot be repeated. Until its weights are up to
date, the worker is outdated and gets no requests.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING

import msgspec

from headgate.contract.control import UPDATE_TIMEOUT_S, PauseRequest
from headgate.contract.operations.control import PAUSE
from headgate.contract.orders import AlreadyResumed, Overtaken
from headgate.reconcile import CatchUpStep, Desired, Observed, steps
from headgate.router.control.fan_out import SLACK_S, CallerHeaders, WorkerCall, WorkerReply
from headgate.router.control.lifecycle import (
    GET_STATUS,
    ONLY_IF_OWN,
    ONLY_IF_RUNNING,
    ONLY_IF_UNRESUMED,
    FleetControls,
)
from headgate.router.control.weights import WeightUpdates, update_call
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
OK, CONFLICT = 200, 409
QUARANTINED = "quarantined"
RETRY_DELAY_S = 3.0  # delay before the next try, after a worker did not carry out a command
FOR_AN_UPDATE = PauseRequest(new_requests="queue")  # aborts the requests that the worker began with its older weights


class CatchUp:
    def __init__(self, router: Router, controls: FleetControls, weights: WeightUpdates) -> None:
        self._router = router
        self._fleet = router.fleet
        self._controls = controls
        self._weights = weights
        self._not_before_s: dict[Worker, float] = {}

    async def run(self) -> None:
        while True:
            await self._router.fleet_changed(CHECK_INTERVAL_S)
            if self._controls.idle:
                await asyncio.gather(*(self._note_paused(worker) for worker in self._unrecorded()))
                await self._detect_other_resumes()
                await asyncio.gather(*(self._resume(worker) for worker in self._missed_resumes()))
            if self._controls.idle:  # again: a pause sent now could undo a resume that has begun meanwhile
                await asyncio.gather(*(self._catch_up(worker) for worker in self._behind()))

    async def _note_paused(self, worker: Worker) -> None:
        """Record that a worker has carried out the fleet's pause, even if its answer was lost."""
        if await self._state_of(worker) == "paused" and self._controls.current_pause is not None:
            self._controls.note_paused(worker)

    def _unrecorded(self) -> list[Worker]:
        if self._controls.current_pause is None:
            return []
        return [
            worker for worker in self._fleet if self._seems_paused(worker) and worker not in self._controls.paused
        ]

    def _seems_paused(self, worker: Worker) -> bool:
        """Whether its state shows that it is paused. One that has restarted may be paused for an update only."""
        return worker.state == "paused" and worker not in self._controls.restarted

    async def _detect_other_resumes(self) -> None:
        """End the fleet's pause if a paused worker runs again without a restart: another caller has resumed it."""
        controls = self._controls
        for worker in [worker for worker in self._fleet if worker in controls.paused]:
            if worker.state in ("down", "starting"):
                # Without a boot id, a restart cannot be told from a resume by another caller.
                if worker.boot_id is None:
                    controls.paused.discard(worker)
            elif worker.state in ("ready", "outdated") and await self._runs(worker):
                controls.release_for(worker)
                return

    async def _runs(self, worker: Worker) -> bool:
        state = await self._state_of(worker)
        return state == "running" and worker in self._controls.paused

    async def _state_of(self, worker: Worker) -> str | None:
        """Ask the worker for its state, because a probe may precede the pause. None if it fails or restarts."""
        controls = self._controls
        reply = await self._ask(worker, GET_STATUS, controls.patience_s)
        errors, boot_id = worker.errors, worker.boot_id
        await controls.probe(worker)
        same = (worker.errors, worker.boot_id) == (errors, boot_id)
        return str(reply.answer.result.state) if reply.ok and same and controls.idle else None

    def _steps(self, worker: Worker) -> tuple[CatchUpStep, ...]:
        """Return the steps by which this worker reaches the state of the fleet."""
        controls = self._controls
        wanted = Desired(
            paused=controls.current_pause is not None,
            version=self._fleet.wanted_version,
            sendable=self._weights.last_update is not None,
        )
        paused = worker in controls.paused or self._seems_paused(worker)
        return steps(wanted, Observed(paused, worker.version, missed_resume=worker in controls.unanswered_resumes))

    def _missed_resumes(self) -> list[Worker]:
        return [worker for worker in self._reachable() if self._steps(worker) == (CatchUpStep.RESUME,)]

    async def _resume(self, worker: Worker) -> None:
        """Repeat a resume that the worker has not answered. It is refused if another caller has paused the worker."""
        controls = self._controls
        call = controls.unanswered_resumes[worker]
        reply = await self._ask(worker, call, controls.patience_s)
        # A quarantined worker resumes after an update.
        settled = reply.ok or reply.code in (Overtaken.code, QUARANTINED)
        if settled and controls.unanswered_resumes.get(worker) is call:
            del controls.unanswered_resumes[worker]
        elif not reply.ok:
            self._not_before_s[worker] = self._router.loop.time() + RETRY_DELAY_S
        await controls.probe(worker)

    def _behind(self) -> list[Worker]:
        reachable = [worker for worker in self._reachable() if worker not in self._controls.unanswered_resumes]
        return [
            worker
            for worker in reachable
            if not {CatchUpStep.PAUSE, CatchUpStep.UPDATE}.isdisjoint(self._steps(worker))
        ]

    def _reachable(self) -> list[Worker]:
        now_s = self._router.loop.time()
        return [
            worker
            for worker in self._fleet
            if worker.kind == "headgate"
            and worker.state in ("ready", "outdated", "paused")
            and now_s >= self._not_before_s.get(worker, -inf)
        ]

    async def _catch_up(self, worker: Worker) -> None:
        reply = await self._pause(worker)
        if reply.code == AlreadyResumed.code:
            return  # it runs as it should, or the next round pauses it
        # An engine whose update was interrupted refuses a pause and waits for an update.
        if (reply.ok or reply.status == CONFLICT) and CatchUpStep.UPDATE in self._steps(worker):
            reply = await self._update(worker)
        if self._controls.current_pause is None:
            resumed = await self._controls.resume_one(worker, CallerHeaders(), ONLY_IF_OWN)
            reply = resumed if reply.ok and resumed.code != Overtaken.code else reply
        if not reply.ok:
            log.warning("%s did not catch up with the fleet: %s", worker.name, reply.error)
            self._not_before_s[worker] = self._router.loop.time() + RETRY_DELAY_S
        await self._controls.probe(worker)

    async def _pause(self, worker: Worker) -> WorkerReply:
        """Pause the worker as the fleet is paused. For an update, do so only if no other caller has paused it.

        A restarted worker may have been resumed with the fleet before this router noticed the restart: its new process
        started during the pause, so a resume that it has received is later than the pause.
        """
        controls = self._controls
        pause = controls.current_pause
        if pause is None:
            return await self._ask(
                worker, self._pause_call(FOR_AN_UPDATE, ONLY_IF_RUNNING), FOR_AN_UPDATE.timeout + SLACK_S
            )
        if worker in controls.paused:
            return WorkerReply(worker, OK)  # a second pause could undo a resume by another caller
        only_if = (ONLY_IF_UNRESUMED,) if worker in controls.restarted else ()
        reply = await self._ask(worker, self._pause_call(pause, *only_if), pause.timeout + SLACK_S)
        if reply.ok and controls.current_pause is not None:
            controls.note_paused(worker)
        elif reply.code == AlreadyResumed.code and controls.idle and controls.current_pause is pause:
            controls.release_for(worker)
        return reply

    def _pause_call(self, pause: PauseRequest, *only_if: tuple[bytes, bytes]) -> WorkerCall:
        return self._controls.ordered(PAUSE, msgspec.json.encode(pause), *only_if)

    async def _update(self, worker: Worker) -> WorkerReply:
        last = self._weights.last_update
        assert last is not None
        log.info("%s gets weights version %d, which the other workers have", worker.name, last["version"])
        update = update_call(last)
        reply = await self._ask(worker, update, UPDATE_TIMEOUT_S)
        self._weights.note_update(reply, update.body, last["version"])
        return reply

    async def _ask(self, worker: Worker, call: WorkerCall, timeout_s: float) -> WorkerReply:
        return await self._router.worker_calls.ask(worker, call, CallerHeaders(), timeout_s)
