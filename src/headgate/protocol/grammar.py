"""The form and the limits of grammars: the API process writes them, and the device enforces them.

A grammar is text that llguidance accepts: either its JSON (`{"grammars": [{"json_schema": ...}]}`) or Lark with its
extensions. `headgate.text.constraints` writes grammars, from schemas, patterns, tools and tags, and checks those that
clients write. The limits below bound the cost of one grammar. Both sides use the same limits, so the API refuses a
grammar that the device would give up on.
"""

from __future__ import annotations

from typing import TypedDict


class GrammarLimits(TypedDict):
    """Arguments of `llguidance.LLParserLimits`."""

    max_grammar_size: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    max_items_in_row: int
    step_max_items: int
    max_lexer_states: int
    verbose_errors: bool


GRAMMAR_LIMITS: GrammarLimits = {
    "max_grammar_size": 200_000,  # symbols, which take about a tenth of a second to compile
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 7 ms per mask
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,  # about 3 ms per mask
    "max_lexer_states": 20_000,  # up to 40 MB
    "verbose_errors": False,  # the long form repeats the whole grammar
}
