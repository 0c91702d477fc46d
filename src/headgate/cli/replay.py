"""`headgate replay`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from headgate.cli.exits import FAILED
from headgate.errors import RequestError


def add_replay(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=replay)
    command.add_argument("file", type=Path, metavar="FILE", help="what the engine left behind; its log says where")


def replay(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Exits with 1 if a plan makes no sense."""
    from headgate.engine.replay import replay as run_again

    try:
        found = run_again(options.file)
    except (OSError, ValueError) as error:
        raise RequestError(f"{options.file} cannot be replayed: {error}") from None
    print(f"the engine died of: {found.error.strip().splitlines()[-1] if found.error else 'nothing it knew'}")
    print(found)
    return 0 if found.fault is None else FAILED
