"""Unwraps exception groups: a task group raises one even for a single error, but callers expect the error itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lone_errors() -> Iterator[None]:
    """If an exception group contains a single error, raise that error instead."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
