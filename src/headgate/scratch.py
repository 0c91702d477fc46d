"""Folders that end with their process, however it ends.

A process that is killed with SIGKILL removes nothing. So each folder has a file with a lock, which the kernel releases when
the process ends, and creating a folder first removes all folders whose lock is free. Unlike a process id, a lock cannot
belong to another process later, and it holds across containers that share the directory.
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
    """A new folder for this process, removed at the end of the block or, if the process is killed, by a later call."""
    above = Path(parent or tempfile.gettempdir())
    remove_left(above)
    own = Path(tempfile.mkdtemp(prefix=PREFIX + purpose, dir=above))
    descriptor = _lock(own)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        os.close(descriptor)


def remove_left(parent: Path) -> None:
    """Remove folders of ours whose process has ended."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # gone meanwhile, or not ours
            _remove_if_left(path.parent)


def _remove_if_left(own: Path) -> None:
    if own.is_symlink() or own.lstat().st_uid != os.geteuid():
        return
    descriptor = os.open(own / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(own, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(own: Path) -> int:
    """The file is locked before it gets its name, so that the folder is never taken for one left behind."""
    made = own / f"{LOCK}-new"
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    made.rename(own / LOCK)
    return descriptor
