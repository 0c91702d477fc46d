"""The plain path in C, as a router's own process has it, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.router import plain


@contextmanager
def in_c() -> Iterator[None]:
    python = {name: getattr(plain, name) for name in plain.FUNCTIONS}
    assert plain.use_compiled() is None
    try:
        yield
    finally:
        vars(plain).update(python)
