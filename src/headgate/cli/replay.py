"""`headgate replay`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from headgate.cli.exits import FAILED
from headgate.errors import RequestError


def add_replay(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=replay)
    command.add_argument("file", type=Path, metavar="FILE", help="crash file; the engine logs its path")


def replay(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Replay a crash file and print the result; returns 1 if a plan is inconsistent."""
    from headgate.engine.replay import replay as run_replay

    try:
        found = run_replay(options.file)
    except (OSError, ValueError) as error:
        raise RequestError(f"{options.file} cannot be replayed: {error}") from None
    print(f"the engine crashed with: {found.error.strip().splitlines()[-1] if found.error else 'no recorded error'}")
    print(found)
    return 0 if found.fault is None else FAILED
