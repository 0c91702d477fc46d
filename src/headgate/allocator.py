"""The C library's allocator, told what a process that runs for long needs."""

from __future__ import annotations

import ctypes
from typing import Final

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for `mallopt`
KEPT_BYTES: Final = 16 * 2**20
LARGEST: Final = 4 * 2**20  # piece that is taken from the heap


def keep_freed_memory() -> None:
    """What is freed at the end of the heap stays ours, up to a limit.

    To give it back and to ask for it again is a fifth of what a long request costs a router.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl, and others, have none
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST)
