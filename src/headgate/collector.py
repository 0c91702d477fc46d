"""Settings of Python's cyclic garbage collector for latency-sensitive code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_the_collector() -> None:
    """Exempt objects made during start-up from collection, and collect the rest rarely.

    Reference counting frees nearly everything that requests allocate.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def collector_off() -> Iterator[None]:
    """Suspends garbage collection inside this block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
