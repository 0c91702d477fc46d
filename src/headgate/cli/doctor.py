"""`headgate doctor`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from headgate.cli.exits import FAILED


def add_doctor(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=doctor)
    add = command.add_argument
    add("--host", default="127.0.0.1", help="address that a server would bind (default: %(default)s)")
    add("--port", type=int, default=8000, help="port that a server would bind (default: %(default)s)")
    add("--json", action="store_true", help="print a JSON object instead of text")


def doctor(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the findings; returns 1 if this machine cannot serve a model."""
    from headgate.cli.serve import checked_port
    from headgate.doctor import PlannedServer, can_serve, examine
    from headgate.model_store.find import Places

    places = Places.of(environ)
    findings = examine(PlannedServer(options.host, checked_port(options.port), places.our_cache))
    serves = can_serve(findings)
    if options.json:
        print(json.dumps({"can_serve": serves, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print("\n".join(map(str, findings)))
        print("\nThis machine can serve." if serves else "\nThis machine cannot serve; see the problems above.")
    return 0 if serves else FAILED
