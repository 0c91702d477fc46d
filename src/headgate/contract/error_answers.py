"""Errors in the format that the operation of a path declares; OpenAI's, unless it declares another one."""

from __future__ import annotations

from typing import Final

import msgspec

from headgate.contract.errors import ErrorBody, ErrorFormat
from headgate.contract.event_json import escaped
from headgate.contract.operations.table import OPERATIONS

_FORMATS: Final = {operation.path: operation.error for operation in OPERATIONS if operation.error is not ErrorBody}


def _format_at(path: str) -> type[ErrorFormat]:
    return _FORMATS.get(path, ErrorBody)


def error_body_at(path: str, error: BaseException, request_id: str = "") -> bytes:
    """The JSON body that reports `error` to a caller of `path`."""
    return msgspec.json.encode(_format_at(path).of(error, request_id))


def error_event_at(path: str, error: BaseException, request_id: str = "") -> bytes:
    """The event that reports `error` in a stream that has begun."""
    return as_error_event(path, error_body_at(path, error, request_id))


def as_error_event(path: str, body: bytes) -> bytes:
    return _format_at(path).event(escaped(body))
