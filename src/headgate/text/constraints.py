"""Grammars for `SamplingParams.grammar`, which constrain an answer to JSON, a pattern, a choice or tool calls.

    SamplingParams(grammar=json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))

Every function returns a grammar that an engine can enforce, or raises a RequestError with the reason. Unless a client
chooses otherwise, white space between JSON values is one space, or a newline and indentation, so that no answer can
consist of endless white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import regex_to_lark

from headgate.contract.sampling import MAX_GRAMMAR_CHARS
from headgate.errors import RequestError
from headgate.text.closed_schemas import closed
from headgate.text.ebnf import is_ebnf, lark_of
from headgate.text.grammar_check import complaint_about
from headgate.text.trial import tried

DEFAULT_BLANKS = r" |\r?\n[ \t]{0,32}"

Schema = Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Blanks:
    """White space between JSON values: by default one space, or a newline and indentation."""

    pattern: str | None = None  # a regular expression
    none: bool = False  # one space after a colon or comma, and no other

    @property
    def options(self) -> dict[str, Any]:
        if self.none:
            return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return {"whitespace_pattern": DEFAULT_BLANKS if self.pattern is None else self.pattern}


USUAL_BLANKS = Blanks()


def json_schema(schema: Schema, *, param: str = "grammar", blanks: Blanks = USUAL_BLANKS) -> str:
    """Return the grammar of one JSON value that is valid against `schema`."""
    rule = schema_rule(schema, param=param, blanks=blanks)
    return checked(f"start: {rule}", param=param, foreign=blanks.pattern is not None)


def json_object(*, param: str = "grammar", blanks: Blanks = USUAL_BLANKS) -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"}, param=param, blanks=blanks)


def regex(written: str, *, param: str = "grammar") -> str:
    """Return the grammar of texts that a regular expression matches from their first character to their last."""
    return checked(f"start: {pattern(written)}", param=param)


def grammar(written: str, *, param: str = "grammar") -> str:
    """Return the grammar for one in Lark, or in EBNF as llama.cpp (GBNF) and XGrammar write it."""
    return checked(context_free(written, param=param), param=param, foreign=True)


def choice(answers: Iterable[str], *, param: str = "grammar") -> str:
    """Return the grammar that allows exactly `answers`."""
    if not (literals := [literal(answer) for answer in answers]):
        raise RequestError("the list of choices is empty", param=param)
    return checked(f"start: {' | '.join(literals)}", param=param)


# -------------------------------------------------------------------------------------------- parts of other grammars


def pattern(written: str) -> str:
    """Return the part of a grammar that a regular expression matches."""
    return f"/{regex_to_lark(written, '')}/"


def context_free(written: str, *, param: str) -> str:
    """Return a grammar in Lark or EBNF as Lark. It is not checked yet."""
    check_size(len(written), param)
    if is_ebnf(written):
        return lark_of(written, param=param)
    if _TOKEN_IDS.search(_QUOTED.sub("", written)):
        raise RequestError("the grammar cannot be enforced: it names ids of tokens; write their text", param=param)
    return written


# In Lark: `<[123]>` is a token, but not within a text, a pattern or a comment. A text or pattern without an end is
# refused later; it matches here too, because a search for its end from each of its quotes would take quadratic time.
_TOKEN_IDS = re.compile(r"<\s*\[")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|/(?:[^/\\\n]|\\.)+/?')


def schema_rule(schema: Schema, *, param: str, blanks: Blanks = USUAL_BLANKS) -> str:
    """Return `schema` as the right-hand side of a grammar rule. Objects that list their properties are closed."""
    if not isinstance(schema, Mapping | bool):
        raise RequestError("a JSON schema is an object or a boolean", param=param)
    try:
        root = closed(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
        # Replaces the key of the schema, if present. With `lenient` off, a keyword that cannot be enforced is refused.
        options = {"x-guidance": {**blanks.options, "lenient": False}}
        return f"%json {json.dumps(root | options, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is not JSON: {error}", param=param) from error


def literal(text: str) -> str:
    """Return the part of a grammar rule that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------- checking grammars


def checked(grammar: str, *, param: str = "grammar", foreign: bool = False) -> str:
    """Return `grammar` if an engine can enforce it, else raise a RequestError.

    The check takes a tenth of a second at worst, because it has the limits of an engine. If several patterns of a
    grammar may apply to the same text, or a client wrote the rules (`foreign`), it is checked in a separate process,
    which takes a few times as long.
    """
    check_size(len(grammar), param)
    if complaint := _complaint(grammar, foreign):
        raise RequestError(f"the grammar cannot be enforced: {complaint}", param=param)
    return grammar


def check_size(chars: int, param: str) -> None:
    if chars > MAX_GRAMMAR_CHARS:
        raise RequestError(f"the grammar has {chars} characters; the maximum is {MAX_GRAMMAR_CHARS}", param=param)


@lru_cache(maxsize=256)
def _complaint(grammar: str, foreign: bool) -> str:
    return tried(grammar) if foreign or _patterns_may_meet(grammar) else complaint_about(grammar)


_PATTERN = re.compile(r'"(?:pattern|format)"\s*:')
_NAME_PATTERNS = re.compile(r'"(?:patternProperties|propertyNames)"\s*:')
_TOGETHER = re.compile(r'"(?:allOf|\$ref|anyOf|oneOf|if|not|dependentSchemas)"\s*:')


def _patterns_may_meet(grammar: str) -> bool:
    """Whether several patterns could apply to one text. If in doubt, returns True."""
    patterns = len(_PATTERN.findall(grammar))
    return bool(_NAME_PATTERNS.search(grammar)) or (patterns > 1 and bool(_TOGETHER.search(grammar)))
