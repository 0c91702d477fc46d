"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

from headgate.logs import JsonLines, Lines


def record(level: int, message: str, *values: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("headgate.x", level, "f", 1, message, values, more.pop("exc_info", None))
    made.__dict__.update(more)
    return made


def test_a_text_line_has_the_process_name_and_the_level_of_warnings():
    lines = Lines("engine 1")
    assert lines.format(record(logging.INFO, "hello %s", "you")).endswith(" engine 1: hello you")
    assert lines.format(record(logging.WARNING, "look")).endswith(" engine 1: WARNING look")


def test_a_json_line_is_one_object_with_its_fields():
    line = JsonLines("api").format(record(logging.INFO, "two\nlines", fields={"request_id": "a"}))
    assert "\n" not in line
    logged = json.loads(line)
    assert (logged["message"], logged["process"], logged["request_id"], logged["level"]) == (
        "two\nlines",
        "api",
        "a",
        "info",
    )


def test_a_traceback_stays_on_the_line():
    try:
        raise ValueError("why")
    except ValueError:
        line = JsonLines("api").format(record(logging.ERROR, "failed", exc_info=sys.exc_info()))
    assert "\n" not in line and "ValueError: why" in json.loads(line)["traceback"]
