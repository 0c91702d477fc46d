"""Workers that come back: whatever the fleet was asked while they were away, they do before they get a request.

One that comes back while the fleet is paused is paused; one that has missed a resume is resumed. One that has older
weights than the fleet gets the fleet's last update, if that can be given to it: files can, a trainer's group is gone.
Until then it is outdated and gets nothing.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING

import msgspec

from headgate.contract.control import UPDATE_TIMEOUT_S, PauseRequest
from headgate.contract.operations.control import PAUSE
from headgate.contract.orders import Overtaken
from headgate.reconcile import CatchUpStep, Desired, Observed, steps
from headgate.router.control.fan_out import SLACK_S, CallerHeaders, WorkerCall, WorkerReply
from headgate.router.control.lifecycle import LOOK, ONLY_IF_OWN, ONLY_IF_RUNNING, FleetControls, update_call
from headgate.router.fleet.worker import Worker

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
OK, CONFLICT = 200, 409
TRY_AGAIN_S = 3.0  # with one that did not follow
FOR_AN_UPDATE = PauseRequest(new_requests="queue")  # alone: what its older weights have begun ends


class CatchUp:
    def __init__(self, router: Router, controls: FleetControls) -> None:
        self._router = router
        self._fleet = router.fleet
        self._controls = controls
        self._not_before_s: dict[Worker, float] = {}

    async def run(self) -> None:
        while True:
            await self._router.fleet_changed(LOOK_EVERY_S)
            if self._controls.at_rest:
                await asyncio.gather(*(self._note_paused(worker) for worker in self._unnoted()))
                await self._look_for_others()
                await asyncio.gather(*(self._resume(worker) for worker in self._owed()))
            if self._controls.at_rest:  # still: a resume has begun, perhaps, and a pause would follow it
                await asyncio.gather(*(self._catch_up(worker) for worker in self._late()))

    async def _note_paused(self, worker: Worker) -> None:
        """A worker of a held fleet that is paused has followed, whether or not its answer has come here."""
        if await self._state_of(worker) == "paused" and self._controls.pause_asked is not None:
            self._controls.paused.add(worker)

    def _unnoted(self) -> list[Worker]:
        if self._controls.pause_asked is None:
            return []
        return [worker for worker in self._fleet if worker.state == "paused" and worker not in self._controls.paused]

    async def _look_for_others(self) -> None:
        """A paused worker that runs again without having been away was resumed by somebody else; that holds for all."""
        controls = self._controls
        for worker in [worker for worker in self._fleet if worker in controls.paused]:
            if worker.state in ("down", "starting"):
                if worker.life is None:  # otherwise a restart shows, and a worker out of reach may be resumed there
                    controls.paused.discard(worker)
            elif worker.state in ("ready", "outdated") and await self._runs(worker):
                log.warning("%s was resumed by somebody else; the fleet is not held any longer", worker.name)
                controls.release()
                return

    async def _runs(self, worker: Worker) -> bool:
        state = await self._state_of(worker)
        return state == "running" and worker in self._controls.paused

    async def _state_of(self, worker: Worker) -> str | None:
        """By its own word, asked now: a probe may be older than the pause. None unless it is the same process still."""
        controls = self._controls
        reply = await self._ask(worker, LOOK, controls.patience_s)
        errors, life = worker.errors, worker.life
        await controls.probe(worker)
        same = (worker.errors, worker.life) == (errors, life)
        return str(reply.told.result.state) if reply.ok and same and controls.at_rest else None

    def _steps(self, worker: Worker) -> tuple[CatchUpStep, ...]:
        """What the fleet was asked and this worker has not done."""
        controls = self._controls
        wanted = Desired(
            paused=controls.pause_asked is not None,
            version=self._fleet.wanted_version,
            sendable=controls.update_asked is not None,
        )
        paused = worker in controls.paused or worker.state == "paused"
        return steps(wanted, Observed(paused, worker.version, missed_resume=worker in controls.owed))

    def _owed(self) -> list[Worker]:
        return [worker for worker in self._reachable() if self._steps(worker) == (CatchUpStep.RESUME,)]

    async def _resume(self, worker: Worker) -> None:
        """A worker that has not answered a resume; one that another caller has paused since refuses it."""
        controls = self._controls
        call = controls.owed[worker]
        reply = await self._ask(worker, call, controls.patience_s)
        if (reply.ok or reply.code == Overtaken.code) and controls.owed.get(worker) is call:
            del controls.owed[worker]
        elif not reply.ok:
            self._not_before_s[worker] = self._router.loop.time() + TRY_AGAIN_S
        await controls.probe(worker)

    def _late(self) -> list[Worker]:
        reachable = [worker for worker in self._reachable() if worker not in self._controls.owed]
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
        # An engine whose update broke off refuses a pause, and waits for an update.
        if (reply.ok or reply.status == CONFLICT) and CatchUpStep.UPDATE in self._steps(worker):
            reply = await self._update(worker)
        if self._controls.pause_asked is None:
            resumed = await self._controls.resume_one(worker, CallerHeaders(), ONLY_IF_OWN)
            reply = resumed if reply.ok and resumed.code != Overtaken.code else reply
        if not reply.ok:
            log.warning("%s does not follow the fleet: %s", worker.name, reply.error)
            self._not_before_s[worker] = self._router.loop.time() + TRY_AGAIN_S
        await self._controls.probe(worker)

    async def _pause(self, worker: Worker) -> WorkerReply:
        """For the fleet's pause; or for an update alone, and then not if another caller has paused it."""
        controls = self._controls
        asked = controls.pause_asked
        if asked is None:
            return await self._ask(
                worker, self._pause_call(FOR_AN_UPDATE, ONLY_IF_RUNNING), FOR_AN_UPDATE.timeout + SLACK_S
            )
        if worker in controls.paused:
            return WorkerReply(worker, OK)  # a second pause would hide that another caller has resumed it
        reply = await self._ask(worker, self._pause_call(asked), asked.timeout + SLACK_S)
        if reply.ok and controls.pause_asked is not None:
            controls.paused.add(worker)
        return reply

    def _pause_call(self, asked: PauseRequest, *only_if: tuple[bytes, bytes]) -> WorkerCall:
        return self._controls.ordered(PAUSE, msgspec.json.encode(asked), *only_if)

    async def _update(self, worker: Worker) -> WorkerReply:
        asked = self._controls.update_asked
        assert asked is not None
        log.info("%s gets version %d, as the others have", worker.name, asked["version"])
        update = update_call(asked)
        reply = await self._ask(worker, update, UPDATE_TIMEOUT_S)
        self._controls.note_update(reply, update.body, asked["version"])
        return reply

    async def _ask(self, worker: Worker, one: WorkerCall, timeout_s: float) -> WorkerReply:
        return await self._router.worker_calls.ask(worker, one, CallerHeaders(), timeout_s)
