"""Compares several benchmark runs: a table with ratios to the first run, and a plot.

A run is a file written by `bench serve`, `bench lifecycle`, `bench prefix` or `bench router`. A figure that a run
lacks is shown as a dash. All runs must be of the same benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headgate.bench import lifecycle, prefix, router
from headgate.bench.report import Saved, Spread, drawing
from headgate.errors import RequestError

Name = tuple[str, str]  # a quantity and a statistic, such as ("end to end, ms", "p50")

PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    label: str
    kind: str  # the benchmark
    figures: Mapping[Name, float]


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs of all files. Raises unless there are at least two, all of the same benchmark."""
    runs = [run for path in paths for run in read_file(path)]
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        raise RequestError(
            f"these are results of different benchmarks: {', '.join(sorted(kinds))}; give files of one benchmark"
        )
    if len(runs) < 2:
        raise RequestError("there is only one result; give another file to compare it with")
    return runs


def read_file(path: Path) -> list[ComparedRun]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    for read in (_serve, _lifecycle, _prefix, _router):
        try:
            return list(read(data, str(path.with_suffix(""))))
        except msgspec.MsgspecError:
            continue
    raise RequestError(f"{path} is not a result of `headgate bench`; write one with --json")


def _serve(data: bytes, label: str) -> Iterator[ComparedRun]:
    summary = msgspec.json.decode(data, type=Saved).summary
    figures: dict[Name, float] = {
        ("tokens/s", "output"): summary.output_tokens_per_s,
        ("tokens/s", "prompt"): summary.prompt_tokens_per_s,
    }
    figures |= _of_spread("first token, ms", summary.time_to_first_token_ms)
    figures |= _of_spread("between tokens, ms", summary.inter_token_latency_ms)
    figures |= _of_spread("end to end, ms", summary.end_to_end_ms)
    figures["requests", "per second"] = summary.requests_per_s
    figures["requests", "failed"] = summary.requests - summary.completed
    yield ComparedRun(label, "bench serve", figures)


def _lifecycle(data: bytes, label: str) -> Iterator[ComparedRun]:
    reports = msgspec.json.decode(data, type=list[lifecycle.LifecycleReport])
    for report in reports:
        figures: dict[Name, float] = {}
        for name, field in lifecycle.ROWS.items():
            figures |= _of_spread(f"{name}, ms", getattr(report, field))
        yield ComparedRun(label if len(reports) == 1 else f"{label} {report.url}", "bench lifecycle", figures)


def _prefix(data: bytes, label: str) -> Iterator[ComparedRun]:
    report = msgspec.json.decode(data, type=prefix.PrefixReport)
    figures = _of_spread("cold first token, ms", report.cold.first_token_ms)
    figures |= _of_spread("warm first token, ms", report.warm.first_token_ms)
    figures["warm prompt", "cached share"] = report.warm.cached_share
    yield ComparedRun(label, "bench prefix", figures)


def _router(data: bytes, label: str) -> Iterator[ComparedRun]:
    report = msgspec.json.decode(data, type=router.RouterReport)
    placement, figures = report.placement, {}  # type: router.PlacementFigures, dict[Name, float]
    for name, value in (("at home", placement.at_home), ("busiest over mean", placement.busiest_over_mean)):
        if value is not None:
            figures["placement", name] = value
    figures["placement", "cached share"] = placement.cached_share
    for name, attribute in router.ROWS.items():
        figures |= _of_spread(f"{name}, ms", getattr(report.router, attribute))
        if attribute in report.added:
            figures[f"{name}, ms", "added"] = report.added[attribute]
    figures["requests", "per second"] = report.router.requests_per_s
    yield ComparedRun(label, "bench router", figures)


def _of_spread(what: str, spread: Spread | None) -> dict[Name, float]:
    return {} if spread is None else {(what, name): getattr(spread, name) for name in PERCENTILES}


# ------------------------------------------------------------------------------------------------------------ table


def names_of(runs: Sequence[ComparedRun]) -> list[Name]:
    return list(dict.fromkeys(name for run in runs for name in run.figures))


def table(runs: Sequence[ComparedRun]) -> str:
    """Format a table with one line per figure, and the ratio of each run to the first."""
    first, *others = runs
    labels = _short([run.label for run in runs])
    width = max(12, *(len(label) + 2 for label in labels))
    head = f"{'':<36}{labels[0]:>{width}}" + "".join(f"{label:>{width}}{'ratio':>8}" for label in labels[1:])
    lines = [head]
    for what, number in names_of(runs):
        base = first.figures.get((what, number))
        cells = (f"{_cell(value, width)}{_ratio(base, value):>8}" for value in _values(others, (what, number)))
        lines.append(f"{what + ' ' + number:<36}{_cell(base, width)}" + "".join(cells))
    return "\n".join(lines)


def _values(runs: Sequence[ComparedRun], name: Name) -> list[float | None]:
    return [run.figures.get(name) for run in runs]


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"


def _ratio(base: float | None, value: float | None) -> str:
    return "-" if not base or value is None else f"{value / base:.2f}"


def _short(labels: Sequence[str]) -> list[str]:
    """Return the file names without their folders if that keeps them distinct."""
    names = [label.rpartition("/")[2] for label in labels]
    return names if len(set(names)) == len(names) else list(labels)


# ------------------------------------------------------------------------------------------------------------- plot


def save_plot(runs: Sequence[ComparedRun], path: Path) -> None:
    """Save a plot with one panel per quantity and one bar per run."""
    pyplot = drawing()
    panels: dict[str, list[str]] = {}
    for what, number in names_of(runs):
        panels.setdefault(what, []).append(number)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels), 4), layout="constrained", squeeze=False
    )
    labels = _short([run.label for run in runs])
    for axis, (what, numbers) in zip(axes[0], panels.items(), strict=True):
        for i, (label, run) in enumerate(zip(labels, runs, strict=True)):
            places = [place + i * 0.8 / len(runs) for place in range(len(numbers))]
            axis.bar(places, [run.figures.get((what, n), 0) for n in numbers], 0.8 / len(runs), label=label)
        axis.set_xticks([place + 0.4 - 0.4 / len(runs) for place in range(len(numbers))], numbers, fontsize=8)
        axis.set_title(what, fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(runs[0].kind, fontsize=10)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
