"""Probes each worker once a second for its state, its load and its cache horizon.

A Headgate worker reports all of this in one answer (`/v1/loads`). Other kinds of workers report only whether they are
healthy and which models they serve. A worker that answers neither probes nor requests is marked down, and its streams
resume at another worker. A worker that is merely busy is not, because it still sends bytes.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from headgate.contract.tickets import Version
from headgate.router.data_path.upstream import NoAnswer, NoConnection, WorkerLost, call
from headgate.router.fleet.worker import Kind, Worker, WorkerState

if TYPE_CHECKING:
    from headgate.router.router import Router

log = logging.getLogger(__name__)

LATE_S = 1.0  # a probe that ends this long after its timeout shows that this process got no CPU time
NOT_READY_RATE = 4.0  # workers that are not ready are probed this many times as often
STATES: dict[str, WorkerState] = {
    "running": "ready",
    "pausing": "paused",
    "paused": "paused",
    "updating": "paused",
    "quarantined": "paused",
    "outdated": "outdated",  # the engine runs, but refuses requests until it has its server's weights
    "draining": "stopping",  # the server shuts down and may return; `draining` is set only by the router itself
}


Count = Annotated[int, Meta(ge=0, le=2**53)]


class EngineLoad(msgspec.Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count
    num_free_blocks: Count
    num_total_blocks: Count
    max_running_requests: Count
    weight_version: Version | Annotated[str, Meta(pattern="^[0-9]{1,18}$")]
    state: str


class WorkerLoads(msgspec.Struct):
    """A worker's answer to GET /v1/loads."""

    loads: Annotated[list[EngineLoad], Meta(max_length=10_000)]
    boot_id: str | None = msgspec.field(default=None, name="life")
    cache_horizon_age_s: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = None


class ListedModel(msgspec.Struct):
    id: str
    owned_by: str | None = None


class ListedModels(msgspec.Struct):
    data: list[ListedModel]


class Monitor:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._fleet = router.fleet
        self._config = router.config
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._answered_s: dict[Worker, float] = {}
        self._reported: dict[Worker, str] = {}  # the last reason why a worker cannot be used

    async def run(self) -> None:
        """Probe every worker for as long as it is in the fleet."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                present = dict.fromkeys(self._fleet)  # a dict has a fixed order, so simulated runs are reproducible
                for worker in present:
                    if worker not in self._watches:
                        self._watches[worker] = tasks.create_task(self._watch(worker))
                for worker in [worker for worker in self._watches if worker not in present]:
                    self._watches.pop(worker).cancel()
                    self._answered_s.pop(worker, None)
                    self._reported.pop(worker, None)
                await self._router.fleet_changed(self._config.probe_interval_s)

    async def _watch(self, worker: Worker) -> None:
        interval_s = self._config.probe_interval_s
        while True:
            await self.probe(worker)
            rate = 1.0 if worker.state == "ready" else NOT_READY_RATE
            await asyncio.sleep(interval_s / rate * self._router.random.uniform(0.8, 1.2))

    async def probe(self, worker: Worker) -> None:
        began_s = self._fleet.clock()
        try:
            state = await self._query(worker)
        except Exception as error:  # an unexpected answer of one worker must not stop all probes
            if self._fleet.clock() - began_s < self._config.probe_timeout_s + LATE_S:
                self._probe_failed(worker, error)
            else:
                log.warning("this process did not get CPU time for a while; the result of a probe is discarded")
        else:
            self._answered_s[worker] = self._fleet.clock()
            self._reported.pop(worker, None)
            self._fleet.probed(worker, state)

    def _probe_failed(self, worker: Worker, error: Exception) -> None:
        if worker.state in ("starting", "down"):
            worker.successes = 0
            self._report_once(worker, error)
        elif not isinstance(error, NoAnswer):
            self._fleet.failed(worker, str(error))
        elif self._silence_s(worker) > self._config.silence_s:
            log.warning("%s has been silent for %.1f s", worker.name, self._silence_s(worker))
            self._fleet.give_up(worker)

    def _report_once(self, worker: Worker, error: Exception) -> None:
        """Warn about each reason why a worker cannot be used, unless its server is just not running yet."""
        if isinstance(error, NoConnection | NoAnswer) or self._reported.get(worker) == str(error):
            log.debug("%s is not up yet: %s", worker.name, error)
        else:
            self._reported[worker] = str(error)
            log.warning("%s cannot be used, and is tried again: %s", worker.name, error)

    def _silence_s(self, worker: Worker) -> float:
        """Return the time since the last byte from the worker."""
        last_s = max(self._answered_s.get(worker, -inf), self._router.last_byte_s(worker))
        return self._fleet.clock() - last_s

    async def _query(self, worker: Worker) -> WorkerState:
        if worker.kind == "unknown":
            kind, models = await self._identify(worker)
            self._fleet.set_kind(worker, kind, models)
            log.info("%s is a worker of kind %s with %s", worker.name, kind, ", ".join(models) or "no model named")
        if worker.kind == "headgate":
            generation = worker.generation
            report: WorkerLoads = await self._get(worker, "/v1/loads", WorkerLoads)
            if (
                worker.generation != generation
            ):  # the worker's weights changed during the probe, so the report may be outdated
                report = await self._get(worker, "/v1/loads", WorkerLoads)
            return self._apply(worker, report)
        await self._get(worker, "/health" if worker.kind in ("vllm", "sglang") else "/v1/models")
        return "ready"

    async def _identify(self, worker: Worker) -> tuple[Kind, list[str]]:
        models: ListedModels = await self._get(worker, "/v1/models", ListedModels)
        names = [model.id for model in models.data]
        owners = {model.owned_by for model in models.data}
        for kind in ("headgate", "vllm", "sglang"):
            if kind in owners:
                return kind, names
        return "openai", names

    async def _get(self, worker: Worker, path: str, kind: Any = None) -> Any:
        headers = self._router.credentials(worker, [], None)
        timeout_s = self._config.probe_timeout_s
        status, _, body = await call(self._fleet.pool(worker), "GET", path, headers=headers, timeout_s=timeout_s)
        if status != 200:
            raise WorkerLost(f"GET {path} answered {status}")
        return msgspec.json.decode(body, type=kind) if kind is not None else None

    def _apply(self, worker: Worker, report: WorkerLoads) -> WorkerState:
        """Copy a headgate worker's report to `worker`, and return its state."""
        self._fleet.set_boot_id(worker, report.boot_id)
        loads = report.loads
        if not loads:
            raise WorkerLost("none of its engines is up")
        worker.running = sum(load.num_running_reqs for load in loads)
        worker.waiting = sum(load.num_waiting_reqs for load in loads)
        worker.other_requests = max(0, worker.running + worker.waiting - worker.in_flight)
        worker.free_blocks = sum(load.num_free_blocks for load in loads)
        worker.total_blocks = sum(load.num_total_blocks for load in loads)
        worker.max_running = sum(load.max_running_requests for load in loads)
        self._fleet.set_version(worker, min(int(load.weight_version) for load in loads))
        if (age_s := report.cache_horizon_age_s) is not None:
            worker.horizon_s = max(worker.horizon_s, self._fleet.clock() - age_s)
        states = {STATES.get(load.state, "paused") for load in loads}
        if states == {"outdated"}:
            return "outdated"
        return "ready" if states <= {"ready", "outdated"} else "paused"
