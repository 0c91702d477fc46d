"""Whether files are still those that they were: told by their inode, size and time of change. No torch."""

from __future__ import annotations

import os
from pathlib import Path

Stamps = dict[str, tuple[int, int, int]]


def stamps(path: str | Path) -> Stamps:
    """Of a file, or of the weights in a folder, by name; nothing where there is nothing that can be read."""
    path = Path(path)
    try:
        files = [*path.glob("*.safetensors"), *path.glob("*.index.json")] if path.is_dir() else [path]
        return {file.name: stamp(file.stat()) for file in files if file.is_file()}
    except (OSError, ValueError):  # a name that no file can have, among others; whoever reads it says why
        return {}


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
