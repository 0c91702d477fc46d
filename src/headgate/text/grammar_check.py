"""Checks whether a grammar can be enforced, by compiling it for a vocabulary of all bytes."""

from __future__ import annotations

import re
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headgate.protocol.grammar import GRAMMAR_LIMITS


def complaint_about(grammar: str) -> str:
    """The error of `grammar` as reported by the library that would enforce it, or ""."""
    limits = LLParserLimits(**GRAMMAR_LIMITS)
    matcher = LLMatcher(_any_bytes(), grammar, log_level=0, limits=limits)
    # A grammar that compiles may still fail at once: one that only refers to itself has no first token, and one with
    # thousands of continuations after the first brace exceeds the limits of a matcher.
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    error = matcher.get_error().removesuffix("<non-verbose/>")
    # The caller knows a schema and not the grammar around it, so a position in the grammar is of no use.
    error = re.sub(r"(?m)^(at )?\d+\(\d+\): |\n +\d+ \|.*(\n *\^)?", "", error).strip()
    return "nothing can match it" if error.startswith("NoExtension") else error


class _Bytes:
    """A vocabulary of all bytes: whether a grammar is valid does not depend on the model's tokens."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _any_bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
