"""The argument of an engine process, and its exit codes. Imports no torch, which the parent process does not need."""

from __future__ import annotations

import msgspec

from headgate.config import EngineConfig
from headgate.logs import LogFormat
from headgate.protocol.command import FileSource

CANNOT_START = 3  # exit code
LOST_RANK = 4  # exit code


class EngineStart(msgspec.Struct, frozen=True):
    model: str  # a folder or a GGUF file
    address: str  # where to listen
    config: EngineConfig
    log_level: str = "INFO"
    log_format: LogFormat = "text"
    name: str = "engine"
    weights: FileSource | None = None  # loaded instead of the model's own weights
    version: int = 0  # version of `weights`
