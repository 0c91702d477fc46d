"""The report of a simulated run: its failures, its timeline, and counts of its events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SimulationReport:
    """The report of one run.

    `trace` has the virtual time, process name and text of each event. `hash` covers all bytes that arrived, and their
    times.
    """

    seed: int
    failures: list[str] = field(default_factory=list)
    trace: list[tuple[float, str, str]] = field(default_factory=list)
    actions: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    hash: str = ""

    def timeline(self) -> str:
        return "\n".join(f"{when_s:9.4f}  {process:<18}  {event}" for when_s, process, event in self.trace)
