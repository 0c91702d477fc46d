from __future__ import annotations

import llguidance

from headgate.protocol.grammar import GRAMMAR_LIMITS


def test_the_limits_of_a_grammar_are_limits_of_the_parser():
    limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
    assert all(getattr(limits, name) == value for name, value in GRAMMAR_LIMITS.items())
