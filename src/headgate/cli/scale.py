"""`headgate scale`: more servers, or fewer, while they serve."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from headgate.cli.exits import FAILED
from headgate.cli.serve import ROLES, checked_key
from headgate.errors import RequestError


def add_scale(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate scale [ROLE=N ...] [options]"
    command.set_defaults(run=scale)
    add = command.add_argument
    add("count", nargs="*", metavar="ROLE=N", help="mixed=6, prefill=1, decode=2; none: say how many there are")
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="of headgate up (%(default)s)")
    add("--admin-key", metavar="KEY", help="better in $HEADGATE_ADMIN_KEY")
    add("--timeout", type=float, default=600.0, metavar="S", help="to wait until it is so (600)")


def scale(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.client import Fleet

    counts = parse_counts(options.count)
    key = options.admin_key or checked_key(environ.get("HEADGATE_ADMIN_KEY"), "HEADGATE_ADMIN_KEY")
    fleet = Fleet(options.url, key)
    stands = fleet.scale(counts, timeout_s=options.timeout) if counts else fleet.size()
    for role in ROLES:
        if stands.wanted.get(role) or stands.ready.get(role) or role in counts:
            print(f"{role:<8} {stands.ready.get(role, 0)} ready of {stands.wanted.get(role, 0)}")
    return 0 if stands.done else FAILED


def parse_counts(texts: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        found = re.fullmatch(rf"({'|'.join(ROLES)})=(\d{{1,4}})", text)
        if found is None:
            raise RequestError(f"say ROLE=N, such as mixed=6, with ROLE one of {', '.join(ROLES)}, not {text!r}")
        if found[1] in counts:
            raise RequestError(f"{found[1]} is there twice")
        counts[found[1]] = int(found[2])
    return counts
