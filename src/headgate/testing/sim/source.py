"""Identifies the source of a run: results of several ranges of seeds may be added up if their source is the same."""

from __future__ import annotations

import ast
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
    """A hash of the names and the code of these modules, wherever they are installed; see `_code`."""
    digest = blake2b(digest_size=6)
    for name in sorted(names):
        spec = find_spec(name)
        content = _code(Path(spec.origin)) if spec is not None and spec.origin is not None else b""
        digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
    return digest.hexdigest()


def _code(file: Path) -> bytes:
    """What determines the behaviour of a module: without comments, docstrings and line breaks, which change more often."""
    content = file.read_bytes()
    if file.suffix != ".py":
        return content
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree).encode()
