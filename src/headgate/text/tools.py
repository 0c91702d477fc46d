"""Tools that a caller declares, and the grammar of calls to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headgate.text.constraints import literal, schema_rule
from headgate.text.parsers.json_calls import Markup

# The most calls that a grammar allows: a weak model that always begins another call would otherwise never end.
MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as declared by the caller; `param` is its location in the request body, for errors."""

    name: str
    parameters: dict[str, Any]  # a JSON schema
    param: str


def call_rules(markup: Markup, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return grammar rules in which `calls` is one call of one of `tools`, or up to `MOST_CALLS` with `parallel`."""
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({literal(markup.between)} call){{0,{MOST_CALLS - 1}}}" if parallel and markup.between else ""
    rules = [f"calls: {_maybe(markup.before)} call{more} {_maybe(markup.after)}", f"call: {one}"]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{markup.arguments}": '
        # Each schema is the root of its own document, so that references stay within it.
        schema = schema_rule({"type": "object"} | tool.parameters, param=tool.param)
        rules += [f'call_{i}: {literal(head)} arguments_{i} "}}"', f"arguments_{i}: {schema}"]
    return "\n".join(rules) + "\n"


def _maybe(text: str) -> str:
    return literal(text) if text else ""
