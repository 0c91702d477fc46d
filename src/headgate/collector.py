"""Settings of Python's cyclic garbage collector for latency-sensitive code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_the_collector() -> None:
    """Exempt objects created during start-up from garbage collection, and collect other objects rarely.

    Reference counting alone frees nearly everything that requests allocate.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def collector_off() -> Iterator[None]:
    """Suspend garbage collection inside this context."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
