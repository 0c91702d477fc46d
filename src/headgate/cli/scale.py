"""`headgate scale`: change the number of servers of a running fleet."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from headgate.cli.exits import FAILED
from headgate.cli.serve import ROLES, checked_key
from headgate.cli.tls import add_url_ca, url_tls
from headgate.errors import RequestError


def add_scale(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate scale [ROLE=N ...] [options]"
    command.set_defaults(run=scale)
    add = command.add_argument
    add("count", nargs="*", metavar="ROLE=N", help="mixed=6, prefill=1, decode=2; none: print current counts")
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="URL of headgate up (%(default)s)")
    add_url_ca(add)
    add("--admin-key", metavar="KEY", help="admin key; prefer $HEADGATE_ADMIN_KEY")
    add("--timeout", type=float, default=600.0, metavar="S", help="wait for the servers to be ready (600)")


def scale(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.client import Fleet

    counts = parse_counts(options.count)
    key = options.admin_key or checked_key(environ.get("HEADGATE_ADMIN_KEY"), "HEADGATE_ADMIN_KEY")
    fleet = Fleet(options.url, key, tls=url_tls(options))
    size = fleet.scale(counts, timeout_s=options.timeout) if counts else fleet.size()
    for role in ROLES:
        if size.wanted.get(role) or size.ready.get(role) or role in counts:
            print(f"{role:<8} {size.ready.get(role, 0)} ready of {size.wanted.get(role, 0)}")
    return 0 if size.done else FAILED


def parse_counts(texts: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        found = re.fullmatch(rf"({'|'.join(ROLES)})=(\d{{1,4}})", text)
        if found is None:
            raise RequestError(f"{text!r} is not ROLE=N, such as mixed=6; ROLE is one of {', '.join(ROLES)}")
        if found[1] in counts:
            raise RequestError(f"{found[1]} is given twice")
        counts[found[1]] = int(found[2])
    return counts
