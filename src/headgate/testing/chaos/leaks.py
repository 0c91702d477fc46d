"""Leak checks: an idle fleet has released everything, and its processes have not grown.

The file descriptors, threads and tasks of the idle fleet are compared with those after the warm-up. Memory is compared
under load: for each process that existed throughout the run, the median of the last fifth with that of the first fifth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from headgate.testing.chaos.client import clock
from headgate.testing.chaos.fleet import NO_ANSWER, ChaosFleet, metrics, process_stats

IDLE_S = 90.0  # long enough for the last lease to expire and the last probe to finish
SAMPLE_EVERY_S = 2.0
SAMPLES, POLL_S = 5, 0.5
WINDOW = 0.2  # share of the run over which medians are taken

# Allowed increase at idle: probes and the checks themselves open connections.
EXTRA_FDS, EXTRA_THREADS, EXTRA_TASKS = 6, 3, 6
EXTRA_MEMORY, EXTRA_MEMORY_MB = 0.10, 16.0

SERVER_AT_REST = (
    "num_requests_in_flight",
    "num_requests_running",
    "num_requests_waiting",
    "kv_blocks_held",
    "kv_leases",
)
ROUTER_AT_REST = ("requests_in_flight", "queue_length", "worker_in_flight", "worker_pending_tokens", "holding")
NEVER = ("headgate:router_double_releases_total",)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    at_s: float
    process: str
    pid: int
    rss_mb: float
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class IdleUsage:
    fds: int
    threads: int
    tasks: int  # -1 for a process without an event loop

    def least(self, other: IdleUsage) -> IdleUsage:
        return IdleUsage(min(self.fds, other.fds), min(self.threads, other.threads), min(self.tasks, other.tasks))


class ProcessWatch:
    """Samples the memory, descriptors and threads of all processes every `SAMPLE_EVERY_S` seconds."""

    def __init__(self, fleet: ChaosFleet, begun_s: float) -> None:
        self._fleet, self._begun_s = fleet, begun_s
        self.samples: list[ProcessSample] = []

    async def run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        self._fleet.note_processes()
        at_s = round(clock() - self._begun_s, 2)
        for name, pid in self._fleet.processes().items():
            if (seen := process_stats(pid)) is not None:
                self.samples.append(ProcessSample(at_s, name, pid, **asdict(seen)))


def memory_growth(samples: Sequence[ProcessSample]) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each process that existed in both windows, and its median memory in both."""
    if not samples:
        return
    first_s, last_s = samples[0].at_s, samples[-1].at_s
    window_s = (last_s - first_s) * WINDOW
    for name, pid in dict.fromkeys((sample.process, sample.pid) for sample in samples):
        mine = [sample for sample in samples if sample.pid == pid and sample.process == name]
        early = [sample.rss_mb for sample in mine if sample.at_s <= first_s + window_s]
        late = [sample.rss_mb for sample in mine if sample.at_s >= last_s - window_s]
        if early and late and mine[0].at_s <= first_s + SAMPLE_EVERY_S:  # a process that was not restarted
            yield name, round(median(early), 1), round(median(late), 1)


def memory_leaks(samples: Sequence[ProcessSample]) -> list[str]:
    return [
        f"memory: {name} grew from {early:.0f} to {late:.0f} MB"
        for name, early, late in memory_growth(samples)
        if late > early * (1 + EXTRA_MEMORY) + EXTRA_MEMORY_MB
    ]


async def at_rest(fleet: ChaosFleet) -> dict[str, IdleUsage]:
    """Return the usage of each process while no requests are sent: the minimum of several samples."""
    for proxy in fleet.proxies:
        proxy.reset()  # pooled connections are not leaks
    found: dict[str, IdleUsage] = {}
    for _ in range(SAMPLES):
        await asyncio.sleep(POLL_S)
        tasks = await _tasks(fleet)
        for name, pid in fleet.processes().items():
            if (seen := process_stats(pid)) is not None:
                now = IdleUsage(seen.fds, seen.threads, tasks.get(name, -1))
                found[name] = now if name not in found else found[name].least(now)
    return found


async def _tasks(fleet: ChaosFleet) -> dict[str, int]:
    counts = {"router": int((await metrics(fleet.url))["headgate:router_tasks"])}
    for worker in fleet.workers:
        counts[f"server {worker.index}"] = int((await metrics(worker.url))["headgate:tasks"])
    return counts


def leaked(before: Mapping[str, IdleUsage], after: Mapping[str, IdleUsage]) -> list[str]:
    limits = {"fds": EXTRA_FDS, "threads": EXTRA_THREADS, "tasks": EXTRA_TASKS}
    return [
        f"{what}: {name} has {getattr(after[name], what)} when idle, but had {getattr(before[name], what)} before"
        for name in before.keys() & after.keys()
        for what, more in limits.items()
        if getattr(after[name], what) > getattr(before[name], what) + more
    ]


async def still_held(fleet: ChaosFleet) -> list[str]:
    """Return the metrics of a fleet that would be zero if it were idle, but are not."""
    found = [f"{name} is {value:g}" for name, value in _nonzero(await metrics(fleet.url), "router_", ROUTER_AT_REST)]
    for worker in fleet.workers:
        page = await metrics(worker.url)
        found += [f"server {worker.index}: {name} is {value:g}" for name, value in _nonzero(page, "", SERVER_AT_REST)]
    return found


def _nonzero(page: Mapping[str, float], prefix: str, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    wanted = {f"headgate:{prefix}{name}" for name in names} | set(NEVER)
    for name, value in page.items():
        if name.partition("{")[0] in wanted and value:
            yield name, value


async def wait_until_idle(fleet: ChaosFleet, timeout_s: float = IDLE_S) -> list[str]:
    """Wait until the fleet has released everything; returns what is still held after `timeout_s`."""
    until_s, left = clock() + timeout_s, ["no process has answered"]
    while left and clock() < until_s:
        try:
            left = await still_held(fleet)
        except NO_ANSWER as error:
            left = [f"{type(error).__name__}: {error}"]
        if left:
            await asyncio.sleep(0.5)
    return left


async def weight_differences(fleet: ChaosFleet) -> list[str]:
    """Return a problem if the servers do not all have the same weights."""
    versions: dict[str, Any] = {}
    for worker in fleet.workers:
        page = await metrics(worker.url)
        versions[f"server {worker.index}"] = {v for name, v in page.items() if "headgate:weight_version" in name}
    flat = set().union(*versions.values()) if versions else set()
    return [] if len(flat) <= 1 else [f"weights differ: {versions}"]
