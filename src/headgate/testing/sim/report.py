"""What a simulated run was like: its failures, its timeline, and counts of what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SimulationReport:
    """What a run was like."""

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
        return "\n".join(f"{when_s:9.4f}  {who:<18}  {what}" for when_s, who, what in self.trace)
