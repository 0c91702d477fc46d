"""The words of the simulated model: few tokens, many of them parts of a character, and an end that comes often enough.

The device says only the first `SPOKEN` tokens. The rest are the bytes that prompts are made of.
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
HALVES = ("é".encode(), "€".encode(), "🦊".encode())  # told byte by byte
SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS_TEXT = "<|end|>"
EOS = 0


def _spelled(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in data)


def _vocabulary() -> dict[str, int]:
    said = [EOS_TEXT, *(_spelled(piece.encode()) for piece in PIECES)]
    said += [_spelled(bytes([byte])) for half in HALVES for byte in half]
    letters = [_spelled(bytes([byte])) for byte in range(256)]
    return {token: i for i, token in enumerate(dict.fromkeys([*said, *letters, *SPECIALS]))}


SAMPLED_TOKENS = len(dict.fromkeys([EOS_TEXT, *PIECES, *(bytes([byte]) for half in HALVES for byte in half)]))
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
