"""Results of benchmarks: statistics that they share, JSON files, and the table and plot of `bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.bench.client import TimedRequest
from headgate.bench.load import Result
from headgate.errors import HeadgateError

PERCENTILES = (50, 90, 99)
COLUMN = 10  # width of a number in tables


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a time over requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Spread | None:
        if not values_s:
            return None
        values = np.asarray(values_s) * 1000
        p50, p90, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


class LoadSummary(msgspec.Struct, frozen=True):
    url: str
    model: str
    pace: str
    requests: int
    completed: int
    errors: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    time_to_first_token_ms: Spread | None
    inter_token_latency_ms: Spread | None
    time_per_output_token_ms: Spread | None
    end_to_end_ms: Spread | None
    dataset: str = ""
    cached_share: float = 0.0  # share of prompt tokens that were cached, as reported by the server


class Saved(msgspec.Struct, frozen=True):
    summary: LoadSummary
    samples: list[TimedRequest]


def summarise(result: Result) -> LoadSummary:
    done = result.completed
    elapsed_s = result.elapsed_s
    return LoadSummary(
        url=result.load.url,
        model=result.model,
        pace=str(result.load.pace),
        requests=len(result.samples),
        completed=len(done),
        errors=count_errors(result.samples),
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s,
        prompt_tokens_per_s=sum(sample.prompt_tokens for sample in done) / elapsed_s,
        output_tokens_per_s=sum(sample.output_tokens for sample in done) / elapsed_s,
        time_to_first_token_ms=Spread.of(first_token_times_s(done)),
        inter_token_latency_ms=Spread.of(gaps_s(done)),
        time_per_output_token_ms=Spread.of([each for sample in done if (each := per_token_s(sample)) is not None]),
        end_to_end_ms=Spread.of([sample.total_s for sample in done]),
        dataset=str(result.load.dataset),
        cached_share=cached_share(done),
    )


# ----------------------------------------------------------------------------------------- shared by all benchmarks


def first_token_times_s(samples: Iterable[TimedRequest]) -> list[float]:
    return [sample.first_token_s for sample in samples if sample.first_token_s is not None]


def gaps_s(samples: Iterable[TimedRequest]) -> list[float]:
    return [gap_s for sample in samples for gap_s in sample.gaps_s]


def count_errors(samples: Iterable[TimedRequest]) -> dict[str, int]:
    """Return how often each error occurred, the most frequent first."""
    return dict(Counter(sample.error for sample in samples if sample.error).most_common())


def cached_share(samples: Sequence[TimedRequest]) -> float:
    return sum(sample.cached_tokens for sample in samples) / max(1, sum(sample.prompt_tokens for sample in samples))


def per_token_s(sample: TimedRequest) -> float | None:
    """Return the mean time per token after the first; a chunk may contain several tokens."""
    if sample.first_token_s is None or sample.output_tokens < 2:
        return None
    return (sample.total_s - sample.first_token_s) / (sample.output_tokens - 1)


def cells(spread: Spread | None, *statistics: str) -> str:
    """Return the columns of a table row: these statistics, or one dash if there are no samples."""
    if spread is None:
        return f"{'-':>{COLUMN * len(statistics)}}"
    return "".join(f"{getattr(spread, name):>{COLUMN}.2f}" for name in statistics)


def error_lines(errors: Mapping[str, int]) -> list[str]:
    """Return the lines that list errors below a table; none if there were no errors."""
    if not errors:
        return []
    return ["", "errors: " + ", ".join(f"{error} ({count})" for error, count in errors.items())]


def save_json(report: msgspec.Struct | Sequence[msgspec.Struct], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


# --------------------------------------------------------------------------------------------------------- bench serve


def table(result: Result) -> str:
    summary = summarise(result)
    spreads = {
        "time to first token": summary.time_to_first_token_ms,
        "inter-token latency": summary.inter_token_latency_ms,
        "time per output token": summary.time_per_output_token_ms,
        "end to end": summary.end_to_end_ms,
    }
    lines = [
        f"{summary.model} at {summary.url}: {summary.pace}, {summary.dataset}",
        "",
        f"{'milliseconds':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        *(_row(name, spread) for name, spread in spreads.items()),
        "",
        f"{'requests':<22}{summary.completed:>10} of {summary.requests} in {summary.elapsed_s:.1f} s: "
        f"{summary.requests_per_s:.2f}/s",
        f"{'prompt tokens/s':<22}{summary.prompt_tokens_per_s:>10.1f}",
        f"{'output tokens/s':<22}{summary.output_tokens_per_s:>10.1f}",
        f"{'cached prompt tokens':<22}{summary.cached_share:>10.1%}",
        f"{'errors':<22}{summary.requests - summary.completed:>10}",
        *(f"{'':<22}{count:>10} {error}" for error, count in summary.errors.items()),
    ]
    return "\n".join(lines)


def _row(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<22}{'-':>10}"
    return f"{name:<22}" + "".join(f"{value:>10.2f}" for value in msgspec.structs.astuple(spread))


def saved(result: Result) -> Saved:
    return Saved(summarise(result), result.samples)


def drawing() -> Any:
    """Return matplotlib's pyplot, with a backend that needs no display."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise HeadgateError("a plot needs matplotlib: pip install 'headgate[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plot(result: Result, path: Path) -> None:
    """Save a plot of the distributions of latencies, and of first-token and end-to-end times over the run."""
    pyplot = drawing()
    done = result.completed
    figure, (spread, timeline) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values_s in _series(done).items():
        ordered_ms = np.sort(np.asarray(values_s)) * 1000
        spread.plot(ordered_ms, np.arange(1, len(ordered_ms) + 1) / max(len(ordered_ms), 1), label=name)
    spread.set(xscale="log", xlabel="milliseconds", ylabel="cumulative share", ylim=(0, 1.02))
    spread.legend()
    timeline.scatter(
        [s.start_s for s in done], [(s.first_token_s or 0) * 1000 for s in done], s=8, label="first token"
    )
    timeline.scatter([s.start_s for s in done], [s.total_s * 1000 for s in done], s=8, label="end to end")
    timeline.set(yscale="log", xlabel="seconds since the start", ylabel="milliseconds")
    timeline.legend()
    figure.suptitle(f"{result.model}: {result.load.pace}, {len(done)} of {len(result.samples)} requests", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _series(done: list[TimedRequest]) -> dict[str, list[float]]:
    series = {
        "first token": first_token_times_s(done),
        "between tokens": gaps_s(done),
        "end to end": [sample.total_s for sample in done],
    }
    return {name: values for name, values in series.items() if values}
