"""Identifies the source of a run: results of several ranges of seeds may be added up if their source is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "headgate"


def loaded_modules() -> frozenset[str]:
    """The names of this package's modules that the process has loaded."""
    return frozenset(name for name in sys.modules if name.partition(".")[0] == PACKAGE)


def fingerprint(names: Iterable[str]) -> str:
    """A hash of the names and files of these modules, wherever they are installed."""
    digest = blake2b(digest_size=6)
    for name in sorted(names):
        spec = find_spec(name)
        content = Path(spec.origin).read_bytes() if spec is not None and spec.origin is not None else b""
        digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
    return digest.hexdigest()
