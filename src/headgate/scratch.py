"""Temporary folders that are removed after their process ends, even if it is killed.

A process killed with SIGKILL cannot clean up. Each folder therefore contains a locked file; the kernel releases the
lock when the process ends, and creating a folder first removes all folders whose lock is free. Unlike a process id, a
lock is never reused by another process, and it works across containers that share the directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "headgate-"
LOCK = ".headgate-lock"


@contextmanager
def folder(purpose: str = "", parent: str | Path | None = None) -> Iterator[Path]:
    """Create a folder for this process. It is removed on exit or, if the process is killed, by a later call."""
    above = Path(parent or tempfile.gettempdir())
    remove_stale(above)
    own = Path(tempfile.mkdtemp(prefix=PREFIX + purpose, dir=above))
    descriptor = _lock(own)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(descriptor)


def remove_stale(parent: Path) -> None:
    """Remove Headgate's folders whose process has ended."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # the folder was already removed, is locked, or belongs to another user
            _remove_if_stale(path.parent)


def _remove_if_stale(own: Path) -> None:
    if own.is_symlink() or own.lstat().st_uid != os.geteuid():
        return
    descriptor = os.open(own / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(own, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(own: Path) -> int:
    """Lock the folder's file before the folder gets its final name, so that it never appears stale."""
    made = own / f"{LOCK}-new"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    made.rename(own / LOCK)
    return descriptor
