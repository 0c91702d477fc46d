"""What a grammar may be: the agreement between the edge, which writes grammars, and the worker, which enforces them.

A grammar is text in llguidance's own form, either its JSON (`{"grammars": [{"json_schema": ...}]}`) or Lark with its
extensions. `headgate.text.constraints` makes them from schemas, patterns and tools, so nobody else needs to know. The
limits below bound what one grammar can cost; both sides set the same, so the edge refuses what a worker would give up on.
"""

from __future__ import annotations

from typing import TypedDict


class GrammarLimits(TypedDict):
    """The keywords of `llguidance.LLParserLimits` that we set."""

    max_grammar_size: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    max_items_in_row: int
    step_max_items: int
    max_lexer_states: int
    verbose_errors: bool


GRAMMAR_LIMITS: GrammarLimits = {
    "max_grammar_size": 200_000,  # symbols; what takes about a tenth of a second to compile
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "step_lexer_fuel": 100_000,  # about 7 ms of one mask
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,  # about 3 ms of one mask
    "max_lexer_states": 20_000,  # up to 40 MB
    "verbose_errors": False,  # the long form repeats the whole grammar
}
