"""Builds a byte-level BPE tokenizer from the metadata of a GGUF file, without `transformers`.

GGUF stores the vocabulary and the merges, but only the name of the rule that splits text into words
(`tokenizer.ggml.pre`). The rules below cover the supported model families; if a file names another rule,
`transformers` builds its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> PreTokenizer:
    steps = [Split(Regex(pattern), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    return Steps(steps)


_PRE_TOKENIZERS = {
    "default": ByteLevel(add_prefix_space=False),
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Steps([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}

# In these tokenizers, a word that is itself a token is not split, whatever the merges.
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "tekken")


def byte_level_backend(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer described by a GGUF file; None if it is not byte-level BPE with a known rule."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(pre)
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre_tokenizer is None:
        return None
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = ByteLevelDecoder()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_added(tokens, kinds, CONTROL))
    backend.add_tokens(_added(tokens, kinds, USER_DEFINED))
    return backend


def _added(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, its_kind in zip(tokens, kinds, strict=False)
        if its_kind == kind
    ]
