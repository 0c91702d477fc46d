"""`headgate simulate`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headgate.cli.exits import FAILED
from headgate.errors import RequestError

if TYPE_CHECKING:
    from headgate.testing.sim.report import SimulationReport


def add_simulate(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=simulate)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="run one seed")
    which.add_argument("--seeds", type=seed_range, metavar="A:B", help="run seeds A to B - 1, on all cores")
    command.add_argument("--trace", action="store_true", help="print every event (with --seed)")
    command.add_argument("--jobs", type=int, metavar="N", help="processes (default: one per core)")
    command.epilog = "docs/testing.md describes the simulation, its faults and its checks. Exits with 1 on a failure."


def seed_range(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"a range of seeds is A:B with A below B, not {text!r}")
    return range(int(first), int(last))


def simulate(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the simulation and print a summary; returns 1 if a check failed."""
    if options.jobs is not None and options.jobs < 1:
        raise RequestError("--jobs must be at least 1")
    return _one(options.seed, trace=options.trace) if options.seeds is None else _many(options.seeds, options.jobs)


def _one(seed: int, *, trace: bool) -> int:
    from headgate.testing.sim.world import simulate as run

    report = run(seed, chatty=trace)
    if trace:
        print(report.timeline())
    _print_failures(report)
    print(f"seed {seed}: {'FAILED' if report.failures else 'passed'}; trace {report.hash}")
    return FAILED if report.failures else 0


def _many(seeds: range, jobs: int | None) -> int:
    from headgate.testing.sim.runner import run_seeds

    began_s = time.monotonic()
    summary = run_seeds(seeds, jobs=jobs, on_failure=_print_failures)
    print("\n".join(summary.lines()))
    print(f"took      {time.monotonic() - began_s:.1f} s")
    if summary.failures:
        print(f"replay    headgate simulate --seed {min(summary.failures)} --trace")
    return FAILED if summary.failures else 0


def _print_failures(report: SimulationReport) -> None:
    for failure in report.failures:
        print(f"seed {report.seed}: {failure}", flush=True)
