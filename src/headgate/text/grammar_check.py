"""Checks whether a grammar can be enforced, by compiling it for a vocabulary of all bytes."""

from __future__ import annotations

import re
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headgate.protocol.grammar import GRAMMAR_LIMITS


def complaint_about(grammar: str) -> str:
    """Return the error that the enforcing library reports for `grammar`; "" if there is none."""
    limits = LLParserLimits(**GRAMMAR_LIMITS)
    matcher = LLMatcher(_any_bytes(), grammar, log_level=0, limits=limits)
    # A grammar that compiles may still fail at its first token: a grammar that only refers to itself has none, and
    # one with thousands of continuations after the first brace exceeds the limits of a matcher.
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    error = matcher.get_error().removesuffix("<non-verbose/>")
    # Remove positions: the caller knows the schema that it sent, not the grammar that was made from it.
    error = re.sub(r"(?m)^(at )?\d+\(\d+\): |\n +\d+ \|.*(\n *\^)?", "", error).strip()
    return "nothing can match it" if error.startswith("NoExtension") else error


class _Bytes:
    """A vocabulary of all bytes. It suffices, because a grammar's validity does not depend on the model's tokens."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _any_bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
