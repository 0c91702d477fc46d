"""Turns arguments that a model writes as plain text into JSON, by the types that the tool's schema declares."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from headgate.text.parsers.events import Output
from headgate.text.parsers.scanner import EndOfText, Reading, Scanner

Schema = Mapping[str, Any]
Declared = Mapping[str, Schema]  # schemas of the parameters, by the tool's name

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NESTED_MOST = 64  # the deepest Python value that is read


def property_schema(declared: Declared, tool: str, name: str) -> Schema:
    properties = declared.get(tool, {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def kinds_of(schema: Schema) -> frozenset[str]:
    """The JSON types that a value may have; empty if any."""
    kinds: set[str] = set()
    match schema.get("type"):
        case str(kind):
            kinds.add(kind)
        case list(several):
            kinds.update(kind for kind in several if isinstance(kind, str))
        case _:
            if isinstance(values := schema.get("enum"), list):
                kinds.update(map(_kind_of, values))
            for key in ("anyOf", "oneOf"):
                options = schema.get(key)
                for option in options if isinstance(options, list) else ():
                    kinds |= kinds_of(option) if isinstance(option, Mapping) else set()
    return frozenset(kinds)


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"


def as_json(raw: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that may have one of `kinds`; text that is no JSON value of these kinds is a string."""
    text = raw.strip()
    text = _PYTHON.get(text, text)
    try:
        kind = _kind_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted(raw)
    fits = not kinds or kind in kinds or (kind == "number" and "integer" in kinds)
    return text if fits or "string" not in kinds else quoted(raw)


def python_as_json(raw: str) -> str:
    """The JSON of a Python literal; anything else is a string."""
    text = raw.strip()
    try:
        if _depth(text) > _NESTED_MOST:
            raise ValueError("nested too deep")
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return as_json(text, frozenset())


def _depth(text: str) -> int:
    """How deep brackets are nested in `text`, at most."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Arguments:
    """Writes the arguments of one call as a JSON object, one after another. Strings are written as they arrive."""

    def __init__(self, scan: Scanner, out: Output) -> None:
        self._scan, self._out = scan, out
        self._count = 0

    def key(self, name: str) -> None:
        self._out.add_arguments(("{" if not self._count else ", ") + quoted(name) + ": ")
        self._count += 1

    def value(self, schema: Schema, *closings: str) -> Reading[None]:
        """Read the value of the last key, up to one of `closings`."""
        kinds = kinds_of(schema)
        if kinds == {"string"}:
            self._out.add_arguments('"')
            yield from self._scan.until(*closings, emit=lambda text: self._out.add_arguments(quoted(text)[1:-1]))
            self._out.add_arguments('"')
            return
        pieces: list[str] = []
        try:
            yield from self._scan.until(*closings, emit=pieces.append)
        except EndOfText:
            self._out.add_arguments("".join(pieces))  # the answer was cut: the call ends as the model wrote it
            raise
        self._out.add_arguments(as_json("".join(pieces), kinds))

    def end(self) -> None:
        self._out.add_arguments("}" if self._count else "{}")
        self._out.end_call()
