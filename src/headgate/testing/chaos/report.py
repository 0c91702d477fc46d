"""The report of a chaos run: a table, JSON, and a timeline plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.bench.report import drawing
from headgate.testing.chaos.actions import FaultInjector, FleetOperator
from headgate.testing.chaos.judge import AnswerJudge
from headgate.testing.chaos.leaks import IdleUsage, ProcessSample, ProcessWatch, memory_growth
from headgate.testing.chaos.load import ClientLoad, FinishedRequest
from headgate.testing.chaos.settings import ChaosSettings

BIN_S = 2.0


@dataclass
class ChaosReport:
    settings: ChaosSettings
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    controls: Counter[str] = field(default_factory=Counter)
    slowest_control_s: float = 0.0
    sent: int = 0
    ended: list[FinishedRequest] = field(default_factory=list)
    samples: list[ProcessSample] = field(default_factory=list)
    at_rest: dict[str, tuple[IdleUsage, IdleUsage]] = field(default_factory=dict)
    judged: dict[str, Any] = field(default_factory=dict)
    hostile: dict[str, int] = field(default_factory=dict)  # outcomes of hostile clients' requests
    router: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    kv_transfers: int = 0
    failures: list[str] = field(default_factory=list)  # wrong or unexplained answers
    action_failures: list[str] = field(default_factory=list)
    still_held: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    leftover_processes: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def record(
        self, load: ClientLoad, injector: FaultInjector, operators: FleetOperator, watch: ProcessWatch
    ) -> None:
        self.faults, self.events = injector.done, injector.events
        self.controls, self.slowest_control_s = operators.answers, round(operators.slowest_s, 2)
        self.sent, self.ended, self.samples = load.sent, load.ended, watch.samples

    def record_answers(self, judge: AnswerJudge) -> None:
        self.judged, self.failures = dict(judge.summary()), judge.failures

    @property
    def problems(self) -> list[str]:
        """All problems of the run; empty if it succeeded."""
        logged = [f"a traceback was logged: {text}" for text in self.tracebacks]
        return [
            *self.failures,
            *self.action_failures,
            *self.still_held,
            *self.leaks,
            *self.leftover_processes,
            *logged,
        ]

    # -- text ---------------------------------------------------------------------------

    def table(self) -> str:
        judged, settings = self.judged, self.settings
        what = f"{settings.servers} servers, {settings.clients} clients, a fault every {settings.every_s:g} s"
        lines = [
            f"{what}, seed {settings.seed}, {self.seconds:g} s",
            "",
            _row("faults", f"{sum(self.faults.values())}: {_counts(self.faults)}"),
            _row("requests", f"{self.sent}: {_counts(judged.get('ends', {}))} (including the warm-up)"),
            _row(
                "tokens",
                f"{judged.get('tokens', 0)} in {judged.get('answers_compared', 0)} compared answers",
            ),
            _row("mixed", f"{judged.get('answers_of_several_weights', 0)} answers under several sets of weights"),
            _row("hostile", _counts(self.hostile) or "none"),
            _row("router", f"{_counts(self.router)}"),
            _row("servers", f"{self.restarts} restarts; KV of {self.kv_transfers} prompts transferred between them"),
            _row("control calls", f"{_counts(self.controls)}; slowest {self.slowest_control_s:g} s"),
            _row("explained", _counts(judged.get("explained", {})) or "0"),
            _row("unexplained", _counts(judged.get("unexplained", {})) or "0"),
            _row("wrong answers", str(judged.get("wrong_answers", 0))),
            _row("still held", "; ".join(self.still_held) or "nothing"),
            _row("grown", "; ".join(self.leaks) or "nothing"),
            _row(
                "memory, MB",
                ", ".join(f"{name} {a:.0f} to {b:.0f}" for name, a, b in memory_growth(self.samples)) or "-",
            ),
            _row("bugs logged", str(len(self.tracebacks))),
        ]
        lines += [f"  {problem}" for problem in self.problems]
        lines += ["", f"FAILED: {len(self.problems)} problems" if self.problems else "all is well"]
        return "\n".join(lines)

    def as_json(self) -> bytes:
        content = {
            "settings": {name: getattr(self.settings, name) for name in ("servers", "clients", "every_s", "seed")},
            "seconds": self.seconds,
            "ok": not self.problems,
            "problems": self.problems,
            "faults": dict(self.faults),
            "requests": self.sent,
            **self.judged,
            "hostile": self.hostile,
            "router": self.router,
            "servers_started_again": self.restarts,
            "kv_transfers": self.kv_transfers,
            "control_calls": dict(self.controls),
            "slowest_control_s": self.slowest_control_s,
            "latency_s": _latency(self.ended),
            "memory_mb": {name: {"early": early, "late": late} for name, early, late in memory_growth(self.samples)},
            "at_rest": {
                name: {"before": asdict(before), "after": asdict(after)}
                for name, (before, after) in sorted(self.at_rest.items())
            },
            "events": self.events,
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chaos.json").write_bytes(self.as_json())
        self.draw(folder / "timeline.png")

    # -- plot ---------------------------------------------------------------------------

    def draw(self, path: Path) -> None:
        """Four plots on one time axis: answers per second by outcome, latency, faults, and memory."""
        pyplot = drawing()
        figure, axes = pyplot.subplots(
            4, 1, figsize=(13, 11), sharex=True, layout="constrained", height_ratios=(2, 2, 3, 2)
        )
        self._draw_ends(axes[0])
        _draw_latency(axes[1], self.ended)
        self._draw_faults(axes[2])
        self._draw_memory(axes[3])
        axes[3].set_xlabel("seconds")
        figure.suptitle(self.table().splitlines()[0], fontsize=10)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)

    def _draw_ends(self, axis: Any) -> None:
        edges = np.arange(0, max(self.seconds, BIN_S) + BIN_S, BIN_S)
        bottom = np.zeros(len(edges) - 1)
        for outcome in sorted({each.outcome for each in self.ended}):
            counts = np.histogram([each.at_s for each in self.ended if each.outcome == outcome], edges)[0] / BIN_S
            axis.bar(edges[:-1], counts, BIN_S, bottom=bottom, align="edge", label=outcome)
            bottom += counts
        axis.set_ylabel("answers/s")
        axis.legend(loc="upper right", fontsize=8)

    def _draw_faults(self, axis: Any) -> None:
        kinds = sorted(self.faults)
        for event in self.events:
            row = kinds.index(event["kind"])
            axis.barh(row, max(event["lasts_s"], 0.3), left=event["at_s"], height=0.6, color=f"C{row % 10}")
        axis.set_yticks(range(len(kinds)), kinds, fontsize=7)
        axis.invert_yaxis()

    def _draw_memory(self, axis: Any) -> None:
        for name in sorted({sample.process for sample in self.samples}):
            mine = [sample for sample in self.samples if sample.process == name]
            axis.plot([sample.at_s for sample in mine], [sample.rss_mb for sample in mine], label=name, lw=1)
        axis.set_ylabel("memory, MB")
        axis.set_ylim(bottom=0)
        axis.legend(loc="upper right", fontsize=7, ncols=4)


def _row(name: str, content: str) -> str:
    return f"{name:<16}{content}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _latency(ended: Sequence[FinishedRequest]) -> dict[str, float]:
    whole = [each.took_s for each in ended if each.outcome == "whole"]
    if not whole:
        return {}
    return {f"p{p}": round(float(np.percentile(whole, p)), 3) for p in (50, 90, 99)} | {"max": round(max(whole), 3)}


def _draw_latency(axis: Any, ended: Sequence[FinishedRequest]) -> None:
    whole = [each for each in ended if each.outcome == "whole"]
    axis.scatter([each.at_s for each in whole], [each.took_s for each in whole], s=3, label="whole answer")
    axis.set_yscale("log")
    axis.set_ylabel("seconds")
    axis.legend(loc="upper right", fontsize=8)
