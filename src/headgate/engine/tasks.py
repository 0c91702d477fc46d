"""Unwraps exception groups: a task group raises one even for a single error, but callers expect the error itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headgate.errors import HeadgateError


@contextmanager
def lone_errors() -> Iterator[None]:
    """Raise the error of an exception group instead of the group, or the first if all are expected errors.

    Two tasks may report one failure: an engine that is killed ends, and does not answer.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        errors = list(_leaves(group))
        if len(errors) == 1 or all(isinstance(error, HeadgateError) for error in errors):
            raise errors[0] from None
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
