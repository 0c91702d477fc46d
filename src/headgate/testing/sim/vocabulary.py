"""The vocabulary, tokenizer and chat template of the simulated model.

The vocabulary is small, many of its tokens are parts of a character, and the end-of-sequence token is sampled often.
The device samples only the first `SAMPLED_TOKENS` tokens. The rest are the single bytes that prompts consist of.
"""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headgate.testing.tiny import CHAT_TEMPLATE
from headgate.text.template import ChatTemplate
from headgate.text.tokenizer import Tokenizer

PIECES = (
    "the",
    " quick",
    " fox",
    "a",
    "b",
    "\n",
    " über",
    "ok",
    ".",
    "stop",
    " STOP",
    "ST",
    "OP",
    '"',
    "\\",
    "data: ",
)
SPLIT_CHARACTERS = ("é".encode(), "€".encode(), "🦊".encode())  # one token per byte
SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS_TEXT = "<|end|>"
EOS = 0


def _byte_level(data: bytes) -> str:
    """Return bytes in the notation of a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in data)


def _vocabulary() -> dict[str, int]:
    sampled = [EOS_TEXT, *(_byte_level(piece.encode()) for piece in PIECES)]
    sampled += [_byte_level(bytes([byte])) for character in SPLIT_CHARACTERS for byte in character]
    single_bytes = [_byte_level(bytes([byte])) for byte in range(256)]
    return {token: i for i, token in enumerate(dict.fromkeys([*sampled, *single_bytes, *SPECIALS]))}


SAMPLED_TOKENS = len(
    dict.fromkeys([EOS_TEXT, *PIECES, *(bytes([byte]) for character in SPLIT_CHARACTERS for byte in character)])
)
VOCAB_SIZE = len(_vocabulary())


@cache
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (EOS_TEXT, *SPECIALS)])
    return Tokenizer(backend, eos_token=EOS_TEXT)


@cache
def template() -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE)
