"""Python's collector of circular garbage, kept out of the way where time matters."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_the_collector() -> None:
    """What start-up has made stays; what work makes is cleared away by reference counts, and seldom looked through."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def collector_off() -> Iterator[None]:
    """Nothing is finalised in here that nobody lets go of in here."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
