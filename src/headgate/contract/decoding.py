"""Decodes JSON into the types of the contract; an error names the field that does not fit."""

from __future__ import annotations

import re
import threading
from typing import Any, TypeVar

import msgspec

from headgate.errors import RequestError

T = TypeVar("T")

LONGEST_COMPLAINT = 1000  # characters of an error message, which may quote a name of several megabytes

_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`")


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()


def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """One at a time: msgspec crashes if two threads resolve the fields of a struct at once."""
    if (found := _decoders.get(kind)) is None:
        with _building:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    try:
        value: T = _decoder_of(kind).decode(body)
        return value
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def convert(value: Any, kind: Any, param: str) -> Any:
    """Check a value that has already been decoded from JSON."""
    try:
        _decoder_of(kind)  # so that the fields of `kind` are resolved
        return msgspec.convert(value, kind, str_keys=True)  # the keys of JSON objects are strings
    except msgspec.ValidationError as error:
        raise _explained(str(error), param) from None


def _explained(message: str, within: str = "") -> RequestError:
    """msgspec's error, with the field written as OpenAI does: `messages[0].role`."""
    if len(message) > LONGEST_COMPLAINT:
        message = message[: LONGEST_COMPLAINT // 2] + "..." + message[-LONGEST_COMPLAINT // 2 :]
    found = _PATH.search(message)
    path = found["path"] if found else ""
    path = within + ("" if not within or not path or path.startswith("[") else ".") + path
    reason = message[: found.start()] if found else message
    if unknown := _UNKNOWN.match(reason):
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return RequestError(f"unknown field {name}; leave it out", param=name, code="unknown_parameter")
    if missing := _MISSING.match(reason):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
    where = f"{path}: " if path else ""
    return RequestError(f"{where}{reason[:1].lower()}{reason[1:]}", param=path or None, code="invalid_type")


def refuse(body: msgspec.Struct, *names: str) -> None:
    """Raise if `body` sets one of these fields, which exist in OpenAI's API and are not supported here."""
    for name in names:
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
