"""Results for people (a table), for machines (JSON) and for eyes (a plot)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.bench.client import TimedRequest
from headgate.bench.load import Result
from headgate.errors import HeadgateError

PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """How a number is spread over requests, in milliseconds."""

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
    cached_share: float = 0.0  # of prompt tokens, as the server says


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
        errors=dict(Counter(sample.error for sample in result.samples if sample.error).most_common()),
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s,
        prompt_tokens_per_s=sum(sample.prompt_tokens for sample in done) / elapsed_s,
        output_tokens_per_s=sum(sample.output_tokens for sample in done) / elapsed_s,
        time_to_first_token_ms=Spread.of([s.first_token_s for s in done if s.first_token_s is not None]),
        inter_token_latency_ms=Spread.of([gap_s for sample in done for gap_s in sample.gaps_s]),
        time_per_output_token_ms=Spread.of([each for sample in done if (each := per_token_s(sample)) is not None]),
        end_to_end_ms=Spread.of([sample.total_s for sample in done]),
        dataset=str(result.load.dataset),
        cached_share=cached_share(done),
    )


def cached_share(samples: Sequence[TimedRequest]) -> float:
    return sum(sample.cached_tokens for sample in samples) / max(1, sum(sample.prompt_tokens for sample in samples))


def per_token_s(sample: TimedRequest) -> float | None:
    """After the first one; a chunk may bring several."""
    if sample.first_token_s is None or sample.output_tokens < 2:
        return None
    return (sample.total_s - sample.first_token_s) / (sample.output_tokens - 1)


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


def save_json(result: Result, path: Path) -> None:
    saved = msgspec.json.encode(Saved(summarise(result), result.samples))
    path.write_bytes(msgspec.json.format(saved, indent=1) + b"\n")


def drawing() -> Any:
    """Matplotlib, which needs no screen here."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise HeadgateError("a plot needs matplotlib: pip install 'headgate[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plot(result: Result, path: Path) -> None:
    """Where the time went: how first-token and end-to-end times are spread, and how they went over the run."""
    pyplot = drawing()
    done = result.completed
    figure, (spread, course) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values_s in _series(done).items():
        ordered_ms = np.sort(np.asarray(values_s)) * 1000
        spread.plot(ordered_ms, np.arange(1, len(ordered_ms) + 1) / max(len(ordered_ms), 1), label=name)
    spread.set(xscale="log", xlabel="milliseconds", ylabel="share of them that took at most this", ylim=(0, 1.02))
    spread.legend()
    course.scatter([s.start_s for s in done], [(s.first_token_s or 0) * 1000 for s in done], s=8, label="first token")
    course.scatter([s.start_s for s in done], [s.total_s * 1000 for s in done], s=8, label="end to end")
    course.set(yscale="log", xlabel="sent after, in seconds", ylabel="milliseconds")
    course.legend()
    figure.suptitle(f"{result.model}: {result.load.pace}, {len(done)} of {len(result.samples)} requests", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _series(done: list[TimedRequest]) -> dict[str, list[float]]:
    series = {
        "first token": [sample.first_token_s for sample in done if sample.first_token_s is not None],
        "between tokens": [gap_s for sample in done for gap_s in sample.gaps_s],
        "end to end": [sample.total_s for sample in done],
    }
    return {name: values for name, values in series.items() if values}
