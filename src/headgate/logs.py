"""Logging to standard error, as text or as JSON lines.

INFO is for events of the process, DEBUG for events of a request, WARNING for events that need the operator's
attention. API and engine processes use the same format; each line has the name of its process (`who`).
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, NamedTuple

LogFormat = Literal["text", "json"]

# Libraries whose INFO logs repeat ours.
QUIET = ("uvicorn", "asyncio", "httpx", "httpcore", "urllib3", "matplotlib", "opentelemetry")


class LogSettings(NamedTuple):
    format: LogFormat = "text"
    level: str = "WARNING"
    who: str = "headgate"


_own = LogSettings()


def own_voice() -> LogSettings:
    """Return the log settings of this process, to pass on to its child processes."""
    return _own


def set_up(format: LogFormat, level: str, who: str) -> None:
    """Send all logs of this process to standard error. Called once, by its `main`."""
    global _own
    _own = LogSettings(format, level, who)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(who) if format == "json" else Lines(who))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class Lines(logging.Formatter):
    """Formats records as `12:03:44 api: message`, with the level for warnings and errors."""

    def __init__(self, who: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname} "
        return f"{self.formatTime(record, self.datefmt)} {self._who}: {level}{record.message}"

    def usesTime(self) -> bool:  # noqa: N802
        return True


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line, including the fields given as `extra={"fields": {...}}`."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
