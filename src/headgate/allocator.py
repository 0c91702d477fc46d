"""Settings of the C library's allocator for long-running processes."""

from __future__ import annotations

import ctypes
from typing import Final

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for `mallopt`
KEPT_BYTES: Final = 16 * 2**20
LARGEST: Final = 4 * 2**20  # larger allocations are mapped instead of taken from the heap


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` of freed memory at the top of the heap instead of returning it to the kernel.

    Returning it and allocating it again costs a router a fifth of the CPU time of a long request.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl and other C libraries do not have `mallopt`
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST)
