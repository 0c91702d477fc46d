"""Grammars for `SamplingParams.grammar`: constrain an answer to JSON, a pattern, a choice or tool calls.

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

# Overrides whatever a schema has under this key. A keyword that is not enforced is refused, never ignored.
_OPTIONS = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}", "lenient": False}}

Schema = Mapping[str, Any] | bool


def json_schema(schema: Schema, *, param: str = "grammar") -> str:
    """An answer that is one JSON value, valid against `schema`."""
    return checked(f"start: {schema_rule(schema, param=param)}", param=param)


def json_object() -> str:
    """An answer that is a JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str, *, param: str = "grammar") -> str:
    """An answer that `pattern` matches from its first character to its last."""
    return checked(f"start: /{regex_to_lark(pattern, '')}/", param=param)


def choice(answers: Iterable[str], *, param: str = "grammar") -> str:
    """An answer that is one of `answers`."""
    if not (literals := [literal(answer) for answer in answers]):
        raise RequestError("there must be something to choose from", param=param)
    return checked(f"start: {' | '.join(literals)}", param=param)


# -------------------------------------------------------------------------------------------- parts of other grammars


def schema_rule(schema: Schema, *, param: str) -> str:
    """`schema` as the right-hand side of a rule."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError("a JSON schema is an object or a boolean", param=param)
    root = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    try:
        return f"%json {json.dumps(root | _OPTIONS, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", param=param) from error


def literal(text: str) -> str:
    """`text`, exactly, as a part of a rule."""
    return json.dumps(text, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------- checking grammars


def checked(grammar: str, *, param: str = "grammar") -> str:
    """Return `grammar` if an engine can enforce it. Bounded by the engine's own limits: a tenth of a second at worst.

    A grammar whose patterns may have to match together is checked in a separate process, which takes a few times as
    long.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param=param
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
    """Whether several patterns could apply to one text. An approximation that may only err towards True."""
    patterns = len(_PATTERN.findall(grammar))
    return bool(_NAME_PATTERNS.search(grammar)) or (patterns > 1 and bool(_TOGETHER.search(grammar)))
