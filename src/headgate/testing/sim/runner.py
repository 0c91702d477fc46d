"""Many seeds, on all cores: runs them, adds up what happened, and keeps those that went wrong."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from headgate.testing.sim.report import SimulationReport
from headgate.testing.sim.world import simulate

SHARE = 8  # seeds that a process runs before it reports


@dataclass
class SimulationSummary:
    seeds: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: dict[int, list[str]] = field(default_factory=dict)

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
            f"{self.seeds} seeds, {self.virtual_s:.0f} s of their own time",
            f"requests  {self.counts['requests']}, that ended: {_told(self.ends)}",
            f"tokens    {self.counts['tokens']}",
            f"faults    {self.faults.total()}: {_told(self.faults)}",
            f"control   {self.controls.total()} calls: {_told(self.controls)}",
            f"counted   {_told(self._others())}",
            f"failures  {len(self.failures)}" + (f": seeds {sorted(self.failures)}" if self.failures else ""),
        ]

    def _others(self) -> Counter[str]:
        return Counter({name: n for name, n in self.counts.items() if name not in ("requests", "tokens")})


def _told(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counter.items())) or "nothing"


def run_seeds(
    seeds: Iterable[int], *, jobs: int | None = None, on_failure: Callable[[SimulationReport], None] | None = None
) -> SimulationSummary:
    """Run them all; `on_failure` hears of each that went wrong."""
    shares = _shares(list(seeds))
    summary = SimulationSummary()
    jobs = min(jobs or os.cpu_count() or 1, len(shares))
    if jobs <= 1:
        _collect(map(_run_share, shares), summary, on_failure)
    else:
        with ProcessPoolExecutor(jobs, initializer=_spare_the_collector) as pool:
            _collect(pool.map(_run_share, shares), summary, on_failure)
    return summary


def _spare_the_collector() -> None:
    """Imported modules stay in memory, and each share of runs is collected once, at its end."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _shares(seeds: list[int]) -> list[list[int]]:
    return [seeds[i : i + SHARE] for i in range(0, len(seeds), SHARE)]


def _collect(
    results: Iterable[list[SimulationReport]],
    summary: SimulationSummary,
    on_failure: Callable[[SimulationReport], None] | None,
) -> None:
    for report in (report for reports in results for report in reports):
        summary.add(report)
        if report.failures and on_failure is not None:
            on_failure(report)


def _run_share(seeds: list[int]) -> list[SimulationReport]:
    reports = [_run_quietly(seed) for seed in seeds]
    gc.collect()
    return reports


def _run_quietly(seed: int) -> SimulationReport:
    report = simulate(seed)
    if not report.failures:
        report.trace.clear()  # nobody will read it
    return report
