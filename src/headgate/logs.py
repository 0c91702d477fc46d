"""What a process says about itself: text for people, JSON lines for machines.

INFO tells the life of the process, DEBUG the life of a request, WARNING means that someone should look. API and engine
processes log alike, to standard error; `who` tells their lines apart.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, NamedTuple

LogFormat = Literal["text", "json"]

# Libraries that tell what we tell already.
QUIET = ("uvicorn", "asyncio", "httpx", "httpcore", "urllib3", "matplotlib", "opentelemetry")


class LogSettings(NamedTuple):
    """How a process logs."""

    format: LogFormat = "text"
    level: str = "WARNING"
    who: str = "headgate"


_own = LogSettings()


def own_voice() -> LogSettings:
    """How this process logs, for those that it starts."""
    return _own


def set_up(format: LogFormat, level: str, who: str) -> None:
    """Send everything that is logged in this process to standard error; called once, by its `main`."""
    global _own
    _own = LogSettings(format, level, who)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(who) if format == "json" else Lines(who))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class Lines(logging.Formatter):
    """`12:03:44 api: message`; the level only when it is worth a look."""

    def __init__(self, who: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname} "
        return f"{self.formatTime(record, self.datefmt)} {self._who}: {level}{record.message}"

    def usesTime(self) -> bool:  # noqa: N802
        return True


class JsonLines(logging.Formatter):
    """One object per line; what is given as `extra={"fields": {...}}` becomes part of it."""

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
