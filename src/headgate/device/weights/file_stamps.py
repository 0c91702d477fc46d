"""Detects whether files have changed, by their inode, size and modification time. No torch."""

from __future__ import annotations

import os
from pathlib import Path

Stamps = dict[str, tuple[int, int, int]]


def stamps(path: str | Path) -> Stamps:
    """The stamps of a file, or of the weights in a folder, by name; empty if nothing can be read."""
    path = Path(path)
    try:
        files = [*path.glob("*.safetensors"), *path.glob("*.index.json")] if path.is_dir() else [path]
        return {file.name: stamp(file.stat()) for file in files if file.is_file()}
    except (OSError, ValueError):  # for example an invalid file name; reading the file reports the reason
        return {}


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
