"""The maximum length of text that one token can represent, which gives a minimum number of tokens for a text.

The bound holds only if every character of a text ends up in some token. Tokenizers that drop, strip or collapse text
have no bound: a megabyte of spaces may be one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

COMPOSED_CHARS = 4  # maximum number of characters that canonical composition combines into one
KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts", "FixedLength")


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """The maximum number of characters that one token can represent; None if there is no bound."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    splits = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    shrink = _shrink(list(_steps(backend.normalizer, "normalizers")))
    if shrink is None or not all(map(_keeps_all, splits)) or not _drops_no_character(backend, splits):
        return None
    return max(map(len, backend.get_vocab()), default=1) * shrink


def _steps(part: Any, members: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normaliser or pre-tokenizer, with sequences flattened."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            stack += step[members]
        else:
            yield step


def _shrink(normalizers: list[dict[str, Any]]) -> int | None:
    """The maximum number of characters that normalisation may turn into one; None if there is no bound."""
    factor = 1
    for step in normalizers:
        match step:
            case {"type": "NFC" | "NFKC"}:
                factor *= COMPOSED_CHARS
            case {"type": "Prepend" | "Lowercase" | "ByteLevel" | "NFD" | "NFKD"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
                factor *= max(1, -(-len(pattern) // len(content)))
            case _:
                return None
    return factor


def _keeps_all(split: dict[str, Any]) -> bool:
    return split["type"] in KEEP_ALL and split.get("behavior") != "Removed"


def _drops_no_character(backend: tokenizers.Tokenizer, splits: list[dict[str, Any]]) -> bool:
    """Whether every character ends up in some token, even if the vocabulary lacks it."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    knows: Callable[[str], bool] = lambda token: model.token_to_id(token) is not None  # noqa: E731
    if model.byte_fallback and all(knows(f"<0x{byte:02X}>") for byte in range(256)):
        return True
    if any(split["type"] == "ByteLevel" for split in splits):
        return all(map(knows, tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return model.unk_token is not None and knows(model.unk_token) and not model.fuse_unk
