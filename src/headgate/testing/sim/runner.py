"""Runs many seeds on all cores, adds up their counts, and keeps the failures."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.source import fingerprint, loaded_modules
from headgate.testing.sim.world import simulate

SHARE = 8  # number of seeds that a process runs before it returns their reports

ShareResult = tuple[list[SimulationReport], frozenset[str]]  # reports, and the modules that the process has loaded


@dataclass
class SimulationSummary:
    seeds: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: dict[int, list[str]] = field(default_factory=dict)
    source: str = ""  # fingerprint of the modules that the runs have loaded

    def add(self, report: SimulationReport) -> None:
        self.seeds += 1
        self.virtual_s += report.virtual_s
        self.counts += report.counts
        self.faults += report.faults
        self.controls += report.controls
        self.ends += report.ends
        if report.failures:
            self.failures[report.seed] = report.failures

    def lines(self) -> list[str]:
        return [
            f"{self.seeds} seeds, {self.virtual_s:.0f} s of virtual time, source {self.source}",
            f"requests  {self.counts['requests']}, by outcome: {_listed(self.ends)}",
            f"tokens    {self.counts['tokens']}",
            f"faults    {self.faults.total()}: {_listed(self.faults)}",
            f"control   {self.controls.total()} calls: {_listed(self.controls)}",
            f"counted   {_listed(self._others())}",
            f"failures  {len(self.failures)}" + (f": seeds {sorted(self.failures)}" if self.failures else ""),
        ]

    def _others(self) -> Counter[str]:
        return Counter({name: n for name, n in self.counts.items() if name not in ("requests", "tokens")})


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counter.items())) or "nothing"


def run_seeds(
    seeds: Iterable[int], *, jobs: int | None = None, on_failure: Callable[[SimulationReport], None] | None = None
) -> SimulationSummary:
    """Run all seeds; `on_failure` is called with the report of each seed that fails."""
    shares = _shares(list(seeds))
    summary = SimulationSummary()
    jobs = min(jobs or os.cpu_count() or 1, len(shares))
    if jobs <= 1:
        modules = _collect(map(_run_share, shares), summary, on_failure)
    else:
        with ProcessPoolExecutor(jobs, initializer=_freeze_garbage_collector) as pool:
            modules = _collect(pool.map(_run_share, shares), summary, on_failure)
    summary.source = fingerprint(modules | loaded_modules())
    return summary


def _freeze_garbage_collector() -> None:
    """Exempt imported modules from garbage collection, and collect only once after each share of runs."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _shares(seeds: list[int]) -> list[list[int]]:
    return [seeds[i : i + SHARE] for i in range(0, len(seeds), SHARE)]


def _collect(
    results: Iterable[ShareResult],
    summary: SimulationSummary,
    on_failure: Callable[[SimulationReport], None] | None,
) -> frozenset[str]:
    """Add up all reports. Returns the names of the modules that were loaded."""
    modules: frozenset[str] = frozenset()
    for reports, loaded in results:
        modules |= loaded
        for report in reports:
            summary.add(report)
            if report.failures and on_failure is not None:
                on_failure(report)
    return modules


def _run_share(seeds: list[int]) -> ShareResult:
    reports = [_run_quietly(seed) for seed in seeds]
    gc.collect()
    return reports, loaded_modules()


def _run_quietly(seed: int) -> SimulationReport:
    report = simulate(seed)
    if not report.failures:
        report.trace.clear()  # the trace of a successful run is not read
    return report
