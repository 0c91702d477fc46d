"""`headgate chaos`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headgate import scratch
from headgate.cli.exits import FAILED
from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.testing.chaos.report import ChaosReport
    from headgate.testing.chaos.settings import ChaosSettings

FLEET_LOGS = ("headgate.cluster", "headgate.testing.chaos")


def add_chaos(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=chaos)
    add = command.add_argument
    add("--minutes", type=float, default=10.0, metavar="M", help="duration (default: 10)")
    add("--every", type=float, default=2.0, metavar="S", help="seconds between faults (2)")
    add("--clients", type=int, default=64, metavar="N", help="concurrent requests (64)")
    add("--servers", type=int, default=3, metavar="N", help="servers, one of them for prefill only (3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the faults and their times (0)")
    add("--only", default="", metavar="KINDS", help="faults or fault groups, comma-separated (all)")
    add("--report", type=Path, metavar="DIR", help="write chaos.json, timeline.png and fleet.log here")
    command.epilog = "docs/chaos.md lists the faults and the checks. Exits with 1 if a check fails."


def chaos(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    import uvloop

    from headgate.cli.up import environment
    from headgate.testing.chaos.plan import chosen
    from headgate.testing.chaos.settings import ChaosSettings

    settings = ChaosSettings(
        seconds=options.minutes * 60,
        every_s=options.every,
        clients=options.clients,
        servers=options.servers,
        seed=options.seed,
        kinds=chosen([name for name in options.only.split(",") if name]),
    )
    keep_log(options.report)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run(settings, environment(environ, settings.servers, {})))
    if report is None:
        return FAILED
    print(report.table(), flush=True)
    if options.report is not None:
        report.save(options.report)
    return FAILED if report.problems else 0


def keep_log(folder: Path | None) -> None:
    """Send the verbose logs of the fleet to a file, or discard them."""
    handler: logging.Handler = logging.NullHandler()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(folder / "fleet.log", mode="w")
        except OSError as error:
            raise HeadgateError(f"the report cannot be written to {folder}: {error.strerror}") from None
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in FLEET_LOGS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


async def run(settings: ChaosSettings, environ: Mapping[str, str]) -> ChaosReport | None:
    """Run the test. The first Ctrl-C stops the faults and checks the results so far; the second stops everything."""
    from headgate.listening import StopSignals
    from headgate.testing.chaos.run import ChaosRun

    def say(sentence: str) -> None:
        print(sentence, flush=True)

    with StopSignals() as signals, scratch.folder("chaos-") as folder:
        one = ChaosRun(settings, environ, say)
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            one.over.set()
            if signals.seen > 1:
                task.cancel()

        signals.on_stop = stop
        try:
            return await one.run(folder)
        except asyncio.CancelledError:
            if not signals.seen:
                raise
            say("stopped")
            return None
