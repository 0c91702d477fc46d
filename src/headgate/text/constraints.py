"""Grammars for `SamplingParams.grammar`, which constrain an answer to JSON, a pattern, a choice or tool calls.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))

Every function returns a grammar that an engine can enforce, or raises a RequestError with the reason. White space
between JSON values is one space, or a newline and indentation, so that no answer can consist of endless white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from llguidance import regex_to_lark

from headgate.contract.sampling import MAX_GRAMMAR_CHARS
from headgate.errors import RequestError
from headgate.text.grammar_check import complaint_about
from headgate.text.trial import tried

# Replaces this key of a schema, if present. With `lenient` off, a keyword that cannot be enforced is refused.
_OPTIONS = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}", "lenient": False}}

Schema = Mapping[str, Any] | bool


def json_schema(schema: Schema, *, param: str = "grammar") -> str:
    """Return the grammar of one JSON value that is valid against `schema`."""
    return checked(f"start: {schema_rule(schema, param=param)}", param=param)


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str, *, param: str = "grammar") -> str:
    """Return the grammar of texts that `pattern` matches from their first character to their last."""
    return checked(f"start: /{regex_to_lark(pattern, '')}/", param=param)


def choice(answers: Iterable[str], *, param: str = "grammar") -> str:
    """Return the grammar that allows exactly `answers`."""
    if not (literals := [literal(answer) for answer in answers]):
        raise RequestError("the list of choices is empty", param=param)
    return checked(f"start: {' | '.join(literals)}", param=param)


# -------------------------------------------------------------------------------------------- parts of other grammars


def schema_rule(schema: Schema, *, param: str) -> str:
    """Return `schema` as the right-hand side of a grammar rule."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError("a JSON schema is an object or a boolean", param=param)
    root = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    try:
        return f"%json {json.dumps(root | _OPTIONS, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", param=param) from error


def literal(text: str) -> str:
    """Return the part of a grammar rule that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------- checking grammars


def checked(grammar: str, *, param: str = "grammar") -> str:
    """Return `grammar` if an engine can enforce it, else raise a RequestError.

    The check takes a tenth of a second at worst, because it has the limits of an engine. If several patterns of a
    grammar may apply to the same text, it is checked in a separate process, which takes a few times as long.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"the grammar has {len(grammar)} characters; the maximum is {MAX_GRAMMAR_CHARS}", param=param
        )
    if complaint := _complaint(grammar):
        raise RequestError(f"the grammar cannot be enforced: {complaint}", param=param)
    return grammar


@lru_cache(maxsize=256)
def _complaint(grammar: str) -> str:
    return tried(grammar) if _patterns_may_meet(grammar) else complaint_about(grammar)


_PATTERN = re.compile(r'"(?:pattern|format)"\s*:')
_NAME_PATTERNS = re.compile(r'"(?:patternProperties|propertyNames)"\s*:')
_TOGETHER = re.compile(r'"(?:allOf|\$ref|anyOf|oneOf|if|not|dependentSchemas)"\s*:')


def _patterns_may_meet(grammar: str) -> bool:
    """Whether several patterns could apply to one text. If in doubt, returns True."""
    patterns = len(_PATTERN.findall(grammar))
    return bool(_NAME_PATTERNS.search(grammar)) or (patterns > 1 and bool(_TOGETHER.search(grammar)))
